"""Grouped dynamic causal convolution inside a block (DFlash2, spec/drafters.md §4.1).

Each row mixes itself and the rows before it in its own block, with taps that are a learned base a
channel plus a correction a group computed from the row. One op serves both sides, prepare and
finish: the caller slices the side out of the projection.
"""

import jax
import jax.numpy as jnp

from pallas_kernels._launch import check_float, check_rank, check_shape, dispatch

MAX_TAPS = 4


def dynamic_conv(x, dyn, base, *, impl: str = "auto") -> jax.Array:
    """Convolve the rows of each block with their own causal taps.

    `y[b, i, c] = sum_t (base[t, c] + dyn[b, i, t, c // g]) * x[b, i - t, c]` with g = E // G, and
    zero before row 0 of the block: nothing crosses a block or a sequence.

    Args:
      x: bf16|f32[B, R, E] block rows.
      dyn: float[B, R, T, G] correction of tap t for each group; tap 0 multiplies the row itself.
      base: float[T, E] learned taps.
      impl: which implementation runs.
    Returns:
      y: [B, R, E] in the dtype of `x`; sums are f32 and rounded once.
    """
    op = "dynamic_conv"
    b, r, e = check_rank(op, "x", x, "B R E")
    taps, groups = check_rank(op, "dyn", dyn, "B R T G")[2:]
    check_shape(op, "dyn", dyn, (b, r, taps, groups))
    check_shape(op, "base", base, (taps, e))
    check_float(op, x=x, dyn=dyn, base=base)
    if not 1 <= taps <= MAX_TAPS:
        raise ValueError(f"{op}: dyn has {taps} taps, wanted 1 to {MAX_TAPS}")
    if groups < 1 or e % groups:
        raise ValueError(f"{op}: x has {e} channels, not a multiple of the {groups} groups of dyn")
    return dispatch(op, impl, None, dynamic_conv_xla, x, dyn, base)


def dynamic_conv_xla(x, dyn, base) -> jax.Array:
    """`dynamic_conv` in plain jnp: elementwise, so one fusion."""
    b, r, e = x.shape
    taps, groups = dyn.shape[2:]
    rows = x.astype(jnp.float32).reshape(b, r, groups, e // groups)
    dyn = dyn.astype(jnp.float32)
    base = base.astype(jnp.float32).reshape(taps, 1, 1, groups, e // groups)
    acc = jnp.zeros_like(rows)
    for t in range(min(taps, r)):
        delayed = jnp.pad(rows, ((0, 0), (t, 0), (0, 0), (0, 0)))[:, :r]  # [B, R, G, g]
        acc += (base[t] + dyn[:, :, t, :, None]) * delayed
    return acc.reshape(b, r, e).astype(x.dtype)
