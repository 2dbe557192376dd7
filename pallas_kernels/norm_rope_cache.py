"""RMSNorm of queries and keys, RoPE, and the write into the pages, straight from the fused GEMM.

Rows hold `[q heads | k heads | v heads]` of one layer, or `[k heads | v heads]` of each of several
layers (a drafter's context). Pools are `[pages, K, page_size, D]`, written in place under donation;
slot = page * page_size + offset, and a negative slot writes nothing. Statistics and rotation are
f32; a normed value is rounded to the dtype of the rows, and a rotated one again, as the models'
own code does.

A value that is not finite is stored as 0 and its key as NaN: a draft must not reach the rows before
it, which read its value with weight 0, and 0 * NaN is NaN. The key carries the NaN to the rows that
do see it.

The kernel runs a warp for each row and each query or kv head, all layers in one launch. Bytes: the
rows once, q once, K and V once; 16 rows of 32/8 heads of 128 in bf16 are 0.4 MB, 0.1 us at
4.37 TB/s, so that the launch is all of its cost: 2.0 us in a decode of an H200, whose rows are in
the L2, and 4.7 to 5.1 on cold rows, where XLA's form takes 23.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._launch import (
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    dispatch,
    next_power_of_2,
    show,
)
from pallas_kernels.reshape_and_cache import reshape_and_cache_xla

_MAX_HEAD_DIM = 1024  # 32 values a thread of the one warp


class NormRopeCache(NamedTuple):
    """What the op leaves."""

    q: jax.Array | None  # [N, H, D] normed and rotated; None without query heads
    k: jax.Array | None  # [N, K, D] likewise; None unless asked for
    v: jax.Array | None  # [N, K, D]; None unless asked for
    k_pools: tuple[jax.Array, ...]
    v_pools: tuple[jax.Array, ...]


def norm_rope_cache(
    rows,
    cos,
    sin,
    k_pools,
    v_pools,
    slots,
    *,
    num_heads: int,
    q_norm=None,
    k_norms=None,
    eps: float = 1e-6,
    keep_kv: bool = False,
    impl: str = "auto",
) -> NormRopeCache:
    """Norm and rotate the heads of rows, and write keys and values to their slots.

    The kernel serves head dims to 1024; "auto" takes the XLA form for others.

    Args:
      rows: bf16|f32[N, at least (H + 2*L*K) * D]: H query heads, then for each layer its K key
        heads and K value heads. Columns past these are not read.
      cos, sin: f32[N, n] of the rows' positions, 2n <= D: pair (i, i + n) of each head turns, and
        dims from 2n on do not.
      k_pools, v_pools: a pool float[pages, K, page_size, D] a layer, donated by the caller; rows
        are cast to their dtype.
      slots: i32[N], no slot twice; a negative slot drops its row.
      num_heads: H, 0 for a context, whose rows ask nothing.
      q_norm: [D], or None without a norm. In the dtype of `rows` it multiplies what was rounded to
        that dtype; an f32 weight beside narrower rows multiplies before the rounding.
      k_norms: one such weight a layer, or None.
      eps: of the norms.
      keep_kv: whether k and v come back as rows too, for one layer.
      impl: which implementation runs.
    """
    op = "norm_rope_cache"
    pools = _check_pools(op, k_pools, v_pools)
    _, kv_heads, _, d = pools
    n, columns = check_rank(op, "rows", rows, "N columns")
    layers = len(k_pools)
    wanted = (num_heads + 2 * layers * kv_heads) * d
    if num_heads < 0 or columns < wanted:
        raise ValueError(
            f"{op}: rows is {show(rows)}, wanted at least {wanted} columns for {num_heads} query "
            f"heads and {layers} layers of {kv_heads} kv heads of {d}"
        )
    turned = check_rank(op, "cos", cos, "N n")[1]
    check_shape(op, "cos", cos, (n, turned))
    check_shape(op, "sin", sin, (n, turned))
    if 2 * turned > d:
        raise ValueError(
            f"{op}: cos is {show(cos)}, wanted at most {d // 2} columns (head dim {d})"
        )
    check_shape(op, "slots", slots, (n,))
    check_dtype(op, "slots", slots, jnp.int32)
    check_dtype(op, "cos", cos, jnp.float32)
    check_dtype(op, "sin", sin, jnp.float32)
    check_float(op, rows=rows)
    if k_norms is not None and len(k_norms) != layers:
        raise ValueError(f"{op}: {len(k_norms)} k_norms for {layers} layers, wanted one each")
    for name, weight in (("q_norm", q_norm), *(("k_norms", w) for w in k_norms or ())):
        if weight is not None:
            check_shape(op, name, weight, (d,))
            check_float(op, **{name: weight})
    if keep_kv and layers != 1:
        raise ValueError(f"{op}: keep_kv with {layers} layers, wanted one")
    return dispatch(
        op,
        impl,
        _by_kernel,
        norm_rope_cache_xla,
        *(rows, cos, sin, tuple(k_pools), tuple(v_pools), slots, q_norm),
        None if k_norms is None else tuple(k_norms),
        unserved=None if d <= _MAX_HEAD_DIM else f"has a kernel for head dims to 1024, not {d}",
        num_heads=num_heads,
        eps=eps,
        keep_kv=keep_kv,
    )


def _check_pools(op: str, k_pools, v_pools) -> tuple[int, ...]:
    """Return the shape that all pools have."""
    if not k_pools or len(k_pools) != len(v_pools):
        raise ValueError(
            f"{op}: {len(k_pools)} k_pools and {len(v_pools)} v_pools, wanted one a layer"
        )
    shape = check_rank(op, "k_pools[0]", k_pools[0], "pages K page_size D")
    for i, (k_pool, v_pool) in enumerate(zip(k_pools, v_pools, strict=True)):
        check_shape(op, f"k_pools[{i}]", k_pool, shape)
        check_shape(op, f"v_pools[{i}]", v_pool, shape)
        check_float(op, **{f"k_pools[{i}]": k_pool, f"v_pools[{i}]": v_pool})
    return shape


class _Sizes(NamedTuple):
    """Static facts of one call."""

    num_heads: int
    kv_heads: int
    head_dim: int
    turned: int  # n, half of the dims that turn
    page_size: int
    layers: int
    has_q_norm: bool
    has_k_norm: bool
    keep_kv: bool
    eps: float


@partial(jax.jit, static_argnames=("num_heads", "eps", "keep_kv", "interpret"))
def _by_kernel(
    rows, cos, sin, k_pools, v_pools, slots, q_norm, k_norms, *, num_heads, eps, keep_kv, interpret
) -> NormRopeCache:
    """Launch a program for each row and head."""
    n, layers = rows.shape[0], len(k_pools)
    _, kv_heads, page_size, d = k_pools[0].shape
    has_norms = q_norm is not None and num_heads > 0, k_norms is not None
    sizes = _Sizes(
        num_heads, kv_heads, d, cos.shape[1], page_size, layers, *has_norms, keep_kv, eps
    )
    norms = ((q_norm,) if sizes.has_q_norm else ()) + (k_norms or ())
    pools = (*k_pools, *v_pools)
    operands = (rows, cos, sin, slots, *norms, *pools)
    shapes = [(n, num_heads, d)] if num_heads else []
    shapes += [(n, kv_heads, d)] * 2 if keep_kv else []
    outs = [jax.ShapeDtypeStruct(shape, rows.dtype) for shape in shapes]
    outs += [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools]
    first_in, first_out = len(operands) - len(pools), len(outs) - len(pools)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    out = pl.pallas_call(
        partial(_norm_rope_cache_kernel, sizes=sizes),
        out_shape=outs,
        grid=(num_heads + layers * kv_heads, n),
        in_specs=[whole] * len(operands),
        out_specs=[whole] * len(outs),
        input_output_aliases={first_in + i: first_out + i for i in range(len(pools))},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="norm_rope_cache",
    )(*operands)
    q = out[0] if num_heads else None
    k, v = out[first_out - 2 : first_out] if keep_kv else (None, None)
    return NormRopeCache(
        q, k, v, tuple(out[first_out : first_out + layers]), tuple(out[first_out + layers :])
    )


def _norm_rope_cache_kernel(
    rows_ref,  # [N, columns]
    cos_ref,  # f32[N, n]
    sin_ref,  # f32[N, n]
    slots_ref,  # i32[N]
    *refs,  # [q_norm], k_norms, pools as inputs; [q [N, H, D]], [k, v [N, K, D]], pools as outputs
    sizes: _Sizes,
):
    """One row of one query head, or of the keys and values of one kv head of one layer."""
    refs = list(refs)
    take = lambda count: [refs.pop(0) for _ in range(count)]
    (q_norm_ref,) = take(1) if sizes.has_q_norm else (None,)
    k_norm_refs = take(sizes.layers if sizes.has_k_norm else 0)
    take(2 * sizes.layers)  # the same memory as the pools that are written
    (q_ref,) = take(1) if sizes.num_heads else (None,)
    k_ref, v_ref = take(2) if sizes.keep_kv else (None, None)
    k_pool_refs, v_pool_refs = take(sizes.layers), take(sizes.layers)
    head, row = pl.program_id(0), pl.program_id(1)
    column = jnp.arange(next_power_of_2(sizes.head_dim), dtype=jnp.int32)
    exists = column < sizes.head_dim
    rotated = partial(_normed_and_rotated, (rows_ref, cos_ref, sin_ref), row, column, sizes=sizes)

    if q_ref is not None:

        @pl.when(head < sizes.num_heads)
        def _():
            weights = [] if q_norm_ref is None else [q_norm_ref]
            q = rotated(head * sizes.head_dim, weights, jnp.int32(0))
            plgpu.store(q_ref.at[row, head, column], q, mask=exists)

    @pl.when(head >= sizes.num_heads)
    def _():
        layer = (head - sizes.num_heads) // sizes.kv_heads
        kv_head = (head - sizes.num_heads) % sizes.kv_heads
        key_head = sizes.num_heads + 2 * layer * sizes.kv_heads + kv_head
        k = rotated(key_head * sizes.head_dim, k_norm_refs, layer)
        at = (key_head + sizes.kv_heads) * sizes.head_dim + column
        v = plgpu.load(rows_ref.at[row, at], mask=exists, other=0.0)
        if k_ref is not None and v_ref is not None:
            plgpu.store(k_ref.at[row, kv_head, column], k, mask=exists)
            plgpu.store(v_ref.at[row, kv_head, column], v, mask=exists)
        k, v = finite_values(k, v)
        slot = slots_ref[row]
        page, offset = (
            jnp.maximum(slot, 0) // sizes.page_size,
            jnp.maximum(slot, 0) % sizes.page_size,
        )
        for i in range(sizes.layers):
            mask = exists & (slot >= 0) & (layer == i)
            for pool_ref, x in ((k_pool_refs[i], k), (v_pool_refs[i], v)):
                x = x.astype(pool_ref.dtype)
                plgpu.store(pool_ref.at[page, kv_head, offset, column], x, mask=mask)


def _normed_and_rotated(refs, row, column, first_column, weight_refs, layer, *, sizes: _Sizes):
    """Return one head of a row [D], normed with the weight of `layer` if there is one."""
    rows_ref, cos_ref, sin_ref = refs
    n = sizes.turned
    turns = column < 2 * n
    # A value cannot be sliced in Triton, so the other of each pair is loaded beside it.
    other = jnp.where(turns, jnp.where(column < n, column + n, column - n), column)
    exists = column < sizes.head_dim
    x, pair = (
        plgpu.load(rows_ref.at[row, first_column + at], mask=exists, other=0.0)
        for at in (column, other)
    )
    wide, wide_pair = x.astype(jnp.float32), pair.astype(jnp.float32)
    if weight_refs:
        scale = lax.rsqrt(jnp.sum(wide * wide) / sizes.head_dim + sizes.eps)
        weigh = partial(_weighed, scale=scale, dtype=x.dtype, refs=weight_refs, layer=layer)
        wide, wide_pair = (
            weigh(wide, at=column, exists=exists),
            weigh(wide_pair, at=other, exists=exists),
        )
    angle = jnp.where(column < n, column, column - n)
    cos, sin = (plgpu.load(ref.at[row, angle], mask=turns, other=0.0) for ref in (cos_ref, sin_ref))
    turned = wide * cos + jnp.where(column < n, -wide_pair, wide_pair) * sin
    return jnp.where(turns, turned, wide).astype(x.dtype)


def _weighed(wide, *, scale, dtype, refs, layer, at, exists):
    """Return a normed vector as f32, rounded as its dtypes ask."""
    weight = jnp.zeros(at.shape, refs[0].dtype)
    for i, ref in enumerate(refs):
        weight += plgpu.load(ref.at[at], mask=exists & (layer == i), other=0.0)
    if weight.dtype == dtype:
        return ((wide * scale).astype(dtype) * weight).astype(jnp.float32)
    return (wide * scale * weight.astype(jnp.float32)).astype(dtype).astype(jnp.float32)


def finite_values(k, v):
    """Return keys and values as they are stored: see the module's docstring."""
    is_finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
    return jnp.where(is_finite, k, jnp.asarray(jnp.nan, k.dtype)), jnp.where(
        is_finite, v, jnp.zeros((), v.dtype)
    )


def norm_rope_cache_xla(
    rows, cos, sin, k_pools, v_pools, slots, q_norm, k_norms, *, num_heads, eps, keep_kv
) -> NormRopeCache:
    """`norm_rope_cache` as a few fusions and a scatter a pool."""
    _, kv_heads, _, d = k_pools[0].shape
    turn = partial(_norm_and_turn, cos=cos, sin=sin, eps=eps)
    heads = lambda first, count: rows[:, first * d : (first + count) * d].reshape(-1, count, d)
    q = turn(heads(0, num_heads), q_norm) if num_heads else None
    k = v = None
    new_k, new_v = list(k_pools), list(v_pools)
    for i in range(len(new_k)):
        first = num_heads + 2 * i * kv_heads
        k = turn(heads(first, kv_heads), None if k_norms is None else k_norms[i])
        v = heads(first + kv_heads, kv_heads)
        new_k[i], new_v[i] = reshape_and_cache_xla(*finite_values(k, v), new_k[i], new_v[i], slots)
    kept = (k, v) if keep_kv else (None, None)
    return NormRopeCache(q, *kept, tuple(new_k), tuple(new_v))


def _norm_and_turn(x, weight, *, cos, sin, eps):
    """Return x[N, heads, D] normed, if there is a weight, and rotated."""
    if weight is not None:
        wide = x.astype(jnp.float32)
        scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        weight = weight[None, None]
        if weight.dtype == x.dtype:
            x = (wide * scale).astype(x.dtype) * weight
        else:
            x = (wide * scale * weight).astype(x.dtype)
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    c, s = cos[:, None], sin[:, None]
    parts = [first * c - second * s, second * c + first * s, wide[..., 2 * half :]]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
