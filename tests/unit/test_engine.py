"""generate and stream over a tiny target with prompt lookup; all tests share three executables."""

import json
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import engine, loop, run
from dflash_jax.state import Status
from dflash_jax.tokenizer import Tokenizer
from scripts.make_tiny import write_tiny_pair
from tests import kit

PROMPTS = [kit.prompt(length, seed=9) for length in (5, 12, 1, 9, 16)]
SHARED = {"batch": 2, "page_size": 16, "max_context": 96, "certify": True}


@pytest.fixture(scope="module")
def params():
    return kit.lookup(kit.pair("llama", "dflash").params)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(write_tiny_pair(tmp_path_factory.mktemp("tiny")).target)


@pytest.fixture(scope="module")
def answers(params):
    return dj.generate(params, PROMPTS, max_new_tokens=40, **SHARED)


@pytest.fixture
def no_compile(monkeypatch):
    """Fails a test that reaches the device."""

    def reached(*args, **kwargs):
        raise AssertionError("this request must be refused before anything compiles")

    monkeypatch.setattr(loop.prefill, "lower", reached, raising=False)
    monkeypatch.setattr("dflash_jax.run.loop.prefill", reached)
    monkeypatch.setattr("dflash_jax.run.loop.decode", reached)


def test_ragged_batches_give_every_prompt_its_answer_in_order(params, answers):
    assert [len(one.ids) for one in answers] == [40] * 5
    assert [one.finish_reason for one in answers] == ["length"] * 5
    assert [one.batch_index for one in answers] == [0, 0, 1, 1, 2]
    assert [one.stats.prompt_tokens for one in answers] == [(len(ids),) for ids in PROMPTS]
    # The last prompt alone, in the same executable: its neighbours made no difference.
    (alone,) = dj.generate(params, [PROMPTS[4]], max_new_tokens=40, **SHARED)
    assert alone.ids == answers[4].ids and alone.hashes == answers[4].hashes


def test_plain_decoding_gives_the_same_tokens_and_logits(params, answers):
    plain = dj.generate(params, PROMPTS, max_new_tokens=40, plain=True, **SHARED)
    assert [one.ids for one in plain] == [one.ids for one in answers]
    assert [one.hashes for one in plain] == [one.hashes for one in answers]
    assert engine.summary(answers).accepted_per_cycle > 0
    assert all(one.stats.num_drafts == 0 and one.stats.tau == 1 for one in plain)
    assert plain[0].stats.settings["executable"] == answers[0].stats.settings["executable"]


def test_counts_in_stats_add_up_to_the_tokens(answers):
    for one in answers:
        (accepted,), (committed,) = one.stats.accepted, one.stats.committed
        (proposed,), (drafted,) = one.stats.proposed, one.stats.drafted
        assert committed.sum() + 1 == len(one.ids) == len(one.hashes)
        assert np.all(accepted <= proposed) and np.all(committed - accepted <= 1)
        assert drafted.shape == (len(accepted), 7)
        position = 1
        for count, total, ids in zip(accepted, committed, drafted, strict=True):
            assert tuple(ids[:count]) == one.ids[position : position + count]
            position += total
    total = engine.summary(answers)
    assert total.num_tokens == (40,) * 5
    assert total.decode_seconds < sum(one.stats.decode_seconds for one in answers)
    assert answers[0].stats.compile_seconds > 0 == answers[1].stats.compile_seconds


@pytest.mark.parametrize("budgets", [(0, 1), (2, 7), (8, 9), (1, 1), (0, 0)], ids=str)
def test_exactly_the_budget_comes_out(params, answers, budgets):
    got = dj.generate(params, PROMPTS[:2], max_new_tokens=budgets, **SHARED)
    assert [one.ids for one in got] == [answers[i].ids[:n] for i, n in enumerate(budgets)]
    assert {one.finish_reason for one in got} == {"length"}


def test_a_budget_of_nothing_does_no_model_work(params, no_compile):
    done = []
    got = dj.generate(
        params, PROMPTS, max_new_tokens=0, on_finish=lambda i, one: done.append(i), **SHARED
    )
    assert [one.ids for one in got] == [()] * 5 and done == [0, 1, 2, 3, 4]
    assert str(engine.summary(got))


def test_a_stop_token_ends_an_answer_and_is_its_last_id(params, answers):
    # Some token that first comes up late, so that drafts were accepted before it.
    ids = answers[0].ids
    stop = max(set(ids), key=ids.index)
    first = ids.index(stop)
    got = dj.generate(params, PROMPTS[:2], max_new_tokens=40, eos_ids=[stop], **SHARED)
    assert got[0].ids == ids[: first + 1] and got[0].finish_reason == "stop"


def test_a_stop_token_is_not_in_the_text_even_if_it_is_an_ordinary_token(params, tokenizer):
    shared = {**SHARED, "tokenizer": tokenizer, "max_new_tokens": 40}
    (whole,) = dj.generate(params, "in the", eos_ids=[], **shared)
    stop = max(set(whole.ids), key=whole.ids.index)
    assert tokenizer.decode([stop])  # not a special token, which text leaves out anyway
    pieces = []
    (got,) = dj.generate(
        params, "in the", eos_ids=[stop], on_text=lambda _, piece: pieces.append(piece), **shared
    )
    assert got.ids[-1] == stop and got.finish_reason == "stop"
    assert got.text == "".join(pieces) == tokenizer.decode(got.ids[:-1])


def test_a_budget_beyond_every_integer_of_the_device_ends_at_the_context(params):
    (got,) = dj.generate(params, kit.prompt(90, seed=1), max_new_tokens=10**11, **SHARED)
    assert got.finish_reason == "context" and len(got.ids) == 6


@pytest.mark.parametrize("context", [96, 95])  # as many pages, so the same executables
@pytest.mark.parametrize("plain", [False, True], ids=["drafted", "plain"])
def test_the_context_holds_prompt_and_answer_and_ends_it(params, answers, context, plain):
    """max_context counts every token, the last one too, whose K/V is never needed."""
    where = {**SHARED, "max_context": context, "plain": plain}
    prompts = [PROMPTS[4], kit.prompt(context - 1, seed=1)]
    longest, shortest = dj.generate(params, prompts, max_new_tokens=400, **where)
    assert longest.finish_reason == shortest.finish_reason == "context"
    assert [len(longest.ids), len(shortest.ids)] == [context - 16, 1]
    assert longest.ids[:40] == answers[4].ids
    (whole,) = dj.generate(params, PROMPTS[4], max_new_tokens=context - 16, **where)
    assert whole.finish_reason == "length" and whole.ids == longest.ids


def test_the_first_token_of_a_prompt_that_waits_counts_from_the_call(answers):
    first, later = answers[0].stats, answers[2].stats  # of the second batch
    (ttft,), (queue,) = later.ttft_seconds, later.queue_seconds
    # It began when the first batch had been decoded to its end.
    assert first.ttft_seconds[0] + first.decode_seconds <= queue < ttft
    both = engine.summary(answers)
    assert both.queue_seconds[2] == queue and both.as_dict()["queue_seconds"][2] > 0
    assert "waiting" in str(both)


def test_the_second_row_of_a_batch_waits_for_the_firsts_prompt(answers):
    first, second = (one.stats for one in answers[:2])
    assert first.queue_seconds[0] < first.ttft_seconds[0] <= second.queue_seconds[0]
    assert second.queue_seconds[0] < second.ttft_seconds[0]


def test_no_time_but_that_of_compiling_holds_any(params, tokenizer, monkeypatch):
    """What a batch is loaded and ended with compiles before the clock of the first token starts."""
    job = engine.prepare(
        params,
        ["a"],
        tokenizer=tokenizer,
        max_new_tokens=4,
        batch=5,  # no other test has compiled for it
        page_size=8,
        max_context=40,
        options=loop.DecodeOptions(),
        sampling=dj.SamplingOptions(temperature=0, presence_penalty=1, stop="x"),
    )
    carriers = run.fresh_carriers(job)
    for large in (loop.prefill, loop.decode):
        monkeypatch.setattr(large, "lower", lambda *args, **static: mock.Mock(), raising=False)
    run._compile(job, job.sequences, carriers)
    assert job.report.compile_seconds > 0
    compiled = []
    listen = lambda event, seconds, **about: compiled.append(event) if "compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        state, _ = run._load_batch(job, job.sequences, carriers[1])
        run._end(state, np.ones(5, bool))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_prompts_of_a_bucket_share_one_executable(params, answers):
    before = loop.prefill._cache_size(), loop.decode._cache_size()
    for length in range(1, 17):
        budget = 1 + length % 7
        prompt = kit.prompt(length, seed=2)
        dj.generate(params, prompt, max_new_tokens=budget, eos_ids=[length], **SHARED)
    assert (loop.prefill._cache_size(), loop.decode._cache_size()) == before


def test_text_streams_as_it_is_accepted(params, tokenizer):
    shared = {**SHARED, "tokenizer": tokenizer, "eos_ids": [], "max_new_tokens": 40}
    pieces = {0: [], 1: []}
    finished = []
    got = dj.generate(
        params,
        ["in the", "on and on"],
        on_text=lambda index, piece: pieces[index].append(piece),
        on_finish=lambda index, one: finished.append((index, one.text)),
        **shared,
    )
    for index, one in enumerate(got):
        assert one.text == tokenizer.decode(one.ids) == "".join(pieces[index])
        assert len(pieces[index]) > 2
    assert sorted(finished) == [(0, got[0].text), (1, got[1].text)]
    before = loop.decode._cache_size()
    streamed = dj.stream(params, "in the", **shared)
    assert next(streamed) and "".join(streamed) in got[0].text
    assert loop.decode._cache_size() == before


def test_the_tokenizers_stop_tokens_are_the_default(params, tokenizer, answers):
    first = answers[0].ids[3]
    stops = Tokenizer(tokenizer.backend, eos_ids=(first,))
    (got,) = dj.generate(params, PROMPTS[0], max_new_tokens=40, tokenizer=stops, **SHARED)
    assert got.finish_reason == "stop" and got.ids[-1] == first


@pytest.mark.parametrize("when", [1, 2, 4])
def test_an_interrupt_leaves_the_library_usable(params, tokenizer, answers, when):
    calls = []

    def interrupt(index, piece):
        calls.append(piece)
        if len(calls) == when:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dj.generate(
            params,
            PROMPTS[:2],
            tokenizer=tokenizer,
            eos_ids=[],
            max_new_tokens=40,
            on_text=interrupt,
            **SHARED,
        )
    again = dj.generate(params, PROMPTS[:2], max_new_tokens=40, **SHARED)
    assert [one.ids for one in again] == [one.ids for one in answers[:2]]


@pytest.mark.parametrize("when", [1, 3])
def test_nothing_is_left_under_way_by_whoever_stops_early(params, tokenizer, monkeypatch, when):
    """A process that exits while the CPU computes aborts with code 134."""
    launched, waited = [], []
    decode, wait = loop.decode, jax.block_until_ready

    def recording(*args, **options):
        out, *carriers = decode(*args, **options)
        launched.append(out)
        return out, *carriers

    recording.lower = decode.lower
    monkeypatch.setattr("dflash_jax.run.loop.decode", recording)
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or wait(x))
    calls = []

    def fail(index, piece):
        calls.append(piece)
        if len(calls) == when:
            raise OSError("no space left")

    shared = {**SHARED, "tokenizer": tokenizer, "eos_ids": [], "max_new_tokens": 40}
    with pytest.raises(OSError, match="no space"):
        dj.generate(params, "in the", on_text=fail, **shared)
    assert len(waited) == 1 and (waited[0] is launched[-1] if launched else when == 1)


def test_logits_that_are_not_finite_are_one_readable_error(params):
    target = params.target
    broken = target.replace(norm=jnp.full_like(target.norm, jnp.nan))
    with pytest.raises(dj.engine.DecodeError, match="prompt 0: .* not finite after 6 tokens"):
        dj.generate(params.replace(target=broken), PROMPTS[0], max_new_tokens=4, **SHARED)


@pytest.mark.parametrize(
    "prompts, options, error, message",
    [
        ([[]], {}, ValueError, "prompt 0 is empty"),
        ([[1, 2], [307]], {}, ValueError, "prompt 1 has token id 307, outside the vocabulary"),
        ([[1, -1]], {}, ValueError, "token id -1"),
        ([[1.5]], {}, TypeError, "wanted text or a list of token ids"),
        ("text", {}, ValueError, "no tokenizer was given"),
        ([1] * 96, {}, ValueError, "has 96 tokens, wanted at most 95: the context holds 96"),
        ([1], {"max_new_tokens": -1}, ValueError, "max_new_tokens is -1"),
        ([1], {"max_new_tokens": 2.5}, TypeError, "max_new_tokens"),
        ([1], {"max_new_tokens": [1, 2]}, ValueError, "2 max_new_tokens for 1 prompt"),
        ([1], {"max_new_tokens": None}, TypeError, "max_new_tokens is None"),
        ([1], {"batch": 0}, ValueError, "batch is 0"),
        ([1], {"batch": 2.0}, TypeError, "batch is 2.0, wanted an integer"),
        ([1], {"cycles": 2.5}, TypeError, "cycles is 2.5, wanted an integer"),
        ([1], {"num_drafts": 2.0}, TypeError, "num_drafts is 2.0, wanted an integer"),
        ([1], {"page_size": 16.0}, TypeError, "page_size is 16.0, wanted an integer"),
        ([1], {"max_context": 96.5}, TypeError, "max_context is 96.5, wanted an integer"),
        ([1], {"eos_ids": 5}, TypeError, "eos_ids is 5, wanted a list of token ids"),
        ([1], {"eos_ids": ["a"]}, TypeError, "eos_ids is 'a', wanted an integer"),
        ([1], {"impl": "cuda"}, ValueError, "generate: impl is 'cuda'"),
        ([1], {"impl": "pallas"}, NotImplementedError, "generate: impl='pallas'"),
        (None, {}, TypeError, "prompts is None, wanted texts or lists of token ids"),
        ([[[1, 2], [3]]], {}, TypeError, "prompt 0 is .* wanted text or a list"),
        (b"abc", {}, TypeError, "prompts is b'abc', wanted texts"),
        ([1], {"cycles": 0}, ValueError, "cycles is 0"),
        ([1], {"num_drafts": 8}, ValueError, "num_drafts is 8"),
        ([1], {"page_size": 48}, ValueError, "page_size is 48"),
        ([1], {"max_context": 10**6}, ValueError, "max_context is 1000000"),
        ([1], {"max_context": 0}, ValueError, "max_context is 0, wanted at least 2"),
        ([1], {"max_context": -5}, ValueError, "max_context is -5, wanted at least 2"),
        ([1], {"eos_ids": [307]}, ValueError, "eos id 307 is outside"),
        ([1], {"eos_ids": range(17)}, ValueError, "17 eos_ids"),
        ([1], {"on_text": print}, ValueError, "on_text needs a tokenizer"),
        ([1], {"draft_sampling": False}, ValueError, "draft_sampling is False, but no temperature"),
        ([1], {"verify_widths": (1,)}, ValueError, r"are \[1\] and certify is True, wanted one"),
        ([1], {"verify_widths": 2}, TypeError, "verify_widths are 2, wanted a list of integers"),
        ([1], {"verify_widths": [1.5]}, TypeError, "width is 1.5, wanted an integer"),
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, dict | str) else "",
)
def test_a_request_that_cannot_be_met_is_refused_before_any_compile(
    params, no_compile, prompts, options, error, message
):
    with pytest.raises(error, match=message):
        dj.generate(params, prompts, **{"max_new_tokens": 4, **SHARED, **options})


def sizes(params, **changes):
    """What `generate` plans for SHARED."""
    wanted = {"batch": 2, "page_size": 16, "max_context": 96, "prefill_chunk": 128}
    wanted |= {"dtype": "float32"} | changes
    return dj.plan(params.target.config, params.draft.config, **wanted)


def test_carriers_by_hand_decode_to_the_same_answer(params, answers):
    fixed, options = sizes(params), dj.DecodeOptions(certify=True)
    before = loop.prefill._cache_size(), loop.decode._cache_size()
    firsts, *at = dj.start(
        params, PROMPTS[:2], fixed=fixed, max_new_tokens=[40, 10], options=options
    )
    assert [int(first.token) for first in firsts] == at[0].anchor.tolist()
    while at[0].is_active.any():
        _, *at = dj.decode(params, *at, fixed=fixed, options=options)
    for row, (prompt, count) in enumerate(zip(PROMPTS, (40, 10), strict=False)):
        ids = at[0].tokens[row, : at[0].seq_lens[row] + 1].tolist()
        assert tuple(ids) == (*prompt, *answers[row].ids[:count])
    assert (loop.prefill._cache_size(), loop.decode._cache_size()) == before


@pytest.mark.parametrize(
    "changes, prompts, options, message",
    [
        ({"dtype": "bfloat16"}, [[1]], {}, "planned for another pair: it has 2 pools of bfloat16"),
        ({}, [[1], [2], [3]], {}, "3 prompts for a batch of 2"),
        ({}, [[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({}, [[1] * 96], {}, "has 96 tokens, wanted at most 95: the context holds 96"),
    ],
    ids=["dtype", "batch", "budget", "context"],
)
def test_what_cannot_be_started_is_refused_before_any_compile(
    params, no_compile, changes, prompts, options, message
):
    with pytest.raises(ValueError, match=message):
        dj.start(params, prompts, fixed=sizes(params, **changes), **options)


def test_sizes_without_an_mtp_head_do_not_start_a_pair_that_has_one(no_compile):
    params = kit.pair("qwen3", "mtp", layers="one", block=4).params
    fixed = sizes(kit.lookup(params, 3))
    with pytest.raises(ValueError, match="of MTP heads it has none, this pair needs one"):
        dj.start(params, [[1]], fixed=fixed)
    fixed = sizes(params)
    with pytest.raises(ValueError, match="of MTP heads it has one, this pair needs none"):
        dj.start(kit.lookup(params, 3), [[1]], fixed=fixed)


def test_a_stream_without_a_tokenizer_is_refused(params):
    with pytest.raises(ValueError, match="stream: .* needs a tokenizer"):
        dj.stream(params, [1, 2], tokenizer=None)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "prompt_lookup"])
def test_no_drafts_is_a_step_of_one_row_for_every_drafter(kind):
    pair = kit.pair("llama", "dflash2" if kind == "dflash2" else "dflash").params
    pair = kit.lookup(pair) if kind == "prompt_lookup" else pair
    shared = {"max_new_tokens": 6, "page_size": 16, "max_context": 96}
    (alone,) = dj.generate(pair, PROMPTS[0], num_drafts=0, **shared)
    (drafted,) = dj.generate(pair, PROMPTS[0], **shared)
    assert alone.ids == drafted.ids and alone.stats.tau == 1


def test_ids_may_come_as_an_array_of_jax(params, answers):
    (got,) = dj.generate(params, jnp.asarray(PROMPTS[0]), max_new_tokens=4, **SHARED)
    assert got.ids == answers[0].ids[:4]


def test_sizes_may_be_integers_of_numpy(params, answers):
    sizes = {"batch": 2, "page_size": 16, "max_context": 96, "num_drafts": 7, "cycles": 8}
    asked = {name: np.int64(size) for name, size in sizes.items()}
    (got,) = dj.generate(params, [PROMPTS[0]], max_new_tokens=np.int64(4), certify=True, **asked)
    assert got.ids == answers[0].ids[:4]
    assert json.loads(got.stats.to_json())["settings"]["batch"] == 2


def test_no_prompts_give_no_answers(params, no_compile):
    assert dj.generate(params, [], **SHARED) == []


def test_a_call_after_a_longer_one_sees_nothing_of_it(params, answers):
    fresh = kit.run(
        params,
        kit.sizes(params, 2, page_size=16, max_context=96),
        [kit.Request(PROMPTS[2], 40), kit.Request(PROMPTS[3], 40)],
    )
    assert [tuple(ids) for ids in fresh.tokens] == [answers[2].ids, answers[3].ids]
    assert all(status == Status.LENGTH for status in fresh.status)


def test_carriers_are_where_the_weights_are(params):
    moved = jax.device_put(params, jax.devices()[0])  # committed, as a loader on a GPU may leave it
    before = loop.decode._cache_size()
    for _ in range(2):
        dj.generate(moved, PROMPTS[0], max_new_tokens=20, **SHARED)
    assert loop.decode._cache_size() <= before + 1
