"""Narrower compiled widths: fewer rows for the target, the same text.

Bits may differ between widths, so nothing here compares bits. Each token is held against the f64
reference of the target, whose choice must lead by far more than rounding can move.
"""

from unittest import mock

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import loop, targets
from dflash_jax.drafters.confidence import with_scheduler, with_threshold
from dflash_jax.options import DecodeOptions
from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")

LEAD = 10 * kit.TOLERANCE  # of a choice, over the largest logit; f32 errs by less than a tenth


@pytest.fixture
def ran(monkeypatch):
    """Rows of each call of the target that was really run, as the device reports them."""
    found, forward = [], targets.forward

    def counted(params, tokens, *args, **how):
        if not how["is_prefill"]:
            jax.debug.callback(lambda rows=tokens.shape[0]: found.append(rows))
        return forward(params, tokens, *args, **how)

    with mock.patch("dflash_jax.verify.targets.forward", counted):
        yield found


def scheduler():
    """A hybrid target, whose states must know which rows there were; rows shared by the batch."""
    pair = kit.pair("qwen3_5", "dspark", layers="one", block=8)
    rates = [1 / (1 + price * np.arange(25)) for price in (0.0, 0.1)]
    return pair, *(with_scheduler(pair.params.draft, rate) for rate in rates), None, (1, 3)


def residual():
    """A head that reads the residual rows of the step before, told what to keep of its drafts."""
    pair = kit.pair("llama", "mtp", layers="residual", block=8)
    return pair, pair.params.draft, pair.params.draft, np.array([1, 2, 1]), (2,)


def decode_with(params, draft, fixed, requests, widths, chunks, **how):
    def decode(params, *at, **static):
        out, *at = dj.decode(params, *at, **static)
        chunks.append(jax.device_get(out))
        return out, *at

    options = DecodeOptions(cycles=8, verify_widths=widths)
    params = params.replace(draft=draft)
    return kit.run(params, fixed, requests, options=options, decode=decode, **how)


@pytest.mark.parametrize("case", [scheduler, residual])
def test_a_cycle_runs_the_narrowest_width_that_holds_what_is_verified(case, ran):
    pair, every, few, keep, narrower = case()
    fixed = kit.sizes(pair.params, 3)
    requests = kit.ragged(3)
    whole = decode_with(pair.params, every, fixed, requests, narrower, [])
    jax.effects_barrier()
    assert max(ran) == 3 * 8
    ran.clear()
    chunks, widths, wanted = [], [], []
    got = decode_with(pair.params, few, fixed, requests, narrower, chunks, keep=keep)
    jax.effects_barrier()
    for out in chunks:
        for cycle in range(out.num_cycles):
            most = 1 + out.num_proposed[cycle].max()
            wanted.append(next(w for w in (*narrower, 8) if w >= most))
            widths.append(int(out.widths[cycle]))
    assert widths == wanted and len(set(widths)) > 1
    assert sorted(ran) == sorted(3 * width for width in widths)
    assert any(count > 1 for row in got.committed for count in row), "no draft was accepted"
    for row, (request, tokens) in enumerate(zip(requests, got.tokens, strict=True)):
        assert_the_targets_own(pair.target, list(request.prompt), tokens)
        assert tokens == whole.tokens[row] and got.status[row] == whole.status[row]
        caches = kit.committed_kv(got.carriers, row), kit.committed_kv(whole.carriers, row)
        for a, b in zip(*caches, strict=True):
            kit.assert_close(a, b, f"K/V of sequence {row}")


def assert_the_targets_own(target, prompt, tokens):
    """Each token leads the target's logits behind the text before it, whatever rounds."""
    logits = target.forward(prompt + tokens[:-1]).logits[len(prompt) - 1 :]
    assert logits.argmax(axis=1).tolist() == tokens
    best, second = np.sort(logits, axis=1)[:, :-3:-1].T
    assert ((best - second) > LEAD * np.abs(logits).max()).all()


def test_sampled_answers_say_only_what_the_filters_leave_and_stats_say_the_rows(ran):
    """Drafts that are drawn, cut by a threshold, through `generate`."""
    pair = kit.pair(kind="dspark", layers="one", block=4, alphabet=8)
    params = pair.params.replace(draft=with_threshold(pair.params.draft, 0.6))
    asked = dj.SamplingOptions(temperature=1.0, top_k=2, seed=3)
    sizes = {"batch": 2, "page_size": 16, "max_context": 64, "max_new_tokens": 24}
    prompts = [kit.prompt(5), kit.prompt(9)]
    answers = dj.generate(params, prompts, sampling=asked, verify_widths=[2], **sizes)
    jax.effects_barrier()
    seen = set()
    for prompt, one in zip(prompts, answers, strict=True):
        logits = pair.target.forward([*prompt, *one.ids[:-1]]).logits[len(prompt) - 1 :]
        second = np.sort(logits, axis=1)[:, -2]
        chosen = np.take_along_axis(logits, np.array(one.ids)[:, None], axis=1)[:, 0]
        assert (chosen >= second - LEAD * np.abs(logits).max()).all()
        assert (chosen < second + 1e-9).any(), "always the best token: nothing was drawn"
        stats = one.stats
        (widths,), (proposed,) = stats.widths, stats.proposed
        assert (widths > proposed).all() and stats.rows_per_cycle == widths.mean()
        assert stats.settings["verify_widths"] == [2, 4] and "rows verified" in str(stats)
        assert stats.accepted_per_cycle > 0
        seen |= set(widths.tolist())
    assert len(seen) > 1 and {2 * width for width in seen} <= set(ran) <= {4, 8}


def test_widths_that_cannot_be_or_change_nothing_are_refused_before_any_compile(monkeypatch):
    monkeypatch.setattr(loop.prefill, "lower", None, raising=False)
    params = kit.pair(kind="dspark", layers="one").params
    sure = params.replace(draft=with_threshold(params.draft, 0.6))
    for widths in ((0, 2), np.array([2, 1]), (2, 2), (4, 8)):
        with pytest.raises(ValueError, match=r"wanted ascending numbers from 1 to 7: a full step"):
            dj.generate(sure, [1], verify_widths=widths)
    with pytest.raises(ValueError, match="the dspark drafter always proposes every draft, wanted"):
        dj.generate(params, [1], verify_widths=(1,))
    every = params.replace(draft=with_threshold(params.draft, 0.0))
    with pytest.raises(ValueError, match="cuts them: .*a threshold of 0 cuts none"):
        dj.generate(every, [1], verify_widths=(1,))
    with pytest.raises(ValueError, match="a step without drafts has one row, wanted none"):
        dj.generate(kit.lookup(params), [1], num_drafts=0, verify_widths=(1,))
