"""DFlash2's walk over the candidates of its draft rows, greedy or sampled (spec/drafters.md §4.2).

A row scores each candidate by its own logit and by an edge from the token chosen in the row before.
Higher score first, equal scores by lower token id; a NaN score counts as the least.

The kernel has one program a sequence, which walks its rows in one launch. Only the index of the
chosen predecessor passes from row to row: what all 16 possible predecessors and all 16 candidates
have in the codebooks is read some rows ahead, since a gather that waited for the choice would cost
the latency of memory 15 times over. Sums over the rank are f32, in an order of the kernel's own.

Limits: rank up to 512. A sequence of 15 rows reads 480 rows of the codebooks: 246 KB at rank 256 in
bf16, 0.06 us at 4.37 TB/s, so latency is what counts: 14.4 us (NVIDIA H200, 2026-11-30), 19.2 for
32 sequences.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._launch import (
    MASK_VALUE,
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    dispatch,
    next_power_of_2,
    show,
)
from pallas_kernels.top16_selector import CANDIDATES

_MAX_RANK = 512
_MAX_VOCAB = 1 << 26  # an id and an index of a candidate in 31 bits, with room to spare
_NO_ID = np.iinfo(np.int32).max
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class SelectorWalkConfig:
    """Rows whose codebook rows are under way while one is scored, and warps of a program."""

    depth: int = 2
    num_warps: int = 4


def selector_walk_config(rank: int, dtype) -> SelectorWalkConfig:
    """Tiles by the size of a codebook row: those under way have to stay in registers.

    H200, rank 256 in bf16, one sequence and 32, in us by (depth, warps): (1, 4) 14.4 and 19.2,
    (2, 4) 15.6 and 19.2, (1, 8) 16.6, (2, 8) 17.2 and 23.8, (1, 2) 17.1 and 26.5.
    """
    row_bytes = rank * jnp.dtype(dtype).itemsize
    return SelectorWalkConfig(depth=1 if row_bytes >= 512 else 2)


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
    config: SelectorWalkConfig | None = None,
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
      impl: which implementation runs; the kernel serves ranks up to 512.
      config: tiles of the kernel.
    Returns:
      path: i32[B, J] chosen tokens.
      scores: f32[B, J, 16] each row's scores given its chosen predecessor, MASK_VALUE from k on.
    """
    operands = (anchor, vals, ids, hproj, predecessor, successor, None, None)
    path, scores, _ = _walk("selector_walk", operands, k, impl, config)
    return path, scores


def selector_walk_sampled(
    anchor,
    vals,
    ids,
    hproj,
    predecessor,
    successor,
    temperature,
    uniforms,
    *,
    k: int = CANDIDATES,
    impl: str = "auto",
    config: SelectorWalkConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Walk as `selector_walk` does, but draw each row's token from softmax(scores / temperature).

    The draw inverts the distribution that is returned: the first candidate up to which q sums to
    more than the uniform number, among those of q above 0.

    Args:
      temperature: f32[B]; a sequence of temperature 0 walks greedily, its q are ones and zeros.
      uniforms: f32[B, J] in [0, 1), one a draw.
    Returns:
      path, scores: as `selector_walk`.
      q: f32[B, J, 16] the distribution over `ids` that each token was drawn from, 0 from k on.
    """
    op = "selector_walk_sampled"
    b, j, _ = check_rank(op, "vals", vals, "B J C")
    check_shape(op, "temperature", temperature, (b,))
    check_shape(op, "uniforms", uniforms, (b, j))
    check_dtype(op, "temperature", temperature, jnp.float32)
    check_dtype(op, "uniforms", uniforms, jnp.float32)
    operands = (anchor, vals, ids, hproj, predecessor, successor, temperature, uniforms)
    return _walk(op, operands, k, impl, config)


def _walk(op: str, operands: tuple, k: int, impl: str, config: SelectorWalkConfig | None):
    """Check the operands that both walks have, and dispatch."""
    anchor, vals, ids, hproj, predecessor, successor, *_ = operands
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
    if vocab > _MAX_VOCAB:
        raise ValueError(f"{op}: predecessor has {vocab} rows, wanted at most {_MAX_VOCAB}")
    kernel = partial(
        _selector_walk_pallas,
        config=config or selector_walk_config(rank, jnp.result_type(predecessor)),
    )
    unserved = None
    if rank > _MAX_RANK:
        unserved = f"has no kernel for rank {rank}, only for up to {_MAX_RANK}"
    return dispatch(op, impl, kernel, selector_walk_xla, *operands, unserved=unserved, k=k)


def selector_walk_xla(
    anchor, vals, ids, hproj, predecessor, successor, temperature, uniforms, *, k: int
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Both walks over the full lattice of edges; q is None without a temperature.

    All edges of all rows are scored at once, and each row's choice for each of 16 predecessors, so
    that only index look-ups depend on the row before: scoring row by row would put a gather, a dot
    and an argmax into a chain of J steps instead.
    """
    b, _, c = ids.shape
    counts = (jnp.arange(c) < k)[None, None, None]  # [1, 1, 1, C]
    prev = jnp.concatenate([jnp.broadcast_to(anchor[:, None, None], (b, 1, c)), ids[:, :-1]], 1)
    left = _rows_f32(predecessor, prev) * hproj.astype(jnp.float32)[:, :, None]  # [B, J, C, r]
    edges = jnp.einsum(
        "bjpr,bjcr->bjpc",
        left,
        _rows_f32(successor, ids),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    lattice = jnp.where(counts, vals[:, :, None] + edges, MASK_VALUE)  # [B, J, prev C, C]
    choice, q = _best_candidate(lattice, ids[:, :, None], counts)[0], None
    if temperature is not None:
        choice, q = _draw(
            lattice, choice, counts, temperature[:, None, None, None], uniforms[:, :, None, None]
        )
    chosen = _follow(choice)  # [B, J]
    # Every predecessor of row 0 is the anchor, so that candidate 0 stands for it.
    came_from = jnp.pad(chosen[:, :-1], ((0, 0), (1, 0)))[:, :, None, None]
    path = _take(ids, chosen[:, :, None])[:, :, 0]
    scores = _take(lattice, came_from)[:, :, 0]
    return path, scores, None if q is None else _take(q, came_from)[:, :, 0]


def _follow(choice) -> jax.Array:
    """Return i32[B, J], the candidate chosen in each row.

    choice[b, j, p] is row j's candidate after candidate p of the row before; row 0 starts from
    p = 0. Composing rows at distance 1, 2, 4, ... takes log2(J) dependent look-ups where a walk
    takes J.
    """
    distance = 1
    while distance < choice.shape[1]:
        before = jnp.pad(choice[:, :-distance], ((0, 0), (distance, 0), (0, 0)))
        choice = _take(choice, before)
        distance *= 2
    return choice[:, :, 0]


def _orderable(scores, counts) -> jax.Array:
    """Finite scores, so that > orders them and no difference is NaN; what does not count is least.

    NaN becomes minus the largest number, an infinity the largest of its sign.
    """
    scores = jnp.where(jnp.isnan(scores) | ~counts, -_LARGEST, scores)
    return jnp.minimum(jnp.maximum(scores, -_LARGEST), _LARGEST)


def _best_candidate(scores, ids, counts) -> tuple[jax.Array, jax.Array]:
    """Return index along the last axis and id of the largest score, equal ones by lowest id.

    Both in one minimum, of ids and indices packed (`_MAX_VOCAB`): a reduction more would
    lengthen the chain of rows.
    """
    scores = _orderable(scores, counts)
    is_best = counts & (scores == jnp.max(scores, axis=-1, keepdims=True))
    packed = jnp.where(is_best, ids * CANDIDATES + _slots(scores), _NO_ID)
    best = jnp.min(packed, axis=-1)
    return best & (CANDIDATES - 1), best >> (CANDIDATES.bit_length() - 1)


def _draw(scores, best, counts, temperature, uniforms) -> tuple[jax.Array, jax.Array]:
    """Return the index drawn along the last axis and q; `best` is drawn at temperature 0."""
    scores = _orderable(scores, counts)
    slot = _slots(scores)
    is_best = slot == jnp.expand_dims(best, -1)
    is_greedy = ~(temperature > 0)
    scores = scores - jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(counts, jnp.exp(scores / jnp.where(is_greedy, 1.0, temperature)), 0.0)
    q = weights / jnp.sum(weights, axis=-1, keepdims=True)
    q = jnp.where(is_greedy, is_best.astype(jnp.float32), q)
    sums = jnp.cumsum(q, axis=-1)
    # q > 0 since rounded sums may step up beside a q of 0; the whole is what q really sums to.
    is_past = (sums > uniforms * jnp.max(sums, axis=-1, keepdims=True)) & (q > 0)
    first = jnp.min(jnp.where(is_past, slot, _NO_ID), axis=-1)
    return jnp.where(first == _NO_ID, best, first), q


def _slots(x) -> jax.Array:
    """i32 index along the last axis, in the shape of `x`."""
    return lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)


def _take(x, index) -> jax.Array:
    """`take_along_axis` of axis 2; every index here is computed in range."""
    return jnp.take_along_axis(x, index, 2, mode="promise_in_bounds", wrap_negative_indices=False)


def _rows_f32(codebook, ids) -> jax.Array:
    """Gather codebook rows as f32; every id is a token's."""
    rows = codebook.at[ids].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return rows.astype(jnp.float32)


class _Row(NamedTuple):
    """What one draft row has of its own."""

    ids: jax.Array  # i32[16]
    vals: jax.Array  # f32[16]
    hproj: jax.Array  # [r], padded


class _Edges(NamedTuple):
    """Codebook rows of the candidates before a row and of its own."""

    left: jax.Array  # [16, r]
    right: jax.Array  # [16, r]


def _walk_kernel(
    anchor_ref,  # i32[B]
    vals_ref,  # f32[B, J, 16]
    ids_ref,  # i32[B, J, 16]
    hproj_ref,  # [B, J, r]
    predecessor_ref,  # [V, r]
    successor_ref,  # [V, r]
    *refs,  # if sampled, temperature f32[B] and uniforms f32[B, J]; path, scores and, if sampled, q
    k: int,
    depth: int,
):
    """Walk one sequence."""
    sequence = pl.program_id(0)
    rows, rank = hproj_ref.shape[1:]
    slot = jnp.arange(CANDIDATES, dtype=jnp.int32)
    dim = jnp.arange(next_power_of_2(rank), dtype=jnp.int32)
    is_dim, counts = dim < rank, slot < k
    noise = refs[:2] if len(refs) == 5 else ()
    path_ref, scores_ref, *q_ref = refs[len(noise) :]

    def read_row(j) -> _Row:
        j = jnp.minimum(j, rows - 1)
        return _Row(
            plgpu.load(ids_ref.at[sequence, j, slot]),
            plgpu.load(vals_ref.at[sequence, j, slot]),
            plgpu.load(hproj_ref.at[sequence, j, dim], mask=is_dim, other=0.0),
        )

    def read_edges(before, row: _Row) -> _Edges:
        mask = counts[:, None] & is_dim[None, :]
        read = lambda ref, ids: plgpu.load(ref.at[ids[:, None], dim[None, :]], mask=mask, other=0.0)
        return _Edges(read(predecessor_ref, before), read(successor_ref, row.ids))

    def score(came_from, row: _Row, edges: _Edges):
        """Scores f32[16] of a row whose predecessor is candidate `came_from`."""
        left, right = edges.left.astype(jnp.float32), edges.right.astype(jnp.float32)
        left = jnp.sum(jnp.where((slot == came_from)[:, None], left, 0.0), axis=0)  # [r]
        left = left * row.hproj.astype(jnp.float32)
        scores = row.vals + jnp.sum(left[None, :] * right, axis=1)
        return jnp.where(counts, scores, MASK_VALUE)

    def step(j, carry):
        came_from, ahead, edges = carry
        ahead = (*ahead, read_row(j + depth + 1))
        edges = (*edges, read_edges(ahead[depth - 1].ids, ahead[depth]))
        scores = score(came_from, ahead[0], edges[0])
        choice, token = _best_candidate(scores, ahead[0].ids, counts)
        if noise:
            temperature = plgpu.load(noise[0].at[sequence])
            choice, q = _draw(
                scores, choice, counts, temperature, plgpu.load(noise[1].at[sequence, j])
            )
            plgpu.store(q_ref[0].at[sequence, j, slot], q)
            token = jnp.min(jnp.where(slot == choice, ahead[0].ids, _NO_ID))
        plgpu.store(path_ref.at[sequence, j], token)
        plgpu.store(scores_ref.at[sequence, j, slot], scores)
        return choice, ahead[1:], edges[1:]

    ahead = tuple(read_row(jnp.int32(i)) for i in range(depth + 1))
    anchors = jnp.broadcast_to(plgpu.load(anchor_ref.at[sequence]), (CANDIDATES,))
    before = [anchors, *(row.ids for row in ahead)]
    edges = tuple(read_edges(before[i], ahead[i]) for i in range(depth))
    lax.fori_loop(0, rows, step, (jnp.int32(0), ahead, edges))


@partial(jax.jit, static_argnames=("k", "config", "interpret"))
def _selector_walk_pallas(
    anchor,
    vals,
    ids,
    hproj,
    predecessor,
    successor,
    temperature,
    uniforms,
    *,
    k: int,
    config: SelectorWalkConfig,
    interpret: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Both walks in one launch."""
    noise = () if temperature is None else (temperature, uniforms)
    per_row = jax.ShapeDtypeStruct(vals.shape, jnp.float32)
    path, scores, *q = pl.pallas_call(
        partial(_walk_kernel, k=k, depth=config.depth),
        out_shape=[jax.ShapeDtypeStruct(ids.shape[:2], jnp.int32), per_row]
        + [per_row] * bool(noise),
        grid=(vals.shape[0],),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
        interpret=interpret,
        name="selector_walk",
    )(anchor, vals, ids, hproj, predecessor, successor, *noise)
    return path, scores, q[0] if q else None
