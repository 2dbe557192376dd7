"""Sampling through the compiled loop: the law of the target, and that of plain decoding.

About 45 CPU seconds, nearly all of it compiling.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import drafters, loop
from dflash_jax.options import DecodeOptions
from dflash_jax.sampling import SamplingOptions, mode_of, sampling_state
from dflash_jax.scratch import init_scratch
from dflash_jax.state import Status, init_buffers
from tests import kit
from tests.reference import sampling as reference

pytestmark = [pytest.mark.usefixtures("strict_dtypes"), pytest.mark.slow]


# The joint distribution of three tokens behind one prompt

PROMPT = kit.prompt(1)
TOKENS = 3
ROWS, REPEATS = 96, 8  # sequences a batch, batches
FILTERS = {
    0.5: {"top_k": 6, "top_p": 0.98, "min_p": 0.02},
    1.0: {"top_k": 7, "top_p": 0.9, "min_p": 0.05},
    2.0: {"top_k": 5, "top_p": 0.95, "min_p": 0.2},
}
P_VALUE = 1e-4  # seeds are fixed, so a right loop passes always


def pair(kind):
    """A target of eight usual tokens; a drafter that is not made for it."""
    kind = "dflash" if kind == "prompt_lookup" else kind
    return kit.pair("qwen3", kind, layers="one", block=4, alphabet=8)


@cache
def joint(temperature):
    """{three tokens: probability} behind the prompt, by the reference's target."""
    target = pair("dflash").target

    def follow(text):
        if len(text) == len(PROMPT) + TOKENS:
            return {text[len(PROMPT) :]: 1.0}
        logits = target.forward(list(text)).logits[-1]
        p = reference.distribution(logits, temperature, **FILTERS[temperature])
        return {
            tokens: p[token] * rest
            for token in np.flatnonzero(p).tolist()
            for tokens, rest in follow((*text, token)).items()
        }

    return follow(PROMPT)


def p_value(counts, law):
    """Chance of a chi-square at least as large; bins that expect fewer than five are joined."""
    total = sum(counts.values())
    assert counts.keys() <= law.keys(), "a token that the filters leave out"
    expected = np.array([total * p for p in law.values()])
    found = np.array([counts.get(tokens, 0) for tokens in law])
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    found = np.append(found[~small], found[small].sum())
    statistic = np.sum((found - expected) ** 2 / np.maximum(expected, 1e-9))
    freedom = len(expected) - 1
    return float(jax.scipy.special.gammaincc(freedom / 2, np.float32(statistic / 2)))


@pytest.mark.parametrize("kind", [*kit.KINDS, "prompt_lookup"])
def test_three_sampled_tokens_follow_the_target_whatever_drafts(kind):
    """Known faults A30 and B18: at any temperature, with filters on the target."""
    params, temperatures = pair(kind).params, list(FILTERS)
    np.testing.assert_array_equal(params.target.lm_head, pair("dflash").params.target.lm_head)
    if kind == "prompt_lookup":
        params = kit.with_rule(params, dj.prompt_lookup_drafter(num_drafts=3, ngram=1))
    draws = drafters.draws_drafts(params.draft.config) is not None
    requests = [
        SamplingOptions(temperature=t, **FILTERS[t])
        for t in temperatures * (ROWS // len(temperatures))
    ]
    mode = mode_of(requests, samples_drafts=draws)
    options = DecodeOptions(cycles=TOKENS, sampling=mode)
    fixed = kit.sizes(params, ROWS, page_size=16, max_context=16, prefill_chunk=16)
    at = waiting(params, fixed)
    counts, accepted = {t: {} for t in temperatures}, []
    for repeat in range(REPEATS):
        state, *rest = jax.tree.map(jnp.copy, at)
        own = [replace(one, seed=1000 * repeat + row) for row, one in enumerate(requests)]
        sizes = {"batch": ROWS, "vocab": fixed.logits.shape[1]}
        state = state.replace(sampling=sampling_state(mode, own, **sizes))
        out, state, *_ = loop.decode(params, state, *rest, fixed=fixed, options=options)
        assert np.all(np.asarray(state.status) == Status.LENGTH)
        accepted.append(np.asarray(out.num_accepted))
        tokens = np.asarray(state.tokens)[:, len(PROMPT) : len(PROMPT) + TOKENS]
        for one, row in zip(own, tokens.tolist(), strict=True):
            mine = counts[one.temperature]
            mine[tuple(row)] = mine.get(tuple(row), 0) + 1
    for t in temperatures:
        assert p_value(counts[t], joint(t)) > P_VALUE, f"T = {t}"
    # The test has power: the tokens of one temperature are not those of another.
    assert p_value(counts[1.0], mixed(1.0, 0.5)) < 1e-9
    if draws:
        assert 0 < np.mean(np.array(accepted) > 0) < 1, "drafts are always right, or always wrong"


def mixed(support, other):
    """The law of `other` on the tokens of `support`, so that no bin is impossible."""
    law = {tokens: joint(other).get(tokens, 0.0) + 1e-3 for tokens in joint(support)}
    total = sum(law.values())
    return {tokens: p / total for tokens, p in law.items()}


def waiting(params, fixed):
    """Carriers of sequences whose prompt is their anchor, so that no prefill is compiled."""
    requests = [kit.Request(PROMPT, TOKENS)] * ROWS
    fresh = init_buffers(fixed), init_scratch(params.draft.config, fixed=fixed)
    state, *rest = kit.carriers(params, fixed, requests, worn=fresh)
    return state.replace(
        tokens=state.tokens.at[:, 0].set(PROMPT[0]),
        anchor=jnp.full_like(state.anchor, PROMPT[0]),
        status=jnp.full_like(state.status, int(Status.ACTIVE)),
    ), *rest
