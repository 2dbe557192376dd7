"""Where sequences end: stop tokens, budgets, the context. About 20 CPU seconds."""

import numpy as np
import pytest

from dflash_jax.state import Status
from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")

GAMMA = 7
LONG = 3 * (GAMMA + 1)


def rollout(family, prompts):
    """The target, sizes for an oracle, and the plain continuation of three prompts."""
    params = kit.pair(family, alphabet=kit.ANY_ID).params
    blind = kit.oracle(params, kit.UNKNOWN)
    fixed = kit.standard(blind)
    want = kit.plain(blind, fixed, [kit.Request(one, LONG) for one in prompts])
    return params, fixed, want


def batches(values, size=3):
    """Slices of `size`, the last one filled up."""
    values = [*values, *[values[-1]] * (-len(values) % size)]
    return [values[at : at + size] for at in range(0, len(values), size)]


def _first_occurrences(text):
    """Indices of two blocks' tokens that no earlier token equals, so that a stop can land there."""
    return [at for at, token in enumerate(text[: 2 * GAMMA + 4]) if token not in text[:at]]


def _offsets(indices):
    """Places in a block: 0 to 6 are drafts, 7 is the bonus. Index 0 comes from the prefill."""
    return {(at - 1) % (GAMMA + 1) for at in indices if at}


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_a_stop_token_ends_the_text_wherever_in_a_block_it_lands(family):
    """Known fault A01: at every offset of two blocks, the first token and the bonus included."""
    prompts = [kit.prompt(9, seed) for seed in range(3)]
    params, fixed, want = rollout(family, prompts)
    firsts = [_first_occurrences(text) for text in want.tokens]
    row = next(row for row, at in enumerate(firsts) if _offsets(at) == set(range(GAMMA + 1)))
    text, hashes, known = want.tokens[row], want.hashes[row], kit.history(want)[[row] * 3]
    for ends in batches(firsts[row]):
        requests = [kit.Request(prompts[row], LONG, stop_ids=(300, text[at])) for at in ends]
        for poison in (None, 2):
            oracle = kit.oracle(params, known, poison)
            got = kit.run(oracle, fixed, requests)
            assert got.tokens == [text[: at + 1] for at in ends]
            assert got.hashes == [hashes[: at + 1] for at in ends]
            assert got.status == [Status.STOP] * 3
        assert kit.plain(oracle, fixed, requests).tokens == got.tokens


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_a_budget_is_met_exactly_and_never_exceeded(family):
    """Known fault B02, from the smallest budget that does any model work."""
    prompts = [kit.prompt(5), kit.prompt(8), kit.prompt(13)]
    params, fixed, want = rollout(family, prompts)
    for budgets in batches([1, 2, 3, GAMMA, GAMMA + 1, GAMMA + 2, GAMMA + 3, 2 * GAMMA + 3, LONG]):
        requests = [kit.Request(one, n) for one, n in zip(prompts, budgets, strict=True)]
        for poison in (None, 0, 3):
            got = kit.run(kit.oracle(params, kit.history(want), poison), fixed, requests)
            assert got.tokens == [text[:n] for text, n in zip(want.tokens, budgets, strict=True)]
            assert got.status == [Status.LENGTH] * 3
            assert np.asarray(got.carriers[0].remaining).tolist() == [0, 0, 0]


@pytest.mark.parametrize("family", kit.FAMILIES)
def test_the_context_limit_ends_the_text_inside_a_block(family):
    """The last token needs no key, so one more comes out than the pages hold."""
    prompts = [kit.prompt(10)] * 3
    params, fixed, want = rollout(family, prompts)
    for limits in batches(range(10, 10 + 2 * GAMMA + 3)):
        requests = [kit.Request(prompts[0], LONG, max_len=limit) for limit in limits]
        for poison in (None, 3):
            got = kit.run(kit.oracle(params, kit.history(want), poison), fixed, requests)
            assert got.tokens == [want.tokens[0][: limit + 1 - 10] for limit in limits]
            assert got.status == [Status.CONTEXT] * 3
            assert np.asarray(got.carriers[0].seq_lens).tolist() == limits


def test_the_context_ends_where_the_pages_do_and_no_other_page_is_touched():
    prompt = kit.prompt(10)
    params, fixed, want = rollout("qwen3", [prompt] * 3)
    requests = [kit.Request(prompt, LONG)] * 2
    pages = [[5, 1, 8], [0, 7, 2, 4]]
    oracle = kit.oracle(params, kit.history(want))
    got = kit.run(oracle, fixed, requests, pages=pages)
    assert got.tokens == [want.tokens[0][:3], want.tokens[0][:7]]
    assert got.status == [Status.CONTEXT] * 2
    for pool in got.carriers[1].k_pools + got.carriers[1].v_pools:
        touched = ~np.isnan(np.asarray(pool)).all(axis=(1, 2, 3))
        assert np.flatnonzero(touched).tolist() == [0, 1, 2, 4, 5, 7, 8]


def test_which_reason_wins_when_several_meet():
    """A stop token before a used-up budget, a budget before a full context."""
    prompt = kit.prompt(9)
    params, fixed, want = rollout("qwen3", [prompt] * 3)
    text = want.tokens[0]
    last = next(at for at in range(5, 12) if text[at] not in text[:at])
    requests = [
        kit.Request(prompt, last + 1, stop_ids=(text[last],), max_len=9 + last),
        kit.Request(prompt, last + 1, max_len=9 + last),
        kit.Request(prompt, last + 2, max_len=9 + last),
    ]
    got = kit.run(kit.oracle(params, kit.history(want)), fixed, requests)
    assert got.tokens == [text[: last + 1]] * 3
    assert got.status == [Status.STOP, Status.LENGTH, Status.CONTEXT]
