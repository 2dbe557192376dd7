"""Known faults A30, A33 and B26: seeds, drafts at a temperature, penalties that are ignored.

Nearly all calls of `generate` share two executables, in which every option is compiled. About 20
CPU seconds.
"""

from dataclasses import replace

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import loop
from dflash_jax.sampling import SamplingOptions
from tests import kit
from tests.reference import sampling as reference

PROMPTS = [kit.prompt(length, seed=9) for length in (5, 12, 1, 9)]
SHARED = {"batch": 2, "page_size": 16, "max_context": 96, "certify": True}
BUDGET = 30
# An option of every kind, so that each job compiles all of them.
EVERY = SamplingOptions(
    temperature=1.0,
    top_k=40,
    top_p=0.95,
    min_p=0.001,
    presence_penalty=-0.2,
    frequency_penalty=-0.3,
    repetition_penalty=1.2,
    logit_bias={3: 0.5},
    logprobs=True,
    seed=0,
)
BEST = SamplingOptions(temperature=0, logprobs=True)


@pytest.fixture(scope="module")
def pair():
    return kit.pair("llama", "dflash")


@pytest.fixture(scope="module")
def params(pair):
    return kit.with_rule(pair.params, dj.prompt_lookup_drafter(num_drafts=7, ngram=1))


def generate(params, prompts, sampling, **how):
    how = {"max_new_tokens": BUDGET} | SHARED | how
    return dj.generate(params, prompts, sampling=sampling, **how)


def test_at_any_temperature_drafted_and_plain_decoding_are_the_same_tokens_and_bits(params):
    """A30: a draft is kept where it is the target's own draw, never by chance alone."""
    sampling = [replace(EVERY, seed=n, temperature=t) for n, t in enumerate((0.3, 1.0, 2.0))]
    sampling.append(BEST)
    drafted = generate(params, PROMPTS, sampling)
    plain = generate(params, PROMPTS, sampling, plain=True)
    for one, other in zip(drafted, plain, strict=True):
        assert one.ids == other.ids and one.hashes == other.hashes
        assert one.logprobs == other.logprobs and one.seed == other.seed
    assert sum(one.stats.accepted[0].sum() for one in drafted) > 0
    assert len({one.ids for one in drafted}) == len(PROMPTS)


def test_a_row_at_temperature_zero_in_a_sampled_batch_is_greedy(params):
    got = generate(params, PROMPTS[:2], [BEST, EVERY])
    alone = generate(params, PROMPTS[:1], None, certify=False)
    assert got[0].ids == alone[0].ids and got[0].seed is None


def test_a_seed_gives_its_answer_in_any_row_beside_any_neighbour_and_again(params):
    """A33."""
    sampling = [replace(EVERY, seed=n) for n in range(4)]
    want = generate(params, PROMPTS, sampling)
    compiled = loop.decode._cache_size(), loop.prefill._cache_size()
    turned = generate(params, PROMPTS[::-1], sampling[::-1])[::-1]
    other = [replace(EVERY, seed=77, temperature=1.7), sampling[1]]
    beside = generate(params, [PROMPTS[3], PROMPTS[1]], other)
    assert (loop.decode._cache_size(), loop.prefill._cache_size()) == compiled
    assert [one.ids for one in turned] == [one.ids for one in want]
    assert [one.hashes for one in turned] == [one.hashes for one in want]
    assert beside[1].ids == want[1].ids
    alone = generate(params, PROMPTS[1], sampling[1], batch=1)
    assert alone[0].ids == want[1].ids  # another executable, in f32


def test_other_seeds_give_other_answers_and_no_seed_one_of_its_own(params):
    """A33: requests without a seed are not alike, and each can be had again by the seed it got."""
    two = generate(params, [PROMPTS[0]] * 2, [replace(EVERY, seed=n) for n in (1, 2)])
    assert two[0].ids != two[1].ids
    same = generate(params, [PROMPTS[0]] * 2, replace(EVERY, seed=1))
    assert same[0].ids == same[1].ids == two[0].ids
    free = generate(params, [PROMPTS[0]] * 2, replace(EVERY, seed=None))
    assert free[0].ids != free[1].ids
    again = generate(params, [PROMPTS[0]] * 2, [replace(EVERY, seed=one.seed) for one in free])
    assert [one.ids for one in again] == [one.ids for one in free]


def test_penalties_and_bias_are_those_of_plain_decoding_also_inside_a_block(pair, params):
    """B26: with a reward for what was said, so that blocks of repeated tokens are accepted."""
    rewards = {"presence": -0.2, "frequency": -0.35, "repetition": 0.9}
    asked = SamplingOptions(
        temperature=0,
        logit_bias={3: 0.5},
        **{f"{name}_penalty": value for name, value in rewards.items()},
    )
    got, _ = generate(params, PROMPTS[:2], [asked, EVERY])
    text, answer = list(PROMPTS[0]), []
    for token, logprob in zip(got.ids, got.logprobs or BUDGET * [None], strict=True):
        logits = pair.target.forward(text + answer).logits[-1]
        x = reference.penalised(logits, text, answer, bias=[(3, 0.5)], **rewards)
        assert token == x.argmax()
        assert logprob is None
        answer.append(token)
    position, repeats = 1, 0
    for count in got.stats.committed[0]:
        block = got.ids[position : position + count]
        repeats += len(set(block)) < len(block)
        position += count
    assert repeats, "no block repeats a token: this shows nothing"


def test_log_probabilities_are_the_models_own_before_filters_and_penalties(pair, params):
    got, _ = generate(params, PROMPTS[:2], [EVERY, BEST])
    for at, (token, logprob) in enumerate(zip(got.ids, got.logprobs, strict=True)):
        logits = pair.target.forward([*PROMPTS[0], *got.ids[:at]]).logits[-1]
        want = logits[token] - np.logaddexp.reduce(logits)
        assert abs(logprob - want) < 1e-4


def test_a_greedy_step_carries_and_computes_nothing_of_sampling(params):
    fixed = kit.sizes(params, 2)
    at = kit.carriers(params, fixed, [])
    assert at[0].sampling is None
    text = loop.decode.lower(params, *at, fixed=fixed, options=kit.OPTIONS).as_text()
    assert "threefry" not in text and "exponential" in text  # of attention
    names = [str(path) for path, _ in jax.tree_util.tree_leaves_with_path(at[0])]
    assert names and not any("sampling" in name for name in names)


@pytest.mark.parametrize(
    ("sampling", "how", "error", "words"),
    [
        ([BEST], {}, ValueError, "1 sampling option for 2 prompts"),
        ({"temperature": 1}, {}, ValueError, "1 sampling option for 2 prompts"),
        ([1, 2], {}, TypeError, "sampling is 1, wanted SamplingOptions"),
        (replace(BEST, logit_bias={9999: 1}), {}, ValueError, "logit_bias has token id 9999"),
        (replace(BEST, stop="x"), {}, ValueError, "texts need a tokenizer"),
        (EVERY, {"draft_sampling": 1}, TypeError, "draft_sampling is 1, wanted True"),
        (EVERY, {"draft_sampling": True}, ValueError, "'prompt_lookup' has no distribution"),
    ],
    ids=str,
)
def test_a_request_that_cannot_be_met_is_refused_before_any_compile(
    params, sampling, how, error, words, monkeypatch
):
    monkeypatch.setattr("dflash_jax.run.loop.prefill", None)
    with pytest.raises(error, match=words):
        generate(params, PROMPTS[:2], sampling, **how)


def test_drawing_drafts_without_a_temperature_contradicts_itself(pair):
    with pytest.raises(ValueError, match="draft_sampling is True, but no temperature is above 0"):
        generate(pair.params, PROMPTS[:2], BEST, draft_sampling=True)


def test_a_step_by_hand_needs_the_options_that_its_requests_ask_for(params):
    fixed = kit.sizes(params, 2)
    with pytest.raises(ValueError, match="sampling asks for is_random, .* options.sampling leaves"):
        dj.start(params, PROMPTS[:2], fixed=fixed, sampling=EVERY)
