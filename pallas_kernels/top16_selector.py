"""Exact top-16 of vocabulary rows, and DFlash2's walk over them (spec/drafters.md §4.2).

Order everywhere: larger value first, equal values by lower token id. A NaN logit counts as minus
infinity, so it is chosen only when nothing else is left; -0.0 equals 0.0.

`top16` reads the vocabulary once. The 16 best logits lie in the 16 groups that come first by
(maximum descending, id ascending): were one in another group, each of those 16 groups would hold
an entry that precedes it. So the maxima of groups of 128 choose 16 groups, and the 2,048 logits of
these, taken in ascending id, choose the candidates.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._launch import (
    MASK_VALUE,
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    dispatch,
    show,
)

CANDIDATES = 16
_GROUP = 128  # a row of lanes; 16 groups of it are as quick to search as one vocabulary's maxima
_NO_ID = jnp.iinfo(jnp.int32).max


def top16(
    logits, *, k: int = CANDIDATES, vocab: int | None = None, impl: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Return the k largest logits of each row and their token ids, exactly.

    Args:
      logits: float[N, V].
      k: candidates wanted, 1 to 16; the entries from k on are masked (MASK_VALUE, id 0).
      vocab: tokens that exist, if columns from there on are padding; those are never returned.
      impl: which implementation runs.
    Returns:
      vals: f32[N, 16] descending; a logit of minus infinity or NaN comes back as MASK_VALUE.
      ids: i32[N, 16].
    """
    op = "top16"
    vocab = _check_vocab(op, logits, vocab)
    if not 1 <= k <= min(CANDIDATES, vocab):
        raise ValueError(f"{op}: k is {k}, wanted 1 to {min(CANDIDATES, vocab)}")
    return dispatch(op, impl, None, top16_xla, logits, k=k, vocab=vocab)


def top16_xla(logits, k: int, vocab: int) -> tuple[jax.Array, jax.Array]:
    """`top16` by group maxima; `lax.top_k` only ever sees ceil(V / 128) or 2,048 columns."""
    n = logits.shape[0]
    group = jnp.arange(-(-vocab // _GROUP), dtype=jnp.int32)[None, :]
    if group.size > CANDIDATES:
        _, group = lax.top_k(_group_maxima(logits[:, :vocab]), CANDIDATES)
        group = jnp.sort(group, axis=1)  # top_k's lowest index is then the lowest id
    ids = group[:, :, None] * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)[None, None, :]
    ids = jnp.broadcast_to(ids, (n, *ids.shape[1:])).reshape(n, -1)  # [N, <= 2048], ascending
    survivors = _take(logits, jnp.minimum(ids, vocab - 1), 1)
    # Past the end ties with a real -inf at most, and loses that tie by its higher id.
    survivors = jnp.where(ids < vocab, _ordered(survivors), -jnp.inf)
    vals, at = lax.top_k(survivors, k)
    ids = _take(ids, at, 1)
    vals = jnp.where(vals == -jnp.inf, MASK_VALUE, vals)
    rest = ((0, 0), (0, CANDIDATES - k))
    return jnp.pad(vals, rest, constant_values=MASK_VALUE), jnp.pad(ids, rest)


def argmax_rows(logits, *, vocab: int | None = None) -> jax.Array:
    """Return i32[N], the id of each row's largest logit: `top16`'s first candidate.

    Args:
      logits: float[N, V].
      vocab: tokens that exist, if columns from there on are padding; those are never returned.
    """
    vocab = _check_vocab("argmax_rows", logits, vocab)
    return lax.argmax(_ordered(logits[:, :vocab]), 1, jnp.int32)


def selector_walk(
    anchor,
    vals,
    ids,
    hproj,
    predecessor,
    successor,
    *,
    k: int = CANDIDATES,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Walk greedily over the candidates of each draft row, scoring each edge to its predecessor.

    Row j scores candidate c as `vals[j, c] + <predecessor[prev] * hproj[j], successor[ids[j, c]]>`
    where prev is the token chosen for row j - 1, for row 0 the anchor. Equal scores go to the
    lowest token id. All arithmetic is f32.

    Args:
      anchor: i32[B] the verified token before the first draft.
      vals: f32[B, J, 16] unary scores, from `top16`.
      ids: i32[B, J, 16] their token ids, distinct in a row.
      hproj: float[B, J, r] projected hidden of the draft rows.
      predecessor, successor: float[V, r] codebooks.
      k: candidates that count, 1 to 16; the others are never chosen.
      impl: which implementation runs.
    Returns:
      path: i32[B, J] chosen tokens.
      scores: f32[B, J, 16] each row's scores given its chosen predecessor, MASK_VALUE from k on.
    """
    op = "selector_walk"
    b, j, c = check_rank(op, "vals", vals, "B J C")
    check_shape(op, "vals", vals, (b, j, CANDIDATES))
    check_shape(op, "ids", ids, (b, j, c))
    check_shape(op, "anchor", anchor, (b,))
    rank = check_rank(op, "hproj", hproj, "B J r")[2]
    check_shape(op, "hproj", hproj, (b, j, rank))
    vocab = check_rank(op, "predecessor", predecessor, "V r")[0]
    check_shape(op, "predecessor", predecessor, (vocab, rank))
    check_shape(op, "successor", successor, (vocab, rank))
    check_dtype(op, "anchor", anchor, jnp.int32)
    check_dtype(op, "ids", ids, jnp.int32)
    check_dtype(op, "vals", vals, jnp.float32)
    check_float(op, hproj=hproj, predecessor=predecessor, successor=successor)
    if j < 1:
        raise ValueError(f"{op}: vals is {show(vals)}, wanted at least one draft row")
    if not 1 <= k <= CANDIDATES:
        raise ValueError(f"{op}: k is {k}, wanted 1 to {CANDIDATES}")
    arrays = (anchor, vals, ids, hproj, predecessor, successor)
    return dispatch(op, impl, None, selector_walk_xla, *arrays, k=k)


def selector_walk_xla(
    anchor, vals, ids, hproj, predecessor, successor, k: int
) -> tuple[jax.Array, jax.Array]:
    """`selector_walk` over the full lattice of edges.

    All edges of all rows are scored at once, and each row's winner for each of 16 predecessors, so
    that only index look-ups depend on the row before: scoring row by row would put a gather, a dot
    and an argmax into a chain of J steps instead.
    """
    b, _, c = ids.shape
    counts = jnp.arange(c) < k  # [C]
    prev = jnp.concatenate([jnp.broadcast_to(anchor[:, None, None], (b, 1, c)), ids[:, :-1]], 1)
    left = _rows_f32(predecessor, prev) * hproj.astype(jnp.float32)[:, :, None]  # [B, J, C, r]
    edges = jnp.einsum(
        "bjpr,bjcr->bjpc",
        left,
        _rows_f32(successor, ids),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    lattice = vals[:, :, None] + edges
    lattice = jnp.where(counts[None, None, None], lattice, MASK_VALUE)  # [B, J, prev C, C]
    best = _best_candidate(lattice, ids[:, :, None], counts[None, None, None])  # [B, J, prev C]
    chosen = _follow(best)  # [B, J]
    # Every predecessor of row 0 is the anchor, so that candidate 0 stands for it.
    came_from = jnp.pad(chosen[:, :-1], ((0, 0), (1, 0)))
    path = _take(ids, chosen[:, :, None], 2)[:, :, 0]
    scores = _take(lattice, came_from[:, :, None, None], 2)[:, :, 0]
    return path, scores


def _follow(best) -> jax.Array:
    """Return i32[B, J], the candidate chosen in each row.

    best[b, j, p] is row j's candidate after candidate p of the row before; row 0 starts from p = 0.
    Composing rows at distance 1, 2, 4, ... takes log2(J) dependent look-ups where a walk takes J.
    """
    distance = 1
    while distance < best.shape[1]:
        before = jnp.pad(best[:, :-distance], ((0, 0), (distance, 0), (0, 0)))
        best = _take(best, before, 2)
        distance *= 2
    return best[:, :, 0]


def _best_candidate(scores, ids, counts) -> jax.Array:
    """Return the index along the last axis of the largest score, equal ones by lowest id."""
    top = jnp.max(jnp.where(counts, scores, -jnp.inf), axis=-1, keepdims=True)
    ids = jnp.where(counts & (scores == top), ids, _NO_ID)
    return lax.argmin(ids, ids.ndim - 1, jnp.int32)


def _take(x, index, axis: int) -> jax.Array:
    """`take_along_axis` without bounds handling: every index here is computed in range."""
    return jnp.take_along_axis(
        x, index, axis, mode="promise_in_bounds", wrap_negative_indices=False
    )


def _rows_f32(codebook, ids) -> jax.Array:
    """Gather codebook rows as f32; every id is a token's."""
    rows = codebook.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return rows.astype(jnp.float32)


def _group_maxima(logits) -> jax.Array:
    """Return f32[N, ceil(V / 128)], the maximum of each group of columns."""
    n, columns = logits.shape
    pad = -columns % _GROUP
    x = jnp.pad(_ordered(logits), ((0, 0), (0, pad)), constant_values=-jnp.inf)
    return jnp.max(x.reshape(n, -1, _GROUP), axis=2)


def _ordered(logits) -> jax.Array:
    """Return the logits as f32 with NaN lowest and one zero, so that > and == order them."""
    x = logits.astype(jnp.float32)
    x = jnp.where(jnp.isnan(x), -jnp.inf, x)
    return jnp.where(x == 0, 0.0, x)


def _check_vocab(op: str, logits, vocab: int | None) -> int:
    """Check logits and return how many of their columns are tokens."""
    columns = check_rank(op, "logits", logits, "N V")[1]
    check_float(op, logits=logits)
    vocab = columns if vocab is None else vocab
    if not 1 <= vocab <= columns:
        raise ValueError(f"{op}: vocab is {vocab}, wanted 1 to the {columns} columns of logits")
    return vocab
