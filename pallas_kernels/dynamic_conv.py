"""Grouped dynamic causal convolution inside a block (DFlash2, spec/drafters.md §4.1).

Each row mixes itself and the rows before it in its own block, with taps that are a learned base a
channel plus a correction a group computed from the row. One op serves both sides, prepare and
finish: `side` picks the kernels of one of them without a slice of the projection in memory. An
RMSNorm before (prepare) and a residual after (finish) can be part of it.

The kernel has a program for each row and tile of channels; with a norm a program holds whole rows
and normalises each row that its taps reach. 16 rows of 4,096 channels are 0.5 MB in all, so that a
launch, 1.0 to 1.3 us in a captured loop, is what it costs.

"auto" runs the XLA form everywhere: compiled for an H200, the finish side is one fusion with the
sum of the split product before it and the residual, and the prepare side is one launch in either
form, so that the kernel saves none. It does under "pallas", where the product before a prepare
normalises for itself and nothing else would write the normed rows. Alone on an H200, 16 rows of
4,096 channels and two taps take 5.3 us (prepare) and 4.6 (finish), XLA's form 8.8 and 6.0.
"""

from dataclasses import dataclass
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
    next_power_of_2,
)

MAX_TAPS = 4
_MAX_NORM_WIDTH = 8192  # a program holds a whole row: 32 numbers a thread, at 64 they spill
_NORM_WARPS = 8


@dataclass(frozen=True, slots=True)
class DynamicConvConfig:
    """Channels and warps of a program. With a norm it holds all channels, in 8 warps."""

    block_e: int = 1024
    num_warps: int = 4


def dynamic_conv(
    x,
    dyn,
    base,
    *,
    side: int | None = None,
    norm=None,
    eps: float = 1e-6,
    residual=None,
    impl: str = "auto",
    config: DynamicConvConfig | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Convolve the rows of each block with their own causal taps.

    `y[b, i, c] = sum_t (base[t, c] + dyn[b, i, t, c // g]) * x[b, i - t, c]` with g = E // G, and
    zero before row 0 of the block: nothing crosses a block or a sequence.

    Args:
      x: bf16|f16|f32[B, R, E] block rows.
      dyn: float[B, R, T, G] correction of tap t for each group; tap 0 multiplies the row itself.
        With `side`, float[B, R, S, T, G] of all sides.
      base: float[T, E] learned taps; with `side`, float[S, T, E].
      side: which of the S sides to use, if dyn and base hold several.
      norm: [E] in the dtype of `x`, weight of an RMSNorm of the rows before the taps, or None.
      eps: of that norm.
      residual: [B, R, E] in the dtype of `x`, or None.
      impl: which implementation runs; the kernel normalises rows of up to 8,192 channels.
      config: tiles of the kernel.
    Returns:
      y: [B, R, E] in the dtype of `x`; sums are f32 and rounded once. With a residual, (y,
      residual + y), the sum rounded again.
    """
    op = "dynamic_conv"
    b, r, e = check_rank(op, "x", x, "B R E")
    sides = check_rank(op, "base", base, "T E" if side is None else "S T E")[:-2]
    letters = "B R T G" if side is None else "B R S T G"
    taps, groups = check_rank(op, "dyn", dyn, letters)[-2:]
    check_shape(op, "dyn", dyn, (b, r, *sides, taps, groups))
    check_shape(op, "base", base, (*sides, taps, e))
    check_float(op, x=x, dyn=dyn, base=base)
    if side is not None and not 0 <= side < base.shape[0]:
        raise ValueError(f"{op}: side is {side}, wanted 0 to {base.shape[0] - 1}")
    if not 1 <= taps <= MAX_TAPS:
        raise ValueError(f"{op}: dyn has {taps} taps, wanted 1 to {MAX_TAPS}")
    if groups < 1 or e % groups:
        raise ValueError(f"{op}: x has {e} channels, not a multiple of the {groups} groups of dyn")
    for name, array, shape in (("norm", norm, (e,)), ("residual", residual, (b, r, e))):
        if array is not None:
            check_shape(op, name, array, shape)
            check_dtype(op, name, array, jnp.result_type(x))
    unserved = None
    if norm is not None and e > _MAX_NORM_WIDTH:
        unserved = f"has no kernel that normalises {e} channels, only up to {_MAX_NORM_WIDTH}"
    kernel = partial(_dynamic_conv_pallas, config=config or DynamicConvConfig())
    arrays = (x, dyn, base, norm, residual)
    if impl == "auto":
        impl = "xla"
    return dispatch(
        op, impl, kernel, dynamic_conv_xla, *arrays, unserved=unserved, side=side, eps=eps
    )


def dynamic_conv_xla(
    x, dyn, base, norm=None, residual=None, *, side: int | None = None, eps: float = 1e-6
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`dynamic_conv` in plain jnp: elementwise but for the norm, so one fusion."""
    b, r, e = x.shape
    if side is not None:
        dyn, base = dyn[:, :, side], base[side]
    taps, groups = dyn.shape[2:]
    # Flat, as the product beside it norms them: XLA then finds that both are one.
    rows = x if norm is None else _rms_norm(x.reshape(b * r, e), norm[None], eps, e)
    rows = rows.astype(jnp.float32).reshape(b, r, groups, e // groups)
    dyn = dyn.astype(jnp.float32)
    base = base.astype(jnp.float32).reshape(taps, 1, 1, groups, e // groups)
    acc = jnp.zeros_like(rows)
    for t in range(min(taps, r)):
        delayed = jnp.pad(rows, ((0, 0), (t, 0), (0, 0), (0, 0)))[:, :r]  # [B, R, G, g]
        acc += (base[t] + dyn[:, :, t, :, None]) * delayed
    y = acc.reshape(b, r, e).astype(x.dtype)
    return y if residual is None else (y, residual + y)


def _rms_norm(x, weight, eps: float, width: int) -> jax.Array:
    """RMSNorm of the last axis, whose first `width` entries exist; rounded before the weight."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) / width + eps)
    return (wide * scale).astype(x.dtype) * weight


def _conv_kernel(
    x_ref,  # [B, R, E]
    dyn_ref,  # [B, R, S, T, G]
    base_ref,  # [S, T, E]
    *refs,  # norm [E] and residual [B, R, E] where there are; y [B, R, E], residual + y
    side: int,
    eps: float | None,
    block_e: int,
):
    """One row of one block, `block_e` of its channels; all of them for a norm (eps)."""
    b, row = pl.program_id(0), pl.program_id(1)
    taps, width = base_ref.shape[1:]
    group = width // dyn_ref.shape[4]
    channel = pl.program_id(2) * block_e + jnp.arange(block_e, dtype=jnp.int32)
    exists = channel < width
    load = lambda ref, mask=exists: plgpu.load(ref, mask=mask, other=0)
    norm_ref, refs = (None, refs) if eps is None else (refs[0], refs[1:])
    acc = jnp.zeros((block_e,), jnp.float32)
    for t in range(min(taps, x_ref.shape[1])):
        reached = jnp.maximum(row - t, 0)
        x = load(x_ref.at[b, reached, channel], exists & (row >= t))
        if norm_ref is not None and eps is not None:
            x = _rms_norm(x, load(norm_ref.at[channel]), eps, width)
        correction = load(dyn_ref.at[b, row, side, t, channel // group]).astype(jnp.float32)
        taps_t = load(base_ref.at[side, t, channel]).astype(jnp.float32) + correction
        acc += taps_t * x.astype(jnp.float32)
    y = acc.astype(x_ref.dtype)
    if len(refs) == 3:
        residual_ref, *refs, total_ref = refs
        total = load(residual_ref.at[b, row, channel]) + y
        plgpu.store(total_ref.at[b, row, channel], total, mask=exists)
    plgpu.store(refs[0].at[b, row, channel], y, mask=exists)


@partial(jax.jit, static_argnames=("side", "eps", "config", "interpret"))
def _dynamic_conv_pallas(
    x,
    dyn,
    base,
    norm,
    residual,
    *,
    side: int | None,
    eps: float,
    config: DynamicConvConfig,
    interpret: bool,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`dynamic_conv` in one launch."""
    b, r, e = x.shape
    if side is None:
        dyn, base = dyn[:, :, None], base[None]
    block_e, num_warps = min(next_power_of_2(e), config.block_e), config.num_warps
    if norm is not None:
        block_e, num_warps = next_power_of_2(e), _NORM_WARPS
    extra = [array for array in (norm, residual) if array is not None]
    out = pl.pallas_call(
        partial(_conv_kernel, side=side or 0, eps=None if norm is None else eps, block_e=block_e),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype)] * (1 if residual is None else 2),
        grid=(b, r, pl.cdiv(e, block_e)),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps),
        interpret=interpret,
        name="dynamic_conv",
    )(x, dyn, base, *extra)
    return out[0] if residual is None else (out[0], out[1])
