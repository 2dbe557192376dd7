"""Losses of block rows and the drafts they stand for.

Row j of a block at anchor position P is scored against the target's own greedy token at P + j, for
j = 1..R-1. Early rows weigh more, exp(-(j-1)/decay), since a draft counts only if all before it
were accepted. The logits [rows, V] are never kept: each chunk's gradient for the hidden rows is
formed right after its logits, so memory is one chunk.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.train.dense import Tensors, linear

GROUP = 128  # vocabulary columns a group in the top-k


class RowTargets(NamedTuple):
    """What the rows 1.. of each block should be."""

    labels: jax.Array  # i32[B, A, R-1] the target's tokens
    previous: jax.Array  # i32[B, A, R-1] the token before each of them; the anchor for row 1
    weights: jax.Array  # f32[B, A, R-1]; 0 where there is nothing to learn


def row_targets(
    tokens: jax.Array, is_answer: jax.Array, anchors: jax.Array, num_drafts: int, decay: float
) -> RowTargets:
    """Labels and weights of the rows after each anchor.

    A row counts while every token from the anchor to it was written by the target.

    Args:
      tokens: i32[B, T]; is_answer: bool[B, T]; anchors: i32[B, A], negative where there is none.
    """
    length = tokens.shape[1]
    at = anchors[..., None] + jnp.arange(num_drafts + 1)  # [B, A, R]
    inside = (at >= 0) & (at < length)
    flat = jnp.clip(at, 0, length - 1).reshape(tokens.shape[0], -1)
    ids = jnp.take_along_axis(tokens, flat, axis=1).reshape(at.shape)
    written = jnp.take_along_axis(is_answer, flat, axis=1).reshape(at.shape) & inside
    counts = jnp.cumprod(written, axis=-1)[..., 1:]
    falloff = jnp.exp(-jnp.arange(num_drafts) / decay)
    return RowTargets(ids[..., 1:], ids[..., :-1], counts * falloff)


def pick_anchors(key: jax.Array, is_answer: jax.Array, num_anchors: int) -> jax.Array:
    """i32[B, A] distinct random positions with an answer token there and next; -1 where short."""
    usable = is_answer & jnp.roll(is_answer, -1, axis=1).at[:, -1].set(False)
    noise = jnp.where(usable, jax.random.uniform(key, usable.shape, jnp.float32), -1.0)
    value, index = jax.lax.top_k(noise, num_anchors)
    return jnp.where(value >= 0, index, -1)


def top_candidates(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of f32[N, V], descending, ties to the lower id: (values, i32 ids).

    Exact and without sorting the vocabulary: the winners lie in the `count` groups with the largest
    maxima. Both stages take maxima one after another, which reads but never writes.
    """
    rows, vocab = logits.shape
    pad = -vocab % GROUP
    logits = jnp.pad(logits, ((0, 0), (0, pad)), constant_values=-jnp.inf)
    grouped = logits.reshape(rows, -1, GROUP)
    _, groups = _take_maxima(grouped.max(-1), min(count, grouped.shape[1]))
    groups = jnp.sort(groups, axis=-1)  # so that a lower position is a lower id
    some = jnp.take_along_axis(grouped, groups[..., None], axis=1).reshape(rows, -1)
    values, at = _take_maxima(some, count)
    return values, jnp.take_along_axis(groups, at // GROUP, axis=1) * GROUP + at % GROUP


def _take_maxima(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` largest of f32[N, S] with their indices, by repeated argmax."""
    index = jnp.arange(x.shape[1])

    def step(last, _):
        value, at = last
        left = (x < value[:, None]) | ((x == value[:, None]) & (index > at[:, None]))
        rest = jnp.where(left, x, -jnp.inf)
        found = jnp.argmax(rest, axis=1).astype(jnp.int32)
        value = jnp.take_along_axis(x, found[:, None], axis=1)[:, 0]
        return (value, found), (value, found)

    start = jnp.full(x.shape[:1], jnp.inf), jnp.full(x.shape[:1], -1, jnp.int32)
    _, (values, found) = jax.lax.scan(step, start, None, length=count)
    return values.T, found.T


class RowScores(NamedTuple):
    """One pass over the vocabulary: the loss and what the rows would draft."""

    loss: jax.Array  # f32 weighted sum of the rows' cross entropies
    best: jax.Array  # i32[N] argmax
    candidates: jax.Array | None  # i32[N, C]


def _one_chunk(hidden, head, labels, weights, scale, num_candidates):
    """Scores of some rows and the gradient of their loss for `hidden`."""
    logits = scale * jnp.einsum("ne,ve->nv", hidden, head, preferred_element_type=jnp.float32)
    top = logits.max(-1)
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    exps = jnp.exp(logits - top[:, None])
    total = exps.sum(-1)
    gold = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    loss = jnp.sum(weights * (jnp.log(total) + top - gold))
    is_gold = jnp.arange(logits.shape[1]) == labels[:, None]
    slope = (exps / total[:, None] - is_gold) * (scale * weights)[:, None]
    grad = jnp.einsum(
        "nv,ve->ne", slope.astype(hidden.dtype), head, preferred_element_type=jnp.float32
    )
    candidates = top_candidates(logits, num_candidates)[1] if num_candidates else None
    return RowScores(loss, best, candidates), grad.astype(hidden.dtype)


def _chunked(hidden, head, labels, weights, scale, num_candidates, chunk):
    rows = hidden.shape[0]
    pieces = max(1, -(-rows // chunk))
    while rows % pieces:
        pieces += 1
    cut = lambda x: x.reshape(pieces, rows // pieces, *x.shape[1:])
    scores, grad = jax.lax.map(
        lambda piece: _one_chunk(piece[0], head, piece[1], piece[2], scale, num_candidates),
        (cut(hidden), cut(labels), cut(weights)),
    )
    join = lambda x: x.reshape(rows, *x.shape[2:])
    candidates = None if scores.candidates is None else join(scores.candidates)
    scores = RowScores(scores.loss.sum(), join(scores.best), candidates)
    return scores, join(grad)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def score_rows(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    scale: float,
    num_candidates: int,
    chunk: int,
) -> RowScores:
    """Cross entropy of hidden[N, E] through head[V, E], differentiable in `hidden` alone.

    Args:
      labels: i32[N]; weights: f32[N]; scale: the drafter's output_multiplier.
      num_candidates: ids to return a row, 0 for none.
      chunk: rows whose logits are in memory at once, about.
    """
    return _chunked(hidden, head, labels, weights, scale, num_candidates, chunk)[0]


def _score_rows_fwd(hidden, head, labels, weights, scale, num_candidates, chunk):
    return _chunked(hidden, head, labels, weights, scale, num_candidates, chunk)


def _score_rows_bwd(scale, num_candidates, chunk, grad_hidden, grads):
    grad = grads.loss * grad_hidden.astype(jnp.float32)
    return grad.astype(grad_hidden.dtype), None, None, None


score_rows.defvjp(_score_rows_fwd, _score_rows_bwd)


class Selection(NamedTuple):
    """What the selector adds to the unary scores of each row's candidates."""

    unary: jax.Array  # f32[N, C]
    successors: jax.Array  # f32[N, C, r] codes of the candidates
    hidden: jax.Array  # f32[N, r] projected hidden


def selection(
    tensors: Tensors, config: DraftConfig, head: jax.Array, hidden: jax.Array, candidates: jax.Array
) -> Selection:
    """Unary scores by gathering the candidates' head rows, and the edge's two known factors.

    The gather costs C*E a row, far less than a scatter of gradients into [N, V].
    """
    unary = jnp.einsum("ne,nce->nc", hidden, head[candidates], preferred_element_type=jnp.float32)
    return Selection(
        config.output_multiplier * unary,
        tensors["candidate_selector.successor_codebook"][candidates].astype(jnp.float32),
        linear(hidden, tensors["candidate_selector.hidden_projection.weight"]).astype(jnp.float32),
    )


def edge_scores(tensors: Tensors, chosen: Selection, previous: jax.Array) -> jax.Array:
    """f32[N, C]: unary plus edge from `previous` i32[N]."""
    before = tensors["candidate_selector.predecessor_codebook"][previous].astype(jnp.float32)
    edge = jnp.einsum("nr,ncr->nc", before * chosen.hidden, chosen.successors)
    return chosen.unary + edge


def selector_loss(
    scores: jax.Array, candidates: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cross entropy among the candidates, over rows whose label is one of them.

    A label outside the candidates cannot be chosen at inference, so it teaches nothing here.

    Returns:
      (weighted sum of losses, sum of the weights that counted).
    """
    is_gold = candidates == labels[:, None]
    counted = weights * is_gold.any(-1)
    log_p = jax.nn.log_softmax(scores, axis=-1)
    return -jnp.sum(counted[:, None] * is_gold * log_p), counted.sum()


def block_losses(
    tensors: Tensors,
    config: DraftConfig,
    head: jax.Array,
    hidden: jax.Array,
    targets: RowTargets,
    chunk: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The training loss of one drafter and figures to log.

    Args:
      hidden: [B, A, R, E] from `draft_hidden`.
    """
    rows = hidden[:, :, 1:].reshape(-1, hidden.shape[-1])
    labels, previous, weights = (x.reshape(-1) for x in targets)
    total = jnp.maximum(weights.sum(), 1e-6)
    scores: RowScores = score_rows(
        rows, head, labels, weights, config.output_multiplier, config.selector_top_k, chunk
    )
    loss = scores.loss / total
    counted = (weights > 0).reshape(targets.weights.shape)
    hit = (scores.best == labels).reshape(targets.weights.shape) & counted
    figures = {"cross_entropy": loss, "first_row_hit": _mean(hit[..., 0], counted[..., 0])}
    if scores.candidates is not None:
        chosen = selection(tensors, config, head, rows, scores.candidates)
        edged = edge_scores(tensors, chosen, previous)
        summed, counted_weight = selector_loss(edged, scores.candidates, labels, weights)
        extra = summed / jnp.maximum(counted_weight, 1e-6)
        figures |= {"selector_loss": extra, "candidate_recall": counted_weight / total}
        loss = loss + extra
    return loss, figures


def _mean(x: jax.Array, counted: jax.Array) -> jax.Array:
    return jnp.sum(x & counted) / jnp.maximum(counted.sum(), 1)


def draft_tokens(
    tensors: Tensors,
    config: DraftConfig,
    head: jax.Array,
    hidden: jax.Array,
    anchor_tokens: jax.Array,
    chunk: int,
) -> jax.Array:
    """Greedy drafts i32[B, A, R-1] of hidden [B, A, R, E]: the argmax, or the selector's walk."""
    batch, num_anchors, rows, width = hidden.shape
    flat = hidden[:, :, 1:].reshape(-1, width)
    none = jnp.zeros(flat.shape[:1], jnp.int32)
    scores: RowScores = score_rows(
        flat,
        head,
        none,
        none.astype(jnp.float32),
        config.output_multiplier,
        config.selector_top_k,
        chunk,
    )
    shape = batch * num_anchors, rows - 1
    if scores.candidates is None:
        return scores.best.reshape(batch, num_anchors, rows - 1)
    chosen = selection(tensors, config, head, flat, scores.candidates)
    by_row = jax.tree.map(
        lambda x: x.reshape(*shape, *x.shape[1:]).swapaxes(0, 1), (chosen, scores.candidates)
    )

    def step(before: jax.Array, row: tuple[Selection, jax.Array]):
        one, candidates = row
        edged = edge_scores(tensors, one, before)
        highest = edged == edged.max(-1, keepdims=True)
        token = jnp.where(highest, candidates, config.vocab).min(-1)  # ties to the lowest id
        return token, token

    _, drafts = jax.lax.scan(step, anchor_tokens.reshape(-1), by_row)
    return drafts.T.reshape(batch, num_anchors, rows - 1)
