"""Attention of block rows over the pages of their sequences.

Pools are `[pages, K, page_size, D]`; block_table names the pages of each sequence in order. Query
row r stands at key index q_offset + r. Scores and softmax are f32; what is masked is also read as
zero, since 0 * NaN is NaN, and contributes exact zeros, so that a row's bits depend on its own
inputs and on static shapes only.

The kernel (flash decoding: Dao, Haziza, Massa, Sizov 2023; online softmax: Milakov and Gimelshein
2018) gives a program a tile of query rows, all heads that share a kv head, and a segment of keys,
which it reads in blocks through the table. Segments lie at absolute positions, with sizes by
static shapes alone (`_attention_tiles`). Few rows run their segments in parallel and a second
kernel folds the results; many rows (prefill) or many sequences fill the GPU without that, and a
program takes all segments in turn. Both fold in the same order and to the same bits, since a
maximum is rounded up to an integer, which makes every rescaling an exact power of two.

Bytes: K and V of what is visible are read once a tile of rows (a second tile finds them in L2), a
live segment leaves `rows x D` f32 behind, read once. Limit of a verify of 16 rows, 32/8 heads of
128, at 4.37 TB/s: 1.0 / 3.8 / 31 us for 1k / 4k / 32k keys; two launches cost about 3 us. A program
holds its queries and K and V of num_stages blocks (112 KiB at 3 x 64 keys of 128 in bf16), so two
share a multiprocessor of an H200; segments past the length return before they read a key.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._attention_tiles import (
    TILE_ROWS,
    AttentionConfig,
    Segments,
    attention_config,
    segments_of,
)
from pallas_kernels._attention_xla import paged_attention_xla
from pallas_kernels._launch import (
    MASK_VALUE,
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    dispatch,
    dot_precision,
    is_power_of_2,
    next_power_of_2,
    show,
)

_LOG2_E = 1.4426950408889634
_MIN_DOT_ROWS = 16  # of a Triton dot
_PARALLEL_TILES = 4  # up to here segments run in parallel: partial results grow with the rows
_FOLD_AT_ONCE = 16  # segments whose loads are in flight together when results are folded


def paged_attention(
    q,
    k_pool,
    v_pool,
    block_table,
    args,
    *,
    is_causal: bool,
    window: int | None = None,
    scale: float | None = None,
    impl: str = "auto",
    config: AttentionConfig | None = None,
) -> jax.Array:
    """Attend from block rows to the keys that their sequences have in the pools.

    The kernel serves head dims 16 to 256, pages of a power of two from 4 keys and up to 64 query
    heads a kv head; "auto" takes the XLA form for others.

    Args:
      q: bf16|f32[B, R, H, D] query rows, RoPE applied.
      k_pool, v_pool: float[pages, K, page_size, D], read as the dtype of `q`.
      block_table: i32[B, P] pages of each sequence, -1 = no page: its keys do not exist.
      args: u32[B, 3] = (kv_len, q_offset, q_rope_pos): keys 0..kv_len-1 exist, row r stands at key
        q_offset + r. The third is for kernels that apply RoPE and is not read here.
      is_causal: whether a row sees only keys up to its own position.
      window: a row sees keys less than this many positions before it and, unless causal, after.
      scale: factor on the scores, by default D ** -0.5.
      impl: which implementation runs.
      config: tiles of the kernel, by default those of `attention_config`.
    Returns:
      [B, R, H, D] in the dtype of `q`; zeros for a row that sees no key.
    """
    op = "paged_attention"
    b, r, h, d = check_rank(op, "q", q, "B R H D")
    pool_shape = check_rank(op, "k_pool", k_pool, "pages K page_size D")
    check_shape(op, "v_pool", v_pool, pool_shape)
    kv_heads, page_size = pool_shape[1:3]
    if pool_shape[3] != d:
        raise ValueError(
            f"{op}: q has head dim {d}, wanted {pool_shape[3]} (k_pool {show(k_pool)})"
        )
    if kv_heads < 1 or h % kv_heads:
        raise ValueError(
            f"{op}: q has {h} heads, not a multiple of {kv_heads} kv heads (k_pool {show(k_pool)})"
        )
    pages = check_rank(op, "block_table", block_table, "B P")[1]
    check_shape(op, "block_table", block_table, (b, pages))
    check_shape(op, "args", args, (b, 3))
    check_dtype(op, "block_table", block_table, jnp.int32)
    check_dtype(op, "args", args, jnp.uint32)
    check_float(op, q=q, k_pool=k_pool, v_pool=v_pool)
    if min(r, pages) < 1:
        raise ValueError(f"{op}: {r} query rows over {pages} pages, wanted at least one of each")
    if window is not None and window < 1:
        raise ValueError(f"{op}: window is {window}, wanted at least 1 or None")
    if config is None:
        itemsize = jnp.result_type(q).itemsize
        config = attention_config(h // kv_heads, d, itemsize, pages * page_size, b * kv_heads)
    return dispatch(
        op,
        impl,
        partial(_by_kernel, config=config),
        paged_attention_xla,
        *(q, k_pool, v_pool, block_table, args),
        unserved=_unserved(d, page_size, h // kv_heads),
        is_causal=is_causal,
        window=window,
        scale=d**-0.5 if scale is None else scale,
    )


def _unserved(head_dim: int, page_size: int, heads_per_kv_head: int) -> str | None:
    """What the kernel does not serve of these sizes."""
    if not 16 <= head_dim <= 256:
        return f"has a kernel for head dims 16 to 256, not {head_dim}"
    if page_size < 4 or not is_power_of_2(page_size):
        return f"has a kernel for pages of a power of two from 4 keys, not {page_size}"
    if heads_per_kv_head > TILE_ROWS:
        return f"has a kernel for up to {TILE_ROWS} heads a kv head, not {heads_per_kv_head}"
    return None


class _Softmax(NamedTuple):
    """The softmax of some keys, not yet normalised.

    m: f32[M] at least the largest score, an integer (scores in units of log 2), so that every
    rescaling is by a power of two and exact. l: f32[M] sum of exp2(score - m). acc: f32[M, D] the
    values weighted with the same.
    """

    m: jax.Array
    l: jax.Array
    acc: jax.Array


class _Sizes(NamedTuple):
    """Static facts of one call."""

    rows: int
    heads_per_kv_head: int
    head_dim: int
    page_size: int
    pages: int
    is_causal: bool
    window: int | None
    scale: float
    config: AttentionConfig

    @property
    def group(self) -> int:
        return next_power_of_2(self.heads_per_kv_head)

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.config.block_r)

    @property
    def segments(self) -> Segments:
        return segments_of(self.pages * self.page_size, self.config)

    @property
    def dot_rows(self) -> int:
        return max(_MIN_DOT_ROWS, self.config.block_r * self.group)


@partial(jax.jit, static_argnames=("is_causal", "window", "scale", "config", "interpret"))
def _by_kernel(
    q, k_pool, v_pool, block_table, args, *, is_causal, window, scale, config, interpret
) -> jax.Array:
    """Choose between segments in parallel and in turn, and launch."""
    b, r, h, d = q.shape
    kv_heads, page_size = k_pool.shape[1:3]
    pages = block_table.shape[1]
    sizes = _Sizes(r, h // kv_heads, d, page_size, pages, is_causal, window, scale, config)
    segments, tiles, m_rows = sizes.segments.count, sizes.tiles, sizes.dot_rows
    launch = partial(_call, sizes=sizes, interpret=interpret)
    operands = (q, k_pool, v_pool, block_table, args)
    out = jax.ShapeDtypeStruct(q.shape, q.dtype)
    if segments == 1 or tiles > _PARALLEL_TILES:
        grid = (kv_heads, tiles, b)
        return launch(_in_turn_kernel, "paged_attention", grid, [out], operands, config)[0]
    lanes = (b, kv_heads, tiles, segments, m_rows)
    partials = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (lanes, lanes, (*lanes, d))]
    grid = (kv_heads, tiles * b, segments)  # the first runs fastest
    name = "paged_attention_segments"
    partials = launch(_segment_kernel, name, grid, partials, operands, config)
    operands = (*partials, args)
    return launch(_fold_kernel, "paged_attention_fold", (h, r, b), [out], operands, None)[0]


def _call(kernel, name, grid, outs, operands, config, *, sizes: _Sizes, interpret: bool):
    """Run a kernel over refs to whole arrays; a program of the fold is one warp, `config` None."""
    warps, stages = (config.num_warps, config.num_stages) if config else (1, 1)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        partial(kernel, sizes=sizes),
        out_shape=outs,
        grid=grid,
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(outs),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(*operands)


def _segment_kernel(
    q_ref,  # [B, R, H, D]
    k_ref,  # [pages, K, page_size, D]
    v_ref,  # [pages, K, page_size, D]
    table_ref,  # i32[B, P]
    args_ref,  # u32[B, 3]
    m_ref,  # out f32[B, K, tiles, segments, M]
    l_ref,  # out f32[B, K, tiles, segments, M]
    acc_ref,  # out f32[B, K, tiles, segments, M, D]
    *,
    sizes: _Sizes,
):
    """One segment of keys of one tile of rows and one kv head."""
    kv_head = pl.program_id(0)
    sequence, tile = pl.program_id(1) // sizes.tiles, pl.program_id(1) % sizes.tiles
    segment = sizes.segments.count - 1 - pl.program_id(2)  # the longest are launched first
    visible = _visible_keys(args_ref, sequence, tile, sizes)
    start, end = sizes.segments.keys_of(segment)

    @pl.when((start < visible[1]) & (end > visible[0]))
    def _():
        refs = (q_ref, k_ref, v_ref, table_ref, args_ref)
        found = _attend(refs, (sequence, kv_head, tile), (start, end), visible, sizes)
        at = (sequence, kv_head, tile, segment)
        row, column = jnp.arange(sizes.dot_rows), _columns(sizes)
        plgpu.store(m_ref.at[*at, row], found.m)
        plgpu.store(l_ref.at[*at, row], found.l)
        mask = jnp.broadcast_to((column < sizes.head_dim)[None], found.acc.shape)
        plgpu.store(acc_ref.at[*at, row[:, None], column[None]], found.acc, mask=mask)


def _fold_kernel(
    m_ref,  # f32[B, K, tiles, segments, M]
    l_ref,  # f32[B, K, tiles, segments, M]
    acc_ref,  # f32[B, K, tiles, segments, M, D]
    args_ref,  # u32[B, 3]
    out_ref,  # out [B, R, H, D]
    *,
    sizes: _Sizes,
):
    """One query row of one head: fold what its live segments left, in order."""
    head, row, sequence = (pl.program_id(i) for i in range(3))
    kv_head, tile = head // sizes.heads_per_kv_head, row // sizes.config.block_r
    m_row = row % sizes.config.block_r * sizes.group + head % sizes.heads_per_kv_head
    visible = _visible_keys(args_ref, sequence, tile, sizes)
    first, end = _live_segments(visible, sizes)
    count = sizes.segments.count
    column = _columns(sizes)
    exists = column < sizes.head_dim

    def fold_some(step, carry):
        for i in range(min(_FOLD_AT_ONCE, count)):
            segment = step * _FOLD_AT_ONCE + i
            live = (segment >= first) & (segment < end)
            at = (sequence, kv_head, tile, jnp.minimum(segment, count - 1), m_row)
            m = plgpu.load(m_ref.at[at], mask=live, other=MASK_VALUE)
            l = plgpu.load(l_ref.at[at], mask=live, other=0.0)
            acc = plgpu.load(acc_ref.at[*at, column], mask=live & exists, other=0.0)
            carry = _fold(_Softmax(*carry), _Softmax(m, l, acc))
        return carry

    empty = _Softmax(jnp.float32(MASK_VALUE), jnp.float32(0), jnp.zeros(column.shape, jnp.float32))
    steps = first // _FOLD_AT_ONCE, (end + (_FOLD_AT_ONCE - 1)) // _FOLD_AT_ONCE
    _, l, acc = lax.fori_loop(*steps, fold_some, empty)
    out = (acc / jnp.where(l == 0, 1.0, l)).astype(out_ref.dtype)
    plgpu.store(out_ref.at[sequence, row, head, column], out, mask=exists)


def _in_turn_kernel(
    q_ref,  # [B, R, H, D]
    k_ref,  # [pages, K, page_size, D]
    v_ref,  # [pages, K, page_size, D]
    table_ref,  # i32[B, P]
    args_ref,  # u32[B, 3]
    out_ref,  # out [B, R, H, D]
    *,
    sizes: _Sizes,
):
    """All segments of one tile of rows and one kv head, one after another."""
    kv_head, tile, sequence = (pl.program_id(i) for i in range(3))
    visible = _visible_keys(args_ref, sequence, tile, sizes)
    refs = (q_ref, k_ref, v_ref, table_ref, args_ref)
    attend = partial(_attend, refs, (sequence, kv_head, tile), visible=visible, sizes=sizes)

    def fold_next(segment, carry):
        return _fold(_Softmax(*carry), attend(keys=sizes.segments.keys_of(segment)))

    if sizes.segments.count == 1:
        _, l, acc = attend(keys=visible)
    else:
        live = _live_segments(visible, sizes)
        _, l, acc = lax.fori_loop(*live, fold_next, _nothing_seen(sizes))
    out = (acc / jnp.where(l == 0, 1.0, l)[:, None]).astype(out_ref.dtype)  # [M, D]
    (row, head, column), mask = _tile_of(kv_head, tile, sizes)
    plgpu.store(out_ref.at[sequence, row, head, column], out, mask=mask)


def _visible_keys(args_ref, sequence, tile, sizes: _Sizes):
    """Return the first key and one past the last that any row of a tile may see."""
    kv_len, first_row = (args_ref[sequence, i].astype(jnp.int32) for i in range(2))
    block_r = sizes.config.block_r
    last_row = first_row + jnp.minimum(tile * block_r + block_r, sizes.rows) - 1
    first_row = first_row + tile * block_r
    end = jnp.minimum(kv_len, sizes.pages * sizes.page_size)
    if sizes.is_causal:
        end = jnp.minimum(end, last_row + 1)
    elif sizes.window is not None:
        end = jnp.minimum(end, last_row + sizes.window)
    if sizes.window is None:
        return jnp.int32(0), end
    return jnp.maximum(first_row - (sizes.window - 1), 0), end


def _live_segments(visible, sizes: _Sizes):
    """Return the first segment with a visible key and one past the last."""
    first, last = sizes.segments.holding(visible[0]), sizes.segments.holding(visible[1] - 1)
    return first, jnp.where(visible[0] < visible[1], last + 1, first)


def _columns(sizes: _Sizes):
    return jnp.arange(next_power_of_2(sizes.head_dim), dtype=jnp.int32)


def _tile_of(kv_head, tile, sizes: _Sizes):
    """Indices (row, head, column), together [M, D], of a tile in q, and which of them exist."""
    m = jnp.arange(sizes.dot_rows, dtype=jnp.int32)[:, None]
    column = _columns(sizes)[None]
    row, in_group = m // sizes.group, m % sizes.group
    exists = (row < sizes.config.block_r) & (in_group < sizes.heads_per_kv_head)
    row = tile * sizes.config.block_r + row
    mask = exists & (row < sizes.rows) & (column < sizes.head_dim)
    return (row, kv_head * sizes.heads_per_kv_head + in_group, column), mask


def _nothing_seen(sizes: _Sizes) -> _Softmax:
    rows, columns = sizes.dot_rows, next_power_of_2(sizes.head_dim)
    return _Softmax(
        jnp.full((rows,), MASK_VALUE, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, columns), jnp.float32),
    )


def _attend(refs, lane, keys, visible, sizes: _Sizes) -> _Softmax:
    """Attend from a tile to the visible keys of a segment, a block of keys at a time."""
    q_ref, k_ref, v_ref, table_ref, args_ref = refs
    sequence, kv_head, tile = lane
    (row, head, column), mask = _tile_of(kv_head, tile, sizes)
    q = plgpu.load(q_ref.at[sequence, row, head, column], mask=mask, other=0.0)  # [M, D]
    block = sizes.config.block_s
    row_pos = args_ref[sequence, 1].astype(jnp.int32) + row
    low, high = _reach(row_pos, visible, sizes)  # [M, 1]
    precision = dot_precision(q.dtype)

    def step(i, carry):
        m, l, acc = carry
        key_pos = i * block + jnp.arange(block, dtype=jnp.int32)
        exists = (key_pos >= visible[0]) & (key_pos < visible[1])
        page = _pages(table_ref, sequence, key_pos, i * block, exists, sizes)
        exists = exists & (page >= 0)
        is_read = exists[:, None] & (column < sizes.head_dim)  # [S, D]
        offset = (key_pos % sizes.page_size)[:, None]
        at = (jnp.maximum(page, 0)[..., *[None] * page.ndim], kv_head, offset, column)
        k = plgpu.load(k_ref.at[at], mask=is_read, other=0.0).astype(q.dtype)
        v = plgpu.load(v_ref.at[at], mask=is_read, other=0.0).astype(q.dtype)
        scores = plgpu.dot(q, k, trans_b=True, precision=precision) * (sizes.scale * _LOG2_E)
        # One comparison a score where a block lies within a page and there is no window: masks
        # that are made of several took half of the loop's instructions.
        sees = key_pos[None] < (high if page.ndim else jnp.where(page >= 0, high, 0))
        if page.ndim:
            sees &= exists[None]
        if sizes.window is not None:
            sees &= key_pos[None] >= low
        scores = jnp.where(sees, scores, MASK_VALUE)  # [M, S]
        m_new = jnp.maximum(m, jnp.ceil(jnp.max(scores, axis=1)))
        old = _power_of_2(m - m_new)
        # A row that sees nothing must not subtract MASK_VALUE from itself: exp2(0) is 1.
        p = jnp.exp2(scores - jnp.where(m_new == MASK_VALUE, 0.0, m_new)[:, None])
        l = l * old + jnp.sum(p, axis=1)
        acc = acc * old[:, None] + plgpu.dot(p.astype(v.dtype), v, precision=precision)
        return _Softmax(m_new, l, acc)

    first = jnp.maximum(keys[0], visible[0]) // block
    end = (jnp.minimum(keys[1], visible[1]) + (block - 1)) // block
    return _Softmax(*lax.fori_loop(first, end, step, _nothing_seen(sizes)))


def _reach(row_pos, visible, sizes: _Sizes):
    """Return the first key and one past the last that a row sees, in the shape of `row_pos`."""
    low, high = jnp.broadcast_to(visible[0], row_pos.shape), visible[1]
    if sizes.is_causal:
        high = jnp.minimum(high, row_pos + 1)
    elif sizes.window is not None:
        high = jnp.minimum(high, row_pos + sizes.window)
    if sizes.window is not None:
        low = jnp.maximum(low, row_pos - (sizes.window - 1))
    return low, jnp.broadcast_to(high, row_pos.shape)


def _pages(table_ref, sequence, key_pos, first_key, exists, sizes: _Sizes):
    """Return the pages of a block of keys, -1 for none: i32[S], or i32[] for a block within one."""
    if sizes.page_size >= sizes.config.block_s:
        return table_ref[sequence, first_key // sizes.page_size]
    index = key_pos // sizes.page_size
    return plgpu.load(table_ref.at[sequence, index], mask=exists, other=-1)


def _fold(old: _Softmax, new: _Softmax) -> _Softmax:
    """Join the softmaxes of two sets of keys; one that saw nothing leaves the other's bits."""
    m = jnp.maximum(old.m, new.m)
    scale_old, scale_new = _power_of_2(old.m - m), _power_of_2(new.m - m)
    columns = [None] * (old.acc.ndim - old.m.ndim)
    acc = old.acc * scale_old[..., *columns] + new.acc * scale_new[..., *columns]
    return _Softmax(m, old.l * scale_old + new.l * scale_new, acc)


def _power_of_2(n):
    """2 ** n for integers n <= 0 in f32, exactly; 0 below the normal numbers."""
    exponent = jnp.maximum(n, -127.0).astype(jnp.int32) + 127
    return lax.bitcast_convert_type(exponent << 23, jnp.float32)
