"""Losses of training by hand, by NumPy and by autodiff of the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DraftConfig
from dflash_jax.train.losses import (
    RowTargets,
    block_losses,
    draft_tokens,
    pick_anchors,
    row_targets,
    score_rows,
    selector_loss,
    top_candidates,
)
from scripts.make_tiny import drafter_config, target_config

VOCAB, WIDTH, RANK = 307, 64, 16


def config(kind: str, **changes) -> DraftConfig:
    hf = drafter_config(kind, target_config("llama", 3, False, "float32"), 8)
    hf["dflash_config"] |= changes
    return DraftConfig.from_hf(hf)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def selector(seed: int = 5) -> dict[str, jax.Array]:
    at = "candidate_selector."
    return {
        f"{at}hidden_projection.weight": normal(RANK, WIDTH, seed=seed) / 8,
        f"{at}predecessor_codebook": normal(VOCAB, RANK, seed=seed + 1),
        f"{at}successor_codebook": normal(VOCAB, RANK, seed=seed + 2),
    }


# Labels and anchors


def test_labels_follow_the_anchor_and_weights_decay():
    tokens = jnp.arange(10, 22)[None]
    is_answer = jnp.ones((1, 12), bool)
    rows = row_targets(tokens, is_answer, jnp.asarray([[2, 9, -1]]), num_drafts=4, decay=2.0)
    assert rows.labels[0, 0].tolist() == [13, 14, 15, 16]
    assert rows.previous[0, 0].tolist() == [12, 13, 14, 15]
    falloff = [1.0, 0.60653066, 0.36787944, 0.22313016]  # exp(-j / 2)
    np.testing.assert_allclose(rows.weights[0, 0], falloff, rtol=1e-6)
    assert rows.labels[0, 1, :2].tolist() == [20, 21]
    np.testing.assert_allclose(rows.weights[0, 1], [*falloff[:2], 0, 0], rtol=1e-6)  # text ends
    assert not rows.weights[0, 2].any()  # no anchor there


def test_rows_after_a_token_of_someone_else_do_not_count():
    tokens = jnp.arange(8)[None]
    is_answer = jnp.asarray([[0, 1, 1, 1, 0, 1, 1, 1]], bool)
    counts = row_targets(tokens, is_answer, jnp.asarray([[0, 1, 2, 5]]), 3, 1e9).weights[0] > 0
    assert counts.tolist() == [
        [False, False, False],  # the anchor itself is not the target's
        [True, True, False],
        [True, False, False],
        [True, True, False],  # nor is anything beyond the end
    ]


def test_anchors_are_distinct_and_never_outside_answers():
    is_answer = np.zeros((3, 40), bool)
    is_answer[0, 5:20] = is_answer[0, 39] = True
    is_answer[1, ::2] = True  # never two in a row
    is_answer[2, 37:] = True
    found = np.asarray(pick_anchors(jax.random.key(3), jnp.asarray(is_answer), 10))
    real = found[0]
    assert len(set(real)) == 10 and (real >= 5).all() and (real < 19).all()
    assert (found[1] == -1).all()
    assert sorted(found[2][:2]) == [37, 38] and (found[2][2:] == -1).all()


# Candidates


@pytest.mark.parametrize("vocab", [40, 128, 307, 1000])
@pytest.mark.parametrize("levels", [3, 1000], ids=["many ties", "few ties"])
def test_candidates_are_the_largest_in_order_ties_to_the_lower_id(vocab, levels):
    logits = np.random.default_rng(vocab).integers(0, levels, (6, vocab)).astype(np.float32)
    logits[0] = 7.0  # all equal
    values, ids = top16(jnp.asarray(logits))
    want = np.argsort(-logits, axis=1, kind="stable")[:, :16]
    np.testing.assert_array_equal(ids, want)
    np.testing.assert_array_equal(values, np.take_along_axis(logits, want, axis=1))


top16 = jax.jit(lambda logits: top_candidates(logits, 16))


# Cross entropy


def test_the_loss_of_hand_made_logits():
    head = jnp.eye(4)  # hidden is logits
    hidden = jnp.asarray([[0.0, jnp.log(3.0), 0.0, 0.0], [2.0, 2.0, 2.0, 2.0], [9.0, 0, 0, 0]])
    labels, weights = jnp.asarray([1, 3, 2]), jnp.asarray([1.0, 0.5, 0.0])
    scores = jax.jit(lambda x: score_rows(x, head, labels, weights, 1.0, 2, 2))(hidden)
    # p = 3/6 with weight one, 1/4 with a half, and a row that does not count.
    np.testing.assert_allclose(scores.loss, np.log(2.0) + 0.5 * np.log(4.0), rtol=1e-6)
    assert scores.best.tolist() == [1, 0, 0]
    assert scores.candidates.tolist() == [[1, 0], [0, 1], [0, 1]]


@pytest.mark.parametrize("chunk", [1000, 5], ids=["one chunk", "six chunks"])
def test_the_chunked_gradient_is_that_of_the_formula(chunk):
    rows, scale = 30, 0.7
    hidden, head = normal(rows, WIDTH, seed=1), normal(VOCAB, WIDTH, seed=2) / 8
    labels = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, rows))
    weights = jnp.abs(normal(rows, seed=4)).at[3].set(0.0)

    def formula(hidden):
        log_p = jax.nn.log_softmax(scale * hidden @ head.T, axis=-1)
        return -jnp.sum(weights * jnp.take_along_axis(log_p, labels[:, None], axis=1)[:, 0])

    chunked = lambda x: score_rows(x, head, labels, weights, scale, 0, chunk).loss
    loss, grad = jax.jit(jax.value_and_grad(lambda x: 3.0 * chunked(x)))(hidden)
    want, want_grad = jax.jit(jax.value_and_grad(lambda x: 3.0 * formula(x)))(hidden)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    # f32 sums over 307 columns in another order.
    np.testing.assert_allclose(grad, want_grad, atol=2e-5 * float(jnp.abs(want_grad).max()))
    assert not grad[3].any()


# Selector


def test_the_selector_learns_only_where_the_label_is_a_candidate():
    scores = jnp.log(jnp.asarray([[1.0, 3.0], [1.0, 1.0], [5.0, 5.0]]))
    candidates = jnp.asarray([[8, 9], [4, 5], [6, 7]])
    labels, weights = jnp.asarray([9, 0, 7]), jnp.asarray([1.0, 1.0, 0.5])
    total, counted = selector_loss(scores, candidates, labels, weights)
    np.testing.assert_allclose(total, -np.log(3 / 4) + 0.5 * np.log(2), rtol=1e-6)
    assert float(counted) == 1.5
    slope = jax.grad(lambda s: selector_loss(s, candidates, labels, weights)[0])(scores)
    assert not slope[1].any()


def selector_by_hand(hidden, head, tensors, previous, scale):
    """(candidates, scores) of rows [N, E] in f64, ranked by unary score as they come."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    at = "candidate_selector."
    project, before, after = (
        np.asarray(tensors[f"{at}{name}"], np.float64)
        for name in ("hidden_projection.weight", "predecessor_codebook", "successor_codebook")
    )
    logits = scale * hidden @ head.T
    candidates = np.argsort(-logits, axis=1, kind="stable")[:, :16]
    scores = np.take_along_axis(logits, candidates, axis=1)
    for row, token in enumerate(previous):
        code = before[token] * (project @ hidden[row])
        scores[row] += after[candidates[row]] @ code
    return candidates, scores


@pytest.fixture(scope="module")
def block():
    """A drafter with a selector, hidden rows of three anchors, and what they should have been."""
    tensors, head = selector(), normal(VOCAB, WIDTH, seed=8) / 8
    hidden = normal(1, 3, 8, WIDTH, seed=9)
    rng = np.random.default_rng(1)
    best = np.argsort(-np.asarray(hidden @ head.T), axis=-1)[:, :, 1:]
    labels = np.where(rng.random((1, 3, 7)) < 0.7, best[..., 2], rng.integers(0, VOCAB, (1, 3, 7)))
    previous = rng.integers(0, VOCAB, (1, 3, 7))
    weights = rng.random((1, 3, 7))
    weights[0, 2, 4:] = 0.0
    targets = RowTargets(*(jnp.asarray(x) for x in (labels, previous, weights.astype(np.float32))))
    return tensors, head, hidden, targets


def test_the_selector_is_taught_with_the_text_before_each_row(block):
    tensors, head, hidden, targets = block
    both = config("dflash2", output_multiplier=0.5)
    loss, figures = jax.jit(lambda t: block_losses(t, both, head, hidden, targets, 8))(tensors)
    rows = hidden[:, :, 1:].reshape(-1, WIDTH)
    labels, previous, weights = (np.asarray(x).reshape(-1) for x in targets)
    candidates, scores = selector_by_hand(rows, head, tensors, previous, 0.5)
    log_p = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    is_gold = candidates == labels[:, None]
    counted = weights * is_gold.any(1)
    want = -(counted[:, None] * is_gold * log_p).sum() / counted.sum()
    np.testing.assert_allclose(figures["selector_loss"], want, rtol=1e-4)
    np.testing.assert_allclose(figures["candidate_recall"], counted.sum() / weights.sum(), 1e-5)
    logits = 0.5 * np.asarray(rows, np.float64) @ np.asarray(head).T
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    want = -(weights * log_p[np.arange(len(labels)), labels]).sum() / weights.sum()
    np.testing.assert_allclose(figures["cross_entropy"], want, rtol=1e-4)
    np.testing.assert_allclose(loss, figures["cross_entropy"] + figures["selector_loss"], rtol=1e-6)
    assert 0 < float(figures["candidate_recall"]) < 1


walk = jax.jit(lambda t, head, hidden, at: draft_tokens(t, config("dflash2"), head, hidden, at, 8))


def test_drafts_are_the_walk_of_the_selector_from_the_anchor(block):
    tensors, head, hidden, _ = block
    anchors = jnp.asarray([[3, 40, 299]])
    drafts = np.asarray(walk(tensors, head, hidden, anchors))
    for number, before in enumerate(anchors[0].tolist()):
        for row in range(7):
            one = hidden[0, number, row + 1][None]
            candidates, scores = selector_by_hand(one, head, tensors, [before], 1.0)
            before = int(candidates[0, scores[0].argmax()])
            assert drafts[0, number, row] == before, (number, row)


def test_equal_scores_go_to_the_lowest_id(block):
    """Candidates come ranked by their unary score; the walk must not prefer the first of them."""
    tensors, _, hidden, _ = block
    # Unary scores rise with the id; edges undo that, so that candidates 291 to 306 are all equal.
    head = jnp.zeros((VOCAB, WIDTH)).at[:, 0].set(jnp.arange(VOCAB))
    first = jnp.zeros((RANK, WIDTH)).at[0, 0].set(1.0)
    flat = {
        "candidate_selector.hidden_projection.weight": first,
        "candidate_selector.predecessor_codebook": jnp.ones((VOCAB, RANK)),
        "candidate_selector.successor_codebook": -jnp.arange(VOCAB)[:, None] * jnp.eye(1, RANK),
    }
    ones = jnp.zeros_like(hidden).at[..., 0].set(1.0)
    drafts = walk(flat, head, ones, jnp.asarray([[3, 40, 299]]))
    assert (drafts == VOCAB - 16).all()
