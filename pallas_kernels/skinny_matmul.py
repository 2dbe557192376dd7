"""Few-row matrix products over weights kept as in checkpoints, with their fused epilogues.

Weights are `[out, in]` and `y = x @ w.T`, or with `by_input` `[in, out]` and `y = x @ w`, which
XLA's products on a GPU read faster and the kernels do not take. Accumulation is f32; roundings are
those of the models' own code: the product is rounded to the activations' dtype before anything else
touches it.

A program of the kernel holds a tile of rows and reads a tile of weight rows along `in`, once. Few
output tiles leave most of a GPU idle, so the sum over `in` can be split over programs; the parts
are written as f32 and added in order by one fusion, which also adds the residual. Tiles come from
the table in `_skinny_tiles` and depend on shapes alone, so a row's bits do too.

An RMSNorm before the product can be part of it: each program then reads its rows once more first,
for their statistics, which spares a small model a launch a product. A short product is a chain of
waits, for memory and for the tensor cores' sums: its few steps are all under way at once, meanwhile
the statistics are made, and the residual is read before all.

"auto" runs XLA's product, which is faster in the whole loop. impl="triton" (`skinny_matmul` alone)
is the same tile loop through jax-triton, within 10 % of it for a large layer's products, for the
day that Pallas' Triton backend goes.
"""

from dataclasses import dataclass, replace
from functools import partial

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
    dot_precision,
    next_power_of_2,
)
from pallas_kernels._skinny_tiles import (
    SHORT_SUM,
    SkinnyMatmulConfig,
    rows_in_block,
    stages_that_fit,
    tiles_for,
)

_TURNED = "has no kernel for a weight [in, out], only for [out, in]"


@dataclass(frozen=True, slots=True)
class _Tiling:
    """What a kernel bakes in.

    past_inner: whether tiles reach past the columns of x.
    eps: of the norm before the product, None without one.
    """

    config: SkinnyMatmulConfig
    block_r: int
    past_inner: bool
    eps: float | None


def _load(ref, rows, cols, inside):
    """A tile of a matrix, zero outside of `inside` (None: all of it is inside)."""
    tile = ref.at[rows[:, None], cols[None, :]]
    if inside is None:
        return plgpu.load(tile)
    return plgpu.load(tile, mask=jnp.broadcast_to(inside, (rows.size, cols.size)), other=0)


def _tile_columns(tile, t: _Tiling, inner: int):
    """The columns of one tile along `in`, and which of them exist if some may not."""
    cols = tile * t.config.block_k + jnp.arange(t.config.block_k, dtype=jnp.int32)
    return cols, (cols < inner)[None, :] if t.past_inner else None


def _row_scale(x_ref, rows, t: _Tiling):
    """f32[block_r, 1]: one over the root mean square of each row, short ones read at once."""
    inner = x_ref.shape[1]
    width = next_power_of_2(inner) if inner <= SHORT_SUM else t.config.block_k

    def step(i, total):
        cols = i * width + jnp.arange(width, dtype=jnp.int32)
        exist = (cols < inner)[None, :] if inner % width else None
        x = _load(x_ref, rows, cols, exist).astype(jnp.float32)
        return total + jnp.sum(x * x, axis=1)

    total = jnp.zeros(rows.shape, jnp.float32)
    steps = pl.cdiv(inner, width)
    total = step(0, total) if steps == 1 else lax.fori_loop(0, steps, step, total)
    return lax.rsqrt(total / inner + t.eps)[:, None]


def _accumulate(x_ref, norm_ref, w_ref, halves, rows, cols, t: _Tiling):
    """f32[block_r, block_n] for each half: this program's part of x @ w[half + cols].T."""
    inner, tiles = x_ref.shape[1], t.config.num_sums
    steps = pl.cdiv(inner, t.config.block_k * tiles * t.config.split_k)
    first = pl.program_id(0) * steps * tiles
    # In the loop's first step where it is short, when the loads of all steps are under way. A loop
    # over a long row would keep Triton from making a pipeline of the loop that it is in.
    is_late = norm_ref is not None and inner <= SHORT_SUM
    scale = jnp.zeros((t.block_r, 1), jnp.float32)
    if norm_ref is not None and not is_late:
        scale = _row_scale(x_ref, rows, t)

    def load_rows(columns, exist, scale):
        """Rows of x as the product takes them, [block_r, block_k]."""
        x = _load(x_ref, rows, columns, exist)
        if norm_ref is None:
            return x
        at = norm_ref.at[columns]
        weight = plgpu.load(at) if exist is None else plgpu.load(at, mask=exist[0], other=0)
        return (x.astype(jnp.float32) * scale).astype(x.dtype) * weight[None, :]

    def step(i, carry):
        scale, sums = carry
        if is_late:
            scale = lax.cond(i == 0, lambda: _row_scale(x_ref, rows, t), lambda: scale)
        added = []
        for tile, accs in enumerate(sums):
            columns, exist = _tile_columns(first + i * tiles + tile, t, inner)
            x = load_rows(columns, exist, scale)
            precision = dot_precision(x.dtype)
            weights = [_load(w_ref, half + cols, columns, exist) for half in halves]
            dots = [plgpu.dot(x, w, trans_b=True, precision=precision) for w in weights]
            added.append(tuple(acc + dot for acc, dot in zip(accs, dots, strict=True)))
        return scale, tuple(added)

    zero = jnp.zeros((t.block_r, t.config.block_n), jnp.float32)
    sums = ((zero,) * len(halves),) * tiles
    _, sums = lax.fori_loop(0, steps, step, (scale, sums))
    return tuple(_sum_in_order(accs, jnp.float32) for accs in zip(*sums, strict=True))


def _place(t: _Tiling, shape: tuple[int, int]):
    """Rows and columns of the [N, out] result that this program makes.

    Past an end they are the last one again: its sums come out in the same bits, and are stored
    twice. So nothing is padded, cut or masked.
    """
    along = ((2, t.block_r, shape[0]), (1, t.config.block_n, shape[1]))
    places = []
    for axis, block, size in along:
        place = pl.program_id(axis) * block + jnp.arange(block, dtype=jnp.int32)
        places.append(jnp.minimum(place, size - 1) if size % block else place)
    return places


def _matmul_kernel(
    x_ref,  # [N, in]
    w_ref,  # [out, in]
    *refs,  # norm [in]; residual [N, out]; y [N, out], or its parts [split_k, N, out]
    t: _Tiling,
    has_residual: bool,
):
    *extra, y_ref = refs
    rows, cols = _place(t, y_ref.shape[-2:])
    norm_ref = None if t.eps is None else extra[0]
    at = rows[:, None], cols[None, :]
    # Read first, for its latency to pass behind the product's.
    residual = plgpu.load(extra[-1].at[at]) if has_residual else None
    (acc,) = _accumulate(x_ref, norm_ref, w_ref, (0,), rows, cols, t)
    if t.config.split_k > 1:
        plgpu.store(y_ref.at[(pl.program_id(0), *at)], acc)
        return
    y = acc.astype(y_ref.dtype)
    plgpu.store(y_ref.at[at], y if residual is None else y + residual)


def _swiglu_kernel(
    x_ref,  # [N, in]
    w_ref,  # [2 * F, in]: gate's rows, then up's
    *refs,  # norm [in]; y [N, F]
    t: _Tiling,
):
    *extra, y_ref = refs
    rows, cols = _place(t, y_ref.shape)
    halves = (0, y_ref.shape[1])
    gate, up = _accumulate(x_ref, extra[0] if extra else None, w_ref, halves, rows, cols, t)
    dtype = y_ref.dtype
    gate = gate.astype(dtype).astype(jnp.float32)
    inner = (gate * jax.nn.sigmoid(gate)).astype(dtype) * up.astype(dtype)
    plgpu.store(y_ref.at[rows[:, None], cols[None, :]], inner)


def _launch(kernel, name: str, x, w, extra, out, t: _Tiling, num_weights: int, interpret: bool):
    """Run one of the two kernels; `out` is the result's ShapeDtypeStruct."""
    block_n = t.config.block_n
    stages = stages_that_fit(t.config, t.block_r + num_weights * block_n, x.dtype.itemsize)
    return pl.pallas_call(
        partial(kernel, t=t),
        grid=(t.config.split_k, pl.cdiv(out.shape[-1], block_n), pl.cdiv(x.shape[0], t.block_r)),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=t.config.num_warps, num_stages=stages),
        interpret=interpret,
        name=name,
    )(x, w, *extra)


@partial(jax.jit, static_argnames=("eps", "out_dtype", "config", "interpret"))
def skinny_matmul_pallas(
    x, w, norm, residual, *, eps: float, out_dtype, config, interpret: bool
) -> jax.Array:
    """`skinny_matmul` by the kernel."""
    (n, inner), out = x.shape, w.shape[0]
    is_split = config.split_k > 1
    fuses_residual = residual is not None and not is_split
    extra = [] if norm is None else [norm]
    extra += [residual] if fuses_residual else []
    t = _Tiling(
        config,
        rows_in_block(n, inner, config, has_norm=norm is not None),
        past_inner=inner % (config.block_k * config.num_sums * config.split_k) != 0,
        eps=None if norm is None else eps,
    )
    shape = (config.split_k, n, out) if is_split else (n, out)
    result = jax.ShapeDtypeStruct(shape, jnp.float32 if is_split else out_dtype)
    kernel = partial(_matmul_kernel, has_residual=fuses_residual)
    y = _launch(kernel, "skinny_matmul", x, w, extra, result, t, 1, interpret)
    y = _sum_in_order(y, out_dtype) if is_split else y
    return y if residual is None or fuses_residual else y + residual


@partial(jax.jit, static_argnames=("eps", "config", "interpret"))
def skinny_matmul_swiglu_pallas(
    x, w_gate_up, norm, *, eps: float, config, interpret: bool
) -> jax.Array:
    """`skinny_matmul_swiglu` by the kernel: gate and up share a program, nothing is split."""
    (n, inner), ffn = x.shape, w_gate_up.shape[0] // 2
    # Half of each, so that a step reads as many bytes as a product's.
    halved = replace(config, block_n=max(16, config.block_n // 2), split_k=1)
    t = _Tiling(
        halved,
        rows_in_block(n, inner, halved, has_norm=norm is not None),
        past_inner=inner % (config.block_k * config.num_sums) != 0,
        eps=None if norm is None else eps,
    )
    extra = [] if norm is None else [norm]
    result = jax.ShapeDtypeStruct((n, ffn), x.dtype)
    return _launch(
        _swiglu_kernel, "skinny_matmul_swiglu", x, w_gate_up, extra, result, t, 2, interpret
    )


def _by_triton(op: str, x, w, norm, residual, *, eps: float, out_dtype, config) -> jax.Array:
    """`skinny_matmul` by jax-triton, or the sentence that says what it needs."""
    try:
        from pallas_kernels._skinny_triton import product
    except ImportError as error:
        raise NotImplementedError(
            f"{op}: impl='triton' needs jax-triton and triton on a CUDA device (pip install "
            f"'dflash-jax[triton]'; {error}), supported without them are 'auto', 'xla' and 'pallas'"
        ) from error
    n, out = x.shape[0], w.shape[0]
    config = replace(config, num_sums=1)  # its steps are of one tile
    block_r = rows_in_block(n, x.shape[1], config, has_norm=False)
    x = jnp.asarray(x) if norm is None else _rms_norm(jnp.asarray(x), jnp.asarray(norm), eps)
    x = jnp.pad(x, ((0, -n % block_r), (0, 0)))
    part_dtype = jnp.float32 if config.split_k > 1 else out_dtype
    parts = product(x, jnp.asarray(w), out_dtype=part_dtype, block_r=block_r, config=config)
    y = _sum_in_order(parts, out_dtype)[:n, :out]
    return y if residual is None else y + residual


def _sum_in_order(parts, dtype) -> jax.Array:
    """Add S parts [N, out] from the first to the last and round once."""
    total = parts[0]
    for i in range(1, len(parts)):
        total = total + parts[i]
    return total.astype(dtype)


def skinny_matmul(
    x,
    w,
    *,
    norm=None,
    eps: float = 1e-6,
    residual=None,
    out_dtype=None,
    by_input: bool = False,
    impl: str = "auto",
    config: SkinnyMatmulConfig | None = None,
) -> jax.Array:
    """Multiply rows with a weight, optionally normalising them before and adding a residual after.

    Without a residual the f32 sum is rounded once, to `out_dtype`. With one, the sum is rounded to
    the dtype of `x`, then the residual is added and the result rounded again.

    Args:
      x: bf16|f32[N, in] rows.
      w: [out, in] in the dtype of `x`.
      norm: [in] in the dtype of `x`, weight of an RMSNorm of the rows before the product, or None.
      eps: of that norm.
      residual: [N, out] in the dtype of `x`, or None.
      out_dtype: dtype of the result, by default that of `x`; only without a residual.
      by_input: whether `w` is [in, out] instead; by XLA alone.
      impl: which implementation runs; "triton" needs the package jax-triton.
      config: tiles of the kernel, by default the table's.
    Returns:
      [N, out] rows.
    """
    op = "skinny_matmul"
    n, out = _check_operands(op, x, w, "w", norm, by_input)
    dtype = jnp.result_type(x)
    out_dtype = dtype if out_dtype is None else jnp.dtype(out_dtype)
    if residual is not None:
        check_shape(op, "residual", residual, (n, out))
        if jnp.result_type(residual) != dtype or out_dtype != dtype:
            raise ValueError(
                f"{op}: residual is {jnp.result_type(residual).name} and out_dtype "
                f"{out_dtype.name}, wanted both {dtype.name} as x"
            )
    inner = jnp.shape(x)[1]
    config = _check_config(op, config) or tiles_for(inner, out, dtype.itemsize)
    unserved = _TURNED if by_input else None
    if impl == "triton":
        if unserved:
            raise NotImplementedError(
                f"{op}: impl='triton' {unserved}, supported are 'auto' and 'xla'"
            )
        return _by_triton(op, x, w, norm, residual, eps=eps, out_dtype=out_dtype, config=config)
    kernel = None if impl == "auto" else partial(skinny_matmul_pallas, config=config)
    return dispatch(
        op, impl, kernel, partial(skinny_matmul_xla, by_input=by_input), x, w, norm, residual,
        unserved=unserved, eps=eps, out_dtype=out_dtype,
    )  # fmt: skip


def skinny_matmul_swiglu(
    x,
    w_gate_up,
    *,
    norm=None,
    eps: float = 1e-6,
    by_input: bool = False,
    impl: str = "auto",
    config: SkinnyMatmulConfig | None = None,
) -> jax.Array:
    """Compute `silu(x @ gate.T) * (x @ up.T)` with the weights of both in one array.

    gate and up are rounded to the dtype of `x`; silu is taken in f32 and rounded to it; their
    product is rounded to it.

    Args:
      x: bf16|f32[N, in] rows.
      w_gate_up: [2*F, in] in the dtype of `x`: the gate's rows, then up's.
      norm: [in] in the dtype of `x`, weight of an RMSNorm of the rows before the product, or None.
      eps: of that norm.
      by_input: whether `w_gate_up` is [in, 2*F] instead; by XLA alone.
      impl: which implementation runs.
      config: tiles of the kernel, by default the table's; `split_k` is not used.
    Returns:
      [N, F] rows in the dtype of `x`.
    """
    op = "skinny_matmul_swiglu"
    _, out = _check_operands(op, x, w_gate_up, "w_gate_up", norm, by_input)
    if out % 2:
        which = "columns" if by_input else "rows"
        raise ValueError(
            f"{op}: w_gate_up has {out} {which}, wanted gate and up, so an even number"
        )
    inner = jnp.shape(x)[1]
    config = _check_config(op, config) or tiles_for(inner, out, jnp.result_type(x).itemsize)
    kernel = None if impl == "auto" else partial(skinny_matmul_swiglu_pallas, config=config)
    twin = partial(skinny_matmul_swiglu_xla, by_input=by_input)
    unserved = _TURNED if by_input else None
    return dispatch(op, impl, kernel, twin, x, w_gate_up, norm, unserved=unserved, eps=eps)


def skinny_matmul_xla(
    x, w, norm=None, residual=None, *, eps: float = 1e-6, out_dtype=None, by_input: bool = False
) -> jax.Array:
    """`skinny_matmul` as one dot."""
    acc = _matmul(x if norm is None else _rms_norm(x, norm, eps), w, by_input)
    if residual is None:
        return acc.astype(out_dtype or x.dtype)
    return acc.astype(x.dtype) + residual


def skinny_matmul_swiglu_xla(
    x, w_gate_up, norm=None, *, eps: float = 1e-6, by_input: bool = False
) -> jax.Array:
    """`skinny_matmul_swiglu` as one dot and one elementwise fusion."""
    x = x if norm is None else _rms_norm(x, norm, eps)
    gate_up = _matmul(x, w_gate_up, by_input).astype(x.dtype)  # [N, 2*F]
    gate, up = jnp.split(gate_up, 2, axis=1)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up


def _matmul(x, w, by_input: bool) -> jax.Array:
    """Return `x @ w.T`, or `x @ w` of a weight `[in, out]`, as f32[N, out]."""
    return lax.dot_general(
        x,
        w,
        (((1,), (0 if by_input else 1,)), ((), ())),
        precision=dot_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )


def _rms_norm(x, weight, eps: float) -> jax.Array:
    """RMSNorm with f32 statistics, rounded to the dtype of `x` before the weight as models do."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight[None]


def _check_operands(op: str, x, w, name: str, norm, by_input: bool) -> tuple[int, int]:
    """Check rows, weight and norm against each other and return (N, out)."""
    n, width = check_rank(op, "x", x, "N in")
    sides = check_rank(op, name, w, "in out" if by_input else "out in")
    out = sides[1] if by_input else sides[0]
    check_shape(op, name, w, (width, out) if by_input else (out, width))
    check_float(op, x=x)
    if jnp.result_type(w) != jnp.result_type(x):
        raise ValueError(
            f"{op}: {name} is {jnp.result_type(w).name}, wanted {jnp.result_type(x).name} as x"
        )
    if norm is not None:
        check_shape(op, "norm", norm, (width,))
        check_dtype(op, "norm", norm, jnp.result_type(x))
    return n, out


def _check_config(op: str, config: SkinnyMatmulConfig | None) -> SkinnyMatmulConfig | None:
    """Raise unless the tiles are sizes that Triton takes."""
    if config is None:
        return None
    for name, least in (("block_n", 8), ("block_k", 16), ("num_warps", 1)):
        value = getattr(config, name)
        if value < least or value & (value - 1):
            raise ValueError(f"{op}: config.{name} is {value}, wanted a power of two from {least}")
    for name in ("split_k", "num_stages", "num_sums"):
        if getattr(config, name) < 1:
            raise ValueError(f"{op}: config.{name} is {getattr(config, name)}, wanted at least 1")
    return config
