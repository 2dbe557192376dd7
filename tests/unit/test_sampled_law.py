"""Speculative sampling follows the target exactly: by enumeration, not by sampling.

A made-up target over 8 tokens and a drafter far from it. Every draft, every outcome of an accept
test and every draw is visited with its exact probability, so the joint distribution of the first
three tokens comes out without noise; it must be what the target says by itself. The reference is
enumerated by its accept tests and residuals; the library by uniforms in the middle of every
interval over which its outcome cannot change.
"""

import itertools
from collections import Counter
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import jax
import numpy as np
import pytest

from dflash_jax import verify
from dflash_jax.drafters.proposal import Proposal, SparseQ
from dflash_jax.sampling import Purpose, SamplingState
from tests.reference import sampling

VOCAB = 8
TOKENS = 3  # whose joint distribution is compared
DRAFTS = 2
CANDIDATES = 3
TEMPERATURE, TOP_K, TOP_P, MIN_P = 0.8, 7, 0.97, 0.05

forms = pytest.mark.parametrize("form", ["point", "sparse", "full"])
cuts = pytest.mark.parametrize("has_cuts", [False, True], ids=["whole", "cut"])


def table(text, what):
    """Numbers [VOCAB] that depend on a text."""
    return np.random.default_rng([what, len(text), *text]).normal(size=VOCAB)


@cache
def logits_after(text):
    return 1.5 * table(text, 0)


@cache
def _kept_score(text):
    return table(text, 2)[0]


@cache
def target(text):
    """The target's distribution behind a text, filters and all."""
    filters = {"top_k": TOP_K, "top_p": TOP_P, "min_p": MIN_P}
    return sampling.distribution(logits_after(text), TEMPERATURE, **filters)


@cache
def drafter(text, form):
    """q behind a text, as the reference takes it, and (token, chance) of what it may draft."""
    scores = 2 * table(text, 1)
    best = np.argsort(-scores)
    if form == "point":
        return None, [(int(best[0]), 1.0)]
    q = sampling.distribution(scores, 1.0, top_k=CANDIDATES if form == "sparse" else None)
    choices = [(token, q[token]) for token in range(VOCAB) if q[token] > 0]
    if form == "sparse":
        return (best[:CANDIDATES], q[best[:CANDIDATES]]), choices
    return q, choices


def keeps(text, has_cuts):
    """Whether a draft behind a text is kept: a rule that never looks at the draft itself."""
    return not has_cuts or _kept_score(text) > -0.3


class Case(NamedTuple):
    """One way that a cycle can go."""

    prefix: tuple
    drafts: tuple  # all that the drafter drew, of which `kept` are verified
    kept: int
    accepted: int
    weight: float  # probability of the drafts and of these outcomes of the tests
    uniforms: tuple  # of the accept tests, each in the middle of its outcome's interval
    rest: np.ndarray  # distribution of the token behind the accepted drafts


def cases(prefix, form, has_cuts):
    """Every way that the cycle behind a prefix can go, the last token not drawn yet."""
    for drafts, weight in blocks(prefix, form):
        texts = [prefix + drafts[:j] for j in range(DRAFTS + 1)]
        kept = next((j for j in range(DRAFTS) if not keeps(texts[j], has_cuts)), DRAFTS)
        qs = [drafter(text, form)[0] for text in texts[:kept]]
        p = [target(text) for text in texts[: kept + 1]]
        for accepted in range(kept + 1):
            uniforms, chance = [], weight
            for j in range(min(accepted + 1, kept)):
                edge = min(1.0, p[j][drafts[j]] / sampling.probability(qs[j], drafts[j]))
                low, high = (0.0, edge) if j < accepted else (edge, 1.0)
                uniforms.append((low + high) / 2)
                chance *= high - low
            if chance == 0:
                continue
            used = len(uniforms)
            count, rest = sampling.accept(p[: used + 1], qs[:used], drafts[:used], uniforms)
            assert count == accepted
            yield Case(prefix, drafts, kept, accepted, chance, tuple(uniforms), rest)


def blocks(prefix, form):
    """Every block that the drafter may draw, with its probability."""
    found = [((), 1.0)]
    for _ in range(DRAFTS):
        found = [
            ((*drafts, token), weight * chance)
            for drafts, weight in found
            for token, chance in drafter(prefix + drafts, form)[1]
        ]
    return found


def joint(outcomes):
    """Distribution of the first tokens, from {prefix: [(tokens of a cycle, probability)]}."""
    law = np.zeros((VOCAB,) * TOKENS)
    merged = {prefix: Counter() for prefix in outcomes}
    for prefix, found in outcomes.items():
        for tokens, chance in found:
            merged[prefix][tokens] += chance

    def follow(prefix, weight):
        for tokens, chance in merged[prefix].items():
            text = prefix + tokens
            if len(text) >= TOKENS:
                law[text[:TOKENS]] += weight * chance
            else:
                follow(text, weight * chance)

    follow((), 1.0)
    return law


def direct():
    """The same by the target alone."""
    law = np.zeros((VOCAB,) * TOKENS)
    for text in itertools.product(range(VOCAB), repeat=TOKENS):
        law[text] = np.prod([target(text[:i])[text[i]] for i in range(TOKENS)])
    return law


def prefixes():
    texts = (itertools.product(range(VOCAB), repeat=size) for size in range(TOKENS))
    return list(itertools.chain.from_iterable(texts))


@cuts
@forms
def test_the_reference_gives_the_targets_joint_distribution(form, has_cuts):
    outcomes = {
        prefix: [
            ((*case.drafts[: case.accepted], token), case.weight * case.rest[token])
            for case in cases(prefix, form, has_cuts)
            for token in range(VOCAB)
        ]
        for prefix in prefixes()
    }
    law = joint(outcomes)
    np.testing.assert_allclose(law, direct(), atol=1e-13)
    if has_cuts:
        assert {case.kept for p in prefixes() for case in cases(p, form, True)} == {0, 1, 2}


@cuts
@forms
def test_the_compiled_verification_gives_the_targets_joint_distribution(form, has_cuts):
    every = point_mass_draws(has_cuts) if form == "point" else drawn_drafts(form, has_cuts)
    count, committed = verified(
        form, [case for case, *_ in every], [noise for _, noise, *_ in every]
    )
    outcomes = {prefix: [] for prefix in prefixes()}
    for i, (case, _, tokens, weight) in enumerate(every):
        got = tuple(committed[i, : count[i] + 1].tolist())
        assert got == tokens, f"{case} gives {got}, not {tokens}"
        outcomes[case.prefix].append((got, weight))
    np.testing.assert_allclose(joint(outcomes), direct(), atol=1e-13)


@forms
def test_a_verification_of_fewer_rows_gives_what_the_full_one_gives(form):
    """Cycles whose kept drafts fit into a narrower call: the law is the one shown above."""
    every = point_mass_draws(True) if form == "point" else drawn_drafts(form, True)
    for drafts in range(DRAFTS):
        fitting = [(case, noise) for case, noise, *_ in every if case.kept <= drafts]
        assert len({case.kept for case, _ in fitting}) == drafts + 1
        cases, noises = zip(*fitting, strict=True)
        count, committed = verified(form, cases, noises)
        narrow_count, narrow = verified(form, cases, noises, drafts=drafts)
        np.testing.assert_array_equal(narrow_count[: len(cases)], count[: len(cases)])
        for i in range(len(cases)):
            assert narrow[i, : count[i] + 1].tolist() == committed[i, : count[i] + 1].tolist()


def shares(p):
    """(token, middle of its share of a draw) of every token that has one."""
    ends = np.cumsum(p)
    return [(t, (ends[t] - p[t] / 2) / ends[-1]) for t in range(VOCAB) if p[t] > 0]


def drawn_drafts(form, has_cuts):
    """Every case and last token of drafts that were drawn: case, noise, tokens, probability."""
    return [
        (
            case,
            {
                Purpose.ACCEPT: case.uniforms,
                Purpose.RESIDUAL: (u,) * (DRAFTS + 1),
                Purpose.TARGET: (u,) * (DRAFTS + 1),
            },
            (*case.drafts[: case.accepted], token),
            case.weight * case.rest[token],
        )
        for prefix in prefixes()
        for case in cases(prefix, form, has_cuts)
        for token, u in shares(case.rest)
    ]


def point_mass_draws(has_cuts):
    """The same where the target draws every row and keeps drafts that it hits."""
    found = []
    for case in (case for prefix in prefixes() for case in cases(prefix, "point", has_cuts)):
        p = [target(case.prefix + case.drafts[:j]) for j in range(case.accepted + 1)]
        middles = [dict(shares(row)) for row in p]
        hits = [middles[j][case.drafts[j]] for j in range(case.accepted)]
        chance = np.prod([p[j][case.drafts[j]] for j in range(case.accepted)])
        for token, u in middles[case.accepted].items():
            if case.accepted < case.kept and token == case.drafts[case.accepted]:
                continue  # that is the case which accepts one more
            noise = {Purpose.TARGET: (*hits, u)}
            tokens = (*case.drafts[: case.accepted], token)
            found.append((case, noise, tokens, chance * p[case.accepted][token]))
    return found


def verified(form, every, noise, drafts=DRAFTS):
    """num_accepted and committed tokens of `verify` for a batch of cases, by `drafts` a call."""
    size = -(-len(every) // 2048) * 2048  # few shapes to compile
    tokens = np.zeros((size, DRAFTS), np.int32)
    logits = np.zeros((size, DRAFTS + 1, VOCAB), np.float32)
    uniforms = {
        purpose: np.full((size, DRAFTS + (purpose != Purpose.ACCEPT)), 0.5, np.float32)
        for purpose in Purpose
    }
    rows = np.ones(size, np.int32)
    dense = np.zeros((size, DRAFTS, VOCAB), np.float32)
    ids = np.zeros((size, DRAFTS, CANDIDATES), np.int32)
    probs = np.zeros((size, DRAFTS, CANDIDATES), np.float32)
    for i, (case, own) in enumerate(zip(every, noise, strict=True)):
        tokens[i], rows[i] = case.drafts, case.kept + 1
        for j in range(DRAFTS + 1):
            logits[i, j] = logits_after(case.prefix + case.drafts[:j])
        for purpose, values in own.items():
            uniforms[purpose][i, : len(values)] = values
        for j in range(DRAFTS):
            q = drafter(case.prefix + case.drafts[:j], form)[0]
            if form == "sparse":
                ids[i, j], probs[i, j] = q
            elif form == "full":
                dense[i, j] = q
    q = {"point": None, "sparse": SparseQ(ids, probs), "full": dense}[form]
    proposal = verify._leading_drafts(Proposal(tokens, rows - 1, q), drafts)
    logits = logits[:, : drafts + 1].reshape(-1, VOCAB)
    committed, count = _choose(logits, proposal, rows, uniforms)
    return np.asarray(count), np.asarray(committed)


@jax.jit
def _choose(logits, proposal, rows, noise):
    size = rows.shape[0]
    every = {
        "temperature": np.full(size, TEMPERATURE, np.float32),
        "top_k": np.full(size, TOP_K, np.int32),
        "top_p": np.full(size, TOP_P, np.float32),
        "min_p": np.full(size, MIN_P, np.float32),
    }
    state = SimpleNamespace(
        seq_lens=np.zeros(size, np.int32),
        sampling=SamplingState(keys=np.zeros((size, 2), np.uint32), **every),
    )

    def given(keys, positions, purpose):
        return noise[purpose][:, : positions.shape[1]]

    with (
        mock.patch("dflash_jax.verify.uniforms", given),
        mock.patch("dflash_jax.distribution.uniforms", given),
    ):
        return verify._choose(logits, proposal, rows, state, VOCAB)
