"""Which drafts of a block are kept, and what stands behind them (spec/verify.md §2).

A point mass is kept where it equals the target's own choice: then the answer is that of plain
decoding, token by token, and a draw of the target hits draft d with probability p(d), which is the
test u < p(d) with its residual. A draft that was drawn from q is kept where u * q(d) < p(d); what
replaces the first that is not comes from the residual max(p - q, 0), so that the answer follows p.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.distribution import draw
from dflash_jax.drafters.proposal import SparseQ


class Noise(NamedTuple):
    """Uniforms of the tokens behind each row of a block."""

    accept: jax.Array  # f32[B, R-1] of the drafts
    residual: jax.Array  # f32[B, R]
    target: jax.Array  # f32[B, R]


def leading(accepted: jax.Array, rows: jax.Array) -> jax.Array:
    """How many of bool[B, R-1] are true from the first on, of those i32[B] `rows` verified."""
    offset = jnp.arange(accepted.shape[1], dtype=jnp.int32)[None]
    kept = accepted & (offset < rows[:, None] - 1)
    return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def accept_drawn(
    p: jax.Array, q: jax.Array | SparseQ, drafts: jax.Array, rows: jax.Array, noise: Noise
) -> tuple[jax.Array, jax.Array]:
    """Test drafts that were drawn from q, and draw what stands behind the accepted ones.

    Args:
      p: f32[B, R, V] the target's distribution behind each row.
      q: what draft j, i32[B, R-1] `drafts`, was drawn from.
      rows: i32[B] rows verified: the anchor's and those of the drafts that count.
    Returns:
      num_accepted i32[B], and i32[B, R]: accepted drafts, then the drawn token in all places left.
    """
    p_draft = jnp.take_along_axis(p[:, :-1], drafts[:, :, None], axis=2)[:, :, 0]
    accepted = noise.accept * _probability(q, drafts) < p_draft
    count = leading(accepted, rows)
    is_rejected = count < rows - 1
    p_next = _row(p, count)  # [B, V]
    rest = _residual(p_next, q, jnp.minimum(count, drafts.shape[1] - 1))
    weights = jnp.where(is_rejected[:, None], rest, p_next)
    u = jnp.where(is_rejected, _row(noise.residual, count), _row(noise.target, count))
    token = draw(weights, u)
    offset = jnp.arange(p.shape[1], dtype=jnp.int32)[None]
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    return count, jnp.where(offset < count[:, None], padded, token[:, None])


def _row(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b]] of x[B, R, ...]."""
    where = index.reshape(-1, *[1] * (x.ndim - 1))
    return jnp.take_along_axis(x, where, axis=1)[:, 0]


def _probability(q: jax.Array | SparseQ, drafts: jax.Array) -> jax.Array:
    """q(draft), f32[B, R-1]."""
    if isinstance(q, SparseQ):
        return jnp.sum(jnp.where(q.ids == drafts[:, :, None], q.probs, 0.0), axis=2)
    return jnp.take_along_axis(q, drafts[:, :, None], axis=2)[:, :, 0]


def _residual(p: jax.Array, q: jax.Array | SparseQ, row: jax.Array) -> jax.Array:
    """max(p - q, 0) of q's rows i32[B], f32[B, V]; p itself where that is nothing."""
    if isinstance(q, SparseQ):
        sequence = jnp.arange(p.shape[0], dtype=jnp.int32)[:, None]
        rest = p.at[sequence, _row(q.ids, row)].add(-_row(q.probs, row))
    else:
        rest = p - _row(q, row)
    rest = jnp.maximum(rest, 0.0)
    return jnp.where(jnp.sum(rest, axis=1, keepdims=True) > 0, rest, p)
