"""Few-row matrix products over weights kept as in checkpoints, with their fused epilogues.

Weights are `[out, in]` and `y = x @ w.T`. Accumulation is f32; roundings are those of the models'
own code: the product is rounded to the activations' dtype before anything else touches it.

A program of the kernel holds a tile of rows and reads a tile of weight rows along `in`, once. Few
output tiles leave most of a GPU idle, so the sum over `in` can be split over programs; the parts
are written as f32 and added in order by one fusion, which also adds the residual. Tiles come from
the table in `_skinny_tiles` and depend on shapes alone, so a row's bits do too.

"auto" runs XLA's product unless that table says otherwise: today it never does, since XLA is as
fast in the whole loop. impl="triton" (`skinny_matmul` alone) is the same tile loop through
jax-triton, for the day that Pallas' Triton backend goes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._launch import check_float, check_rank, check_shape, dispatch, dot_precision
from pallas_kernels._skinny_tiles import (
    SkinnyMatmulConfig,
    auto_takes_kernel,
    rows_in_block,
    stages_that_fit,
    tiles_for,
)


def _accumulate(x_ref, w_refs, accs, *, inner: int, config: SkinnyMatmulConfig, masks):
    """Add this program's part of x @ w.T over `in` for each (weight, its rows).

    x_ref: [N, in]; w_refs: of (w_ref [out, in], rows i32[block_n] of it).
    masks: (of columns, of weight rows), static: whether a tile can reach past the end.
    """
    block_r, block_k = accs[0].shape[0], config.block_k
    steps = pl.cdiv(inner, block_k * config.split_k)
    first = pl.program_id(0) * steps
    rows = pl.program_id(2) * block_r + jnp.arange(block_r, dtype=jnp.int32)
    past_columns, past_rows = masks

    def load(ref, row, col, limit=None):
        inside = None
        if past_columns:
            inside = jnp.broadcast_to(col[None, :] < inner, (row.size, col.size))
        if limit is not None:
            below = jnp.broadcast_to(row[:, None] < limit, (row.size, col.size))
            inside = below if inside is None else inside & below
        tile = ref.at[row[:, None], col[None, :]]
        if inside is None:
            return plgpu.load(tile)
        return plgpu.load(tile, mask=inside, other=0)

    def step(i, accs):
        col = (first + i) * block_k + jnp.arange(block_k, dtype=jnp.int32)
        x = load(x_ref, rows, col)  # [block_r, block_k]
        added = []
        for acc, (w_ref, w_rows) in zip(accs, w_refs, strict=True):
            w = load(w_ref, w_rows, col, w_ref.shape[0] if past_rows else None)
            precision = dot_precision(x.dtype)
            added.append(acc + plgpu.dot(x, w, trans_b=True, precision=precision))
        return tuple(added)

    return lax.fori_loop(0, steps, step, accs)


def _matmul_kernel(
    x_ref,  # [N, in], N a multiple of block_r
    w_ref,  # [out, in]
    *refs,  # residual [N, out] if there is one; y [N, out], or its parts [split_k, N, out]
    block_r: int,
    config: SkinnyMatmulConfig,
    masks,
):
    *residual_ref, y_ref = refs
    rows = pl.program_id(2) * block_r + jnp.arange(block_r, dtype=jnp.int32)
    cols = pl.program_id(1) * config.block_n + jnp.arange(config.block_n, dtype=jnp.int32)
    acc = jnp.zeros((block_r, config.block_n), jnp.float32)
    (acc,) = _accumulate(
        x_ref, [(w_ref, cols)], (acc,), inner=x_ref.shape[1], config=config, masks=masks
    )
    at = rows[:, None], cols[None, :]
    if config.split_k > 1:
        plgpu.store(y_ref.at[(pl.program_id(0), *at)], acc)
        return
    y = acc.astype(y_ref.dtype)
    if residual_ref:
        y = y + plgpu.load(residual_ref[0].at[at])
    plgpu.store(y_ref.at[at], y)


def _swiglu_kernel(
    x_ref,  # [N, in], N a multiple of block_r
    w_ref,  # [2 * F, in]: gate's rows, then up's
    y_ref,  # [N, F], F rounded up to block_n
    *,
    ffn: int,
    block_r: int,
    config: SkinnyMatmulConfig,
    masks,
):
    rows = pl.program_id(2) * block_r + jnp.arange(block_r, dtype=jnp.int32)
    cols = pl.program_id(1) * config.block_n + jnp.arange(config.block_n, dtype=jnp.int32)
    zero = jnp.zeros((block_r, config.block_n), jnp.float32)
    both = [(w_ref, cols), (w_ref, ffn + cols)]
    gate, up = _accumulate(
        x_ref, both, (zero, zero), inner=x_ref.shape[1], config=config, masks=masks
    )
    dtype = y_ref.dtype
    gate = gate.astype(dtype).astype(jnp.float32)
    inner = (gate * jax.nn.sigmoid(gate)).astype(dtype) * up.astype(dtype)
    plgpu.store(y_ref.at[rows[:, None], cols[None, :]], inner)


def _launch(kernel, name: str, x, w, extra, out, *, block_n, config, block_r, interpret):
    """Run one of the two kernels; `out` is the result's ShapeDtypeStruct."""
    grid = (config.split_k, out.shape[-1] // block_n, x.shape[0] // block_r)
    return pl.pallas_call(
        partial(kernel, block_r=block_r, config=config),
        grid=grid,
        out_shape=out,
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps,
            num_stages=stages_that_fit(config, block_r, x.dtype.itemsize),
        ),
        interpret=interpret,
        name=name,
    )(x, w, *extra)


def _pad(x, rows: int, columns: int):
    """`x` with zero rows and columns up to the given counts."""
    missing = (rows - x.shape[0], columns - x.shape[1])
    return jnp.pad(x, [(0, count) for count in missing]) if any(missing) else x


@partial(jax.jit, static_argnames=("out_dtype", "config", "interpret"))
def skinny_matmul_pallas(x, w, residual, *, out_dtype, config, interpret: bool) -> jax.Array:
    """`skinny_matmul` by the kernel."""
    n, inner = x.shape
    out = w.shape[0]
    block_r = rows_in_block(n)
    rows = -(-n // block_r) * block_r
    columns = -(-out // config.block_n) * config.block_n
    masks = (bool(inner % (config.block_k * config.split_k)), columns != out)
    is_split = config.split_k > 1
    extra = [] if residual is None or is_split else [_pad(residual, rows, columns)]
    shape = (config.split_k, rows, columns) if is_split else (rows, columns)
    y = _launch(
        partial(_matmul_kernel, masks=masks),
        "skinny_matmul",
        _pad(x, rows, inner),
        w,
        extra,
        jax.ShapeDtypeStruct(shape, jnp.float32 if is_split else out_dtype),
        block_n=config.block_n,
        config=config,
        block_r=block_r,
        interpret=interpret,
    )
    if is_split:
        y = _sum_in_order(y, out_dtype)
        y = y if residual is None else y[:n, :out] + residual
    return y[:n, :out]


def _by_triton(op: str, x, w, residual, *, out_dtype, config) -> jax.Array:
    """`skinny_matmul` by jax-triton, or the sentence that says what it needs."""
    try:
        from pallas_kernels._skinny_triton import product
    except ImportError as error:
        raise NotImplementedError(
            f"{op}: impl='triton' needs jax-triton and triton on a CUDA device (pip install "
            f"'dflash-jax[triton]'; {error}), supported without them are 'auto', 'xla' and 'pallas'"
        ) from error
    n, out = x.shape[0], w.shape[0]
    block_r = rows_in_block(n)
    x = _pad(jnp.asarray(x), -(-n // block_r) * block_r, x.shape[1])
    part_dtype = jnp.float32 if config.split_k > 1 else out_dtype
    parts = product(x, jnp.asarray(w), out_dtype=part_dtype, block_r=block_r, config=config)
    y = _sum_in_order(parts, out_dtype)[:n, :out]
    return y if residual is None else y + residual


def _sum_in_order(parts, dtype) -> jax.Array:
    """Add [S, N, out] from the first part to the last and round once."""
    total = parts[0]
    for i in range(1, parts.shape[0]):
        total = total + parts[i]
    return total.astype(dtype)


@partial(jax.jit, static_argnames=("config", "interpret"))
def skinny_matmul_swiglu_pallas(x, w_gate_up, *, config, interpret: bool) -> jax.Array:
    """`skinny_matmul_swiglu` by the kernel: gate and up share a program, nothing is split."""
    n, inner = x.shape
    ffn = w_gate_up.shape[0] // 2
    block_n = max(16, config.block_n // 2)  # of each half, so that a step reads as many bytes
    halves = SkinnyMatmulConfig(block_n, config.block_k, 1, config.num_warps, config.num_stages)
    block_r = rows_in_block(n)
    rows, columns = -(-n // block_r) * block_r, -(-ffn // block_n) * block_n
    masks = (bool(inner % config.block_k), columns != ffn)
    y = _launch(
        partial(_swiglu_kernel, ffn=ffn, masks=masks),
        "skinny_matmul_swiglu",
        _pad(x, rows, inner),
        w_gate_up,
        [],
        jax.ShapeDtypeStruct((rows, columns), x.dtype),
        block_n=block_n,
        config=halves,
        block_r=block_r,
        interpret=interpret,
    )
    return y[:n, :ffn]


def skinny_matmul(
    x,
    w,
    *,
    residual=None,
    out_dtype=None,
    impl: str = "auto",
    config: SkinnyMatmulConfig | None = None,
) -> jax.Array:
    """Multiply rows with a weight, optionally adding a residual.

    Without a residual the f32 sum is rounded once, to `out_dtype`. With one, the sum is rounded to
    the dtype of `x`, then the residual is added and the result rounded again.

    Args:
      x: bf16|f32[N, in] rows.
      w: [out, in] in the dtype of `x`.
      residual: [N, out] in the dtype of `x`, or None.
      out_dtype: dtype of the result, by default that of `x`; only without a residual.
      impl: which implementation runs; "triton" needs the package jax-triton.
      config: tiles of the kernel, by default the table's.
    Returns:
      [N, out] rows.
    """
    op = "skinny_matmul"
    n, out = _check_operands(op, x, w, "w")
    dtype = jnp.result_type(x)
    out_dtype = dtype if out_dtype is None else jnp.dtype(out_dtype)
    if residual is not None:
        check_shape(op, "residual", residual, (n, out))
        if jnp.result_type(residual) != dtype or out_dtype != dtype:
            raise ValueError(
                f"{op}: residual is {jnp.result_type(residual).name} and out_dtype "
                f"{out_dtype.name}, wanted both {dtype.name} as x"
            )
    inner = jnp.shape(w)[1]
    config = _check_config(op, config) or tiles_for(inner, out)
    if impl == "triton":
        return _by_triton(op, x, w, residual, out_dtype=out_dtype, config=config)
    kernel = partial(skinny_matmul_pallas, config=config)
    if impl == "auto" and not auto_takes_kernel(inner, out):
        kernel = None
    return dispatch(op, impl, kernel, skinny_matmul_xla, x, w, residual, out_dtype=out_dtype)


def skinny_matmul_swiglu(
    x, w_gate_up, *, impl: str = "auto", config: SkinnyMatmulConfig | None = None
) -> jax.Array:
    """Compute `silu(x @ gate.T) * (x @ up.T)` with the weights of both in one array.

    gate and up are rounded to the dtype of `x`; silu is taken in f32 and rounded to it; their
    product is rounded to it.

    Args:
      x: bf16|f32[N, in] rows.
      w_gate_up: [2*F, in] in the dtype of `x`: the gate's rows, then up's.
      impl: which implementation runs.
      config: tiles of the kernel, by default the table's; `split_k` is not used.
    Returns:
      [N, F] rows in the dtype of `x`.
    """
    op = "skinny_matmul_swiglu"
    out = _check_operands(op, x, w_gate_up, "w_gate_up")[1]
    if out % 2:
        raise ValueError(f"{op}: w_gate_up has {out} rows, wanted gate and up, so an even number")
    inner = jnp.shape(w_gate_up)[1]
    config = _check_config(op, config) or tiles_for(inner, out)
    kernel = partial(skinny_matmul_swiglu_pallas, config=config)
    if impl == "auto" and not auto_takes_kernel(inner, out):
        kernel = None
    return dispatch(op, impl, kernel, skinny_matmul_swiglu_xla, x, w_gate_up)


def skinny_matmul_xla(x, w, residual=None, out_dtype=None) -> jax.Array:
    """`skinny_matmul` as one dot."""
    acc = _matmul(x, w)
    if residual is None:
        return acc.astype(out_dtype or x.dtype)
    return acc.astype(x.dtype) + residual


def skinny_matmul_swiglu_xla(x, w_gate_up) -> jax.Array:
    """`skinny_matmul_swiglu` as one dot and one elementwise fusion."""
    gate_up = _matmul(x, w_gate_up).astype(x.dtype)  # [N, 2*F]
    gate, up = jnp.split(gate_up, 2, axis=1)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up


def _matmul(x, w) -> jax.Array:
    """Return `x @ w.T` as f32[N, out]."""
    return lax.dot_general(
        x,
        w,
        (((1,), (1,)), ((), ())),
        precision=dot_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )


def _check_operands(op: str, x, w, name: str) -> tuple[int, int]:
    """Check rows and weight against each other and return (N, out)."""
    n, width = check_rank(op, "x", x, "N in")
    out, _ = check_rank(op, name, w, "out in")
    check_shape(op, name, w, (out, width))
    check_float(op, x=x)
    if jnp.result_type(w) != jnp.result_type(x):
        raise ValueError(
            f"{op}: {name} is {jnp.result_type(w).name}, wanted {jnp.result_type(x).name} as x"
        )
    return n, out


def _check_config(op: str, config: SkinnyMatmulConfig | None) -> SkinnyMatmulConfig | None:
    """Raise unless the tiles are sizes that Triton takes."""
    if config is None:
        return None
    for name in ("block_n", "block_k", "num_warps"):
        value = getattr(config, name)
        least = 1 if name == "num_warps" else 16
        if value < least or value & (value - 1):
            raise ValueError(f"{op}: config.{name} is {value}, wanted a power of two from {least}")
    for name in ("split_k", "num_stages"):
        if getattr(config, name) < 1:
            raise ValueError(f"{op}: config.{name} is {getattr(config, name)}, wanted at least 1")
    return config
