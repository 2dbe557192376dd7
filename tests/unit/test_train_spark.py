"""DSpark's training loss against its formula, and its drafts against the reference's chain."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.train.spark import spark_drafts, spark_losses
from tests.reference import dspark as reference

VOCAB, WIDTH, RANK, ROWS = 37, 8, 4, 3


def config(kind, rank=RANK):
    return SimpleNamespace(
        markov_kind=kind,
        markov_rank=rank,
        has_confidence=True,
        confidence_reads_markov=rank > 0,
        output_multiplier=1.0,
    )


def weights(kind, rank=RANK):
    rng = np.random.default_rng(5)
    shapes = {"confidence_head.proj.weight": (1, WIDTH + rank), "confidence_head.proj.bias": (1,)}
    if rank:
        shapes |= {f"markov_head.markov_w{i}.weight": (VOCAB, rank) for i in (1, 2)}
    if kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (rank, WIDTH + rank)
        shapes["markov_head.gate_proj.bias"] = (rank,)
    if kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * rank, WIDTH + 2 * rank)
        shapes["markov_head.joint_proj.bias"] = (3 * rank,)
    return {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}


def batch():
    rng = np.random.default_rng(6)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
    ids = lambda: jnp.asarray(rng.integers(0, VOCAB, (2, 2, ROWS)), jnp.int32)
    falloff = jnp.asarray(rng.uniform(0, 1, (2, 2, ROWS)), jnp.float32)
    rows, target_rows = normal(2, 2, ROWS, WIDTH), normal(2, 2, ROWS, WIDTH)
    return normal(VOCAB, WIDTH), rows, ids(), ids(), falloff, target_rows


def head_of(tensors):
    prefix = "markov_head."
    named = {n: np.asarray(x, np.float64) for n, x in tensors.items()}
    return {n.removeprefix(prefix): x for n, x in named.items() if n.startswith(prefix)} or None


def by_formula(tensors, kind, head, rows, labels, previous, falloff, target_rows):
    """0.1 cross entropy + 0.9 total variation + confidence against one less that, in f64."""
    head, total, summed = np.asarray(head, np.float64), float(falloff.sum()), 0.0
    named = {n: np.asarray(x, np.float64) for n, x in tensors.items()}
    for b, a in np.ndindex(2, 2):
        hidden = np.asarray(rows[b, a], np.float64)
        markov, forced = head_of(tensors), np.asarray(previous[b, a])
        chain = reference.chain(hidden @ head.T, hidden, -1, markov, forced=forced)
        read = hidden if markov is None else np.concatenate([hidden, chain.latents], axis=1)
        scores = read @ named["confidence_head.proj.weight"][0] + named["confidence_head.proj.bias"]
        for j in range(ROWS):
            q = reference.layers.softmax(chain.logits[j])
            p = reference.layers.softmax(np.asarray(target_rows[b, a, j], np.float64) @ head.T)
            variation = 0.5 * np.abs(q - p).sum()
            sure = reference.sigmoid(scores[j])
            entropy = -(1 - variation) * np.log(sure) - variation * np.log(1 - sure)
            loss = -0.1 * np.log(q[labels[b, a, j]]) + 0.9 * variation + entropy
            summed += float(falloff[b, a, j]) * loss
    return summed / total


@pytest.mark.parametrize(("kind", "rank"), [("vanilla", 0), ("gated", RANK), ("rnn", RANK)])
def test_the_loss_is_its_formula_and_its_gradient_goes_down_it(kind, rank):
    tensors, data = weights(kind, rank), batch()

    @jax.jit
    def loss_of(tensors):
        return spark_losses(tensors, config(kind, rank), *data, chunk=5)[0]

    want = by_formula(tensors, kind, *data)
    np.testing.assert_allclose(loss_of(tensors), want, rtol=1e-5)
    grads = jax.jit(jax.grad(loss_of))(tensors)
    assert all(float(jnp.abs(x).max()) > 0 for x in grads.values())
    norm = sum(float((x**2).sum()) for x in grads.values())
    step = 1e-3 / norm**0.5
    lower = by_formula({n: x - step * grads[n] for n, x in tensors.items()}, kind, *data)
    # Confidence is held to what the variation was, so its part of the slope is not the formula's.
    assert lower < want


def test_drafts_of_training_are_the_references_chain():
    head, rows, *_ = batch()
    rows, tensors = rows.reshape(4, ROWS, WIDTH), weights("rnn")
    anchors = jnp.asarray([3, 0, 9, 36], jnp.int32)
    drafts = jax.jit(lambda *x: spark_drafts(tensors, config("rnn"), head, *x))(rows, anchors)
    for one, anchor, got in zip(np.asarray(rows, np.float64), anchors, drafts, strict=True):
        logits = one @ np.asarray(head, np.float64).T
        assert reference.chain(logits, one, anchor, head_of(tensors)).drafts == got.tolist()
