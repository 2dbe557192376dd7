"""Drafts that are drawn: DFlash2's walk, against the reference (known fault B18)."""

import jax
import numpy as np
import pytest

from dflash_jax.drafters.choice import Draws
from dflash_jax.drafters.dflash2 import Lattice, sampled_walk
from dflash_jax.params import SelectorParams
from pallas_kernels import MASK_VALUE
from tests.reference import dflash2

pytestmark = pytest.mark.usefixtures("strict_dtypes")

BATCH, ROWS, VOCAB, RANK, TOP_K = 3, 5, 40, 6, 9
TEMPERATURES = np.array([0.5, 0.0, 2.0], np.float32)  # the second sequence takes the best


def lattice(rng):
    """Hidden rows and logits, and what `top16` makes of them: masked from TOP_K on."""
    logits = rng.normal(size=(BATCH, ROWS, VOCAB)).astype(np.float32)
    hidden = rng.normal(size=(BATCH, ROWS, RANK)).astype(np.float32)
    ids = np.argsort(-logits, axis=2, kind="stable")[:, :, :16].astype(np.int32)
    values = np.take_along_axis(logits, ids, axis=2)
    ids[:, :, TOP_K:], values[:, :, TOP_K:] = 0, MASK_VALUE
    return logits, hidden, Lattice(values, ids, hidden)


def test_a_sampled_walk_is_the_references_and_its_q_lies_on_the_candidates():
    rng = np.random.default_rng(0)
    logits, hidden, found = lattice(rng)
    tables = {
        "hidden_projection": np.eye(RANK, dtype=np.float32),
        "predecessor_codebook": rng.normal(size=(VOCAB, RANK)).astype(np.float32),
        "successor_codebook": rng.normal(size=(VOCAB, RANK)).astype(np.float32),
    }
    selector = SelectorParams(
        predecessor=tables["predecessor_codebook"],
        successor=tables["successor_codebook"],
        hidden_projection=tables["hidden_projection"],
    )
    anchor = np.array([3, 11, 39], np.int32)
    uniforms = rng.random((BATCH, ROWS)).astype(np.float32)
    draws = Draws(uniforms, np.repeat(TEMPERATURES[:, None], ROWS, axis=1))
    path, probs = jax.jit(sampled_walk)(anchor, found, selector, draws)
    assert not np.asarray(probs)[:, :, TOP_K:].any()
    np.testing.assert_allclose(np.sum(probs, axis=2), 1, rtol=1e-6)
    for b, temperature in enumerate(TEMPERATURES):
        how = {"temperature": float(temperature), "uniforms": uniforms[b]}
        want = dflash2.walk(hidden[b], logits[b], anchor[b], tables, TOP_K, **how)
        assert np.asarray(path)[b].tolist() == want.drafts
        for j in range(ROWS):
            scores = want.scores[j].astype(np.float64)
            q = (
                np.exp((scores - scores.max()) / temperature)
                if temperature
                else scores == scores.max()
            )
            np.testing.assert_allclose(probs[b, j, :TOP_K], q / q.sum(), atol=1e-5)
            # The q of the draft is the one that it was drawn with.
            assert probs[b, j, list(want.candidates[j]).index(want.drafts[j])] > 0
