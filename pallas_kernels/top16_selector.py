"""Exact top-16 of vocabulary rows (spec/drafters.md §4.2).

Order is `greedy_rows`': larger value first, equal values by lower token id, NaN as minus infinity.

The kernels search a tree. Pass 1, a program for each row and 4,096 columns, reads the logits once
and writes the maxima of groups of 8, 64, 512 and 4,096 columns. Pass 2, a program a row, keeps the
16 groups of 4,096 that come first by (maximum descending, id ascending), looks at their 128
children, keeps 16 of those, and so on down to the logits. That is exact: were one of the 16 best
entries in another group, each of the 16 groups kept would hold an entry that precedes it. There is
no sort and no round depends on another within a level: an entry's rank is the number of entries
before it, counted over all pairs.

Limits: up to 4,194,304 columns. 16 rows of 151,936 f32 are 9.7 MB read and 1.4 MB of maxima
written, 2.2 us at 4.37 TB/s. On an H200 they take 12.8 us, 15.3 for 248,320 columns; PyTorch's
top-k 86 and 99.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._launch import MASK_VALUE, dispatch, next_power_of_2
from pallas_kernels.greedy_rows import check_vocab, ordered

CANDIDATES = 16
_GROUP = 128  # of the XLA form: 16 groups are as quick to search as one vocabulary's maxima
_BLOCK_V = 4096  # columns of a program of pass 1, a power of either factor
_MAX_ROOTS = 128  # nodes ranked at once, in a matrix of their pairs


@dataclass(frozen=True, slots=True)
class Top16Config:
    """Children a node of the tree, 4 or 8, and warps of the two passes.

    Pass 2 has a thread for each of the 128 children it ranks. With more threads than that Triton
    takes a load for cheap and repeats it, 64 times in each thread; with two warps the matrix of
    pairs spills (31 us in place of 12.5).
    """

    factor: int = 8
    num_warps: int = 4
    pick_warps: int = 4


def top16_config(rows: int, dtype) -> Top16Config:
    """Tiles by shape, as prototypes were fastest with (1 row of f32, 1 and 8 rows of bf16)."""
    is_wide = jnp.dtype(dtype) == jnp.float32
    return Top16Config(factor=4 if rows <= (1 if is_wide else 8) else 8)


def top16(
    logits,
    *,
    k: int = CANDIDATES,
    vocab: int | None = None,
    multiplier: float = 1.0,
    soft_cap: float | None = None,
    impl: str = "auto",
    config: Top16Config | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return the k largest logits of each row and their token ids, exactly.

    A multiplier and a soft cap are applied as the logits are read, and what they give is ordered:
    the cap can make logits equal, and equal ones go to the lowest id.

    Args:
      logits: float[N, V].
      k: candidates wanted, 1 to 16; the entries from k on are masked (MASK_VALUE, id 0).
      vocab: tokens that exist, if columns from there on are padding; those are never returned.
      multiplier: factor on the logits, of either sign.
      soft_cap: if given, the product x becomes soft_cap * tanh(x / soft_cap).
      impl: which implementation runs.
      config: tiles of the kernel.
    Returns:
      vals: f32[N, 16] descending; minus infinity and NaN come back as MASK_VALUE.
      ids: i32[N, 16].
    """
    op = "top16"
    vocab = check_vocab(op, logits, vocab)
    if not 1 <= k <= min(CANDIDATES, vocab):
        raise ValueError(f"{op}: k is {k}, wanted 1 to {min(CANDIDATES, vocab)}")
    if soft_cap is not None and not 0 < soft_cap < float("inf"):
        raise ValueError(f"{op}: soft_cap is {soft_cap}, wanted a positive number or None")
    rows, columns = logits.shape
    config = config or top16_config(rows, logits.dtype)
    most = _MAX_ROOTS * _BLOCK_V * config.factor
    unserved = None
    if columns > most:
        unserved = f"has no kernel for {columns} columns, only for up to {most}"
    static = {"k": k, "vocab": vocab, "multiplier": float(multiplier), "soft_cap": soft_cap}
    kernel = partial(_top16_pallas, config=config)
    return dispatch(op, impl, kernel, top16_xla, logits, unserved=unserved, **static)


def top16_xla(
    logits, *, k: int, vocab: int, multiplier: float = 1.0, soft_cap: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """`top16` by maxima of groups of 128; `lax.top_k` only sees ceil(V / 128) or 2,048 columns."""
    n = logits.shape[0]
    keys = partial(_keys, multiplier=multiplier, soft_cap=soft_cap)
    group = jnp.arange(-(-vocab // _GROUP), dtype=jnp.int32)[None, :]
    if group.size > CANDIDATES:
        _, group = lax.top_k(_group_maxima(keys(logits[:, :vocab])), CANDIDATES)
        group = jnp.sort(group, axis=1)  # top_k's lowest index is then the lowest id
    ids = group[:, :, None] * _GROUP + jnp.arange(_GROUP, dtype=jnp.int32)[None, None, :]
    ids = jnp.broadcast_to(ids, (n, *ids.shape[1:])).reshape(n, -1)  # [N, <= 2048], ascending
    survivors = _take(logits, jnp.minimum(ids, vocab - 1))
    # Past the end ties with a real -inf at most, and loses that tie by its higher id.
    survivors = jnp.where(ids < vocab, keys(survivors), -jnp.inf)
    vals, at = lax.top_k(survivors, k)
    ids = _take(ids, at)
    vals = jnp.where(vals == -jnp.inf, MASK_VALUE, vals)
    rest = ((0, 0), (0, CANDIDATES - k))
    return jnp.pad(vals, rest, constant_values=MASK_VALUE), jnp.pad(ids, rest)


def soft_capped(logits, multiplier: float, soft_cap: float | None) -> jax.Array:
    """Return f32 logits times the multiplier, then capped."""
    x = logits.astype(jnp.float32)
    if multiplier != 1.0:
        x = x * multiplier
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def _keys(logits, multiplier: float, soft_cap: float | None) -> jax.Array:
    """What a row is ordered by, f32."""
    return ordered(soft_capped(logits, multiplier, soft_cap))


def _group_maxima(x) -> jax.Array:
    """Return f32[N, ceil(V / 128)], the maximum of each group of columns."""
    n, columns = x.shape
    pad = -columns % _GROUP
    x = jnp.pad(x, ((0, 0), (0, pad)), constant_values=-jnp.inf)
    return jnp.max(x.reshape(n, -1, _GROUP), axis=2)


def _take(x, index) -> jax.Array:
    """`take_along_axis` of the last axis; every index here is computed in range."""
    return jnp.take_along_axis(x, index, 1, mode="promise_in_bounds", wrap_negative_indices=False)


def _maxima_kernel(
    logits_ref,  # [N, V]
    *maxima_refs,  # f32[N, chunks * n] of n = 4096 / factor, ... , 1 groups a chunk
    vocab: int,
    multiplier: float,
    soft_cap: float | None,
    factor: int,
):
    """Write the maxima of one row's chunk of columns, of every level."""
    row, chunk = pl.program_id(0), pl.program_id(1)
    groups = _BLOCK_V // factor
    child = lax.broadcasted_iota(jnp.int32, (factor, groups), 0)
    group = lax.broadcasted_iota(jnp.int32, (factor, groups), 1)
    ids = (chunk * groups + group) * factor + child
    # Loads are masked by columns, whose number is mostly a multiple of the vector width, and only
    # their values by the number of tokens, which is not.
    x = plgpu.load(logits_ref.at[row, ids], mask=ids < logits_ref.shape[1], other=0.0)
    x = jnp.where(ids < vocab, _keys(x, multiplier, soft_cap), -jnp.inf)
    maxima = jnp.max(x, axis=0)  # [groups]
    for ref in maxima_refs[:-1]:
        at = chunk * groups + jnp.arange(groups, dtype=jnp.int32)
        plgpu.store(ref.at[row, at], maxima)
        groups //= factor
        if groups > 1:
            maxima = jnp.max(maxima.reshape(groups, factor), axis=1)
    plgpu.store(maxima_refs[-1].at[row, chunk], jnp.max(maxima))


def _pick_kernel(
    logits_ref,  # [N, V]
    *refs,  # f32 maxima of each level from the lowest up, then vals f32[N, 16], ids i32[N, 16]
    k: int,
    vocab: int,
    multiplier: float,
    soft_cap: float | None,
    factor: int,
):
    """Walk down one row's tree."""
    row = pl.program_id(0)
    *levels, vals_ref, ids_ref = refs

    def load(ref, nodes):
        return plgpu.load(ref.at[row, nodes], mask=nodes < ref.shape[1], other=-jnp.inf)

    def children(nodes):
        """Indices [nodes, factor] in the level below."""
        return nodes[:, None] * factor + jnp.arange(factor, dtype=jnp.int32)[None, :]

    def keep(values, nodes):
        """Indices [16 * factor] of what the 16 best nodes have below them."""
        return children(_first16(values, nodes)[1]).reshape(CANDIDATES * factor)

    nodes = jnp.arange(_num_roots(levels[-1].shape[1], factor), dtype=jnp.int32)
    if levels[-1].shape[1] <= _MAX_ROOTS:
        values = load(levels.pop(), nodes)
    else:  # one more level, of which pass 1 knows nothing
        values = jnp.max(load(levels[-1], children(nodes)), axis=1)
    while levels:
        nodes = keep(values, nodes)
        values = load(levels.pop(), nodes)
    ids = keep(values, nodes)
    x = plgpu.load(logits_ref.at[row, ids], mask=ids < logits_ref.shape[1], other=0.0)
    x = jnp.where(ids < vocab, _keys(x, multiplier, soft_cap), -jnp.inf)
    vals, ids = _first16(x, ids)
    place = jnp.arange(CANDIDATES, dtype=jnp.int32)
    vals = jnp.where((place < k) & (vals > -jnp.inf), vals, MASK_VALUE)
    plgpu.store(vals_ref.at[row, place], vals)
    plgpu.store(ids_ref.at[row, place], jnp.where(place < k, ids, 0))


def _num_roots(chunks: int, factor: int) -> int:
    """How many nodes pass 2 ranks first: a power of two, no less than it keeps."""
    roots = chunks if chunks <= _MAX_ROOTS else -(-chunks // factor)
    return max(next_power_of_2(roots), CANDIDATES)


def _first16(values, ids) -> tuple[jax.Array, jax.Array]:
    """The 16 first of distinct ids by (value descending, id ascending), in that order.

    Both matrices are reduced over axis 0: Triton spreads axis 1 over the lanes of a warp, and the
    same tree reduced over axis 1 took 38.6 us in place of 12.5.
    """
    mine, other = values[None, :], values[:, None]
    is_before = (other > mine) | ((other == mine) & (ids[:, None] < ids[None, :]))
    rank = jnp.sum(is_before.astype(jnp.int32), axis=0)
    is_at = rank[:, None] == jnp.arange(CANDIDATES, dtype=jnp.int32)[None, :]
    pick = lambda x: jnp.sum(jnp.where(is_at, x[:, None], jnp.zeros_like(x)[:, None]), axis=0)
    return pick(values), pick(ids)


@partial(jax.jit, static_argnames=("k", "vocab", "multiplier", "soft_cap", "config", "interpret"))
def _top16_pallas(
    logits,
    *,
    k: int,
    vocab: int,
    multiplier: float,
    soft_cap: float | None,
    config: Top16Config,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """`top16` in two launches."""
    rows, columns = logits.shape
    chunks, factor = -(-columns // _BLOCK_V), config.factor
    levels, groups = [], _BLOCK_V
    while groups > 1:
        groups //= factor
        levels.append(jax.ShapeDtypeStruct((rows, chunks * groups), jnp.float32))
    keys = {"vocab": vocab, "multiplier": multiplier, "soft_cap": soft_cap, "factor": factor}
    maxima = pl.pallas_call(
        partial(_maxima_kernel, **keys),
        out_shape=levels,
        grid=(rows, chunks),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps),
        interpret=interpret,
        name="top16_maxima",
    )(logits)
    vals, ids = pl.pallas_call(
        partial(_pick_kernel, k=k, **keys),
        out_shape=[
            jax.ShapeDtypeStruct((rows, CANDIDATES), dtype) for dtype in (jnp.float32, jnp.int32)
        ],
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(num_warps=config.pick_warps),
        interpret=interpret,
        name="top16_pick",
    )(logits, *maxima)
    return vals, ids
