"""The small pieces every model is made of: norm, rope, linear, embedding.

Rows are independent everywhere: a row's bits depend on that row and on static shapes alone.
Statistics and accumulation are f32; a result is rounded once, to the dtype of its input.
"""

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels as pk
from dflash_jax.config import RopeConfig
from dflash_jax.params import ByInput

_LOW_POSITIONS = 256  # rope positions are split as 256 * high + low


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm over the last axis, rounded to x.dtype before `weight` as Qwen3 and Llama do.

    An f32 weight beside narrower rows, which a `1 + w` norm has, multiplies before the rounding.
    """
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    weight = jnp.expand_dims(weight, range(x.ndim - 1))
    if weight.dtype == x.dtype:
        return (wide * scale).astype(x.dtype) * weight
    return (wide * scale * weight).astype(x.dtype)


def linear(
    x: jax.Array,
    weight: jax.Array | ByInput,
    bias: jax.Array | None = None,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    residual: jax.Array | None = None,
    impl: str = "auto",
) -> jax.Array:
    """x[N, in] @ weight[out, in].T (+ bias[out]) (+ residual[N, out]), summed in f32, in x.dtype.

    With `norm` the rows are normed before; a kernel does that, and the residual, in one launch.
    """
    x, norm = _norm_by_product(x, norm, eps)
    inside = None if bias is not None else residual
    w, by_input = _as_stored(weight)
    y = pk.skinny_matmul(x, w, norm=norm, eps=eps, residual=inside, by_input=by_input, impl=impl)
    if bias is None:
        return y
    y = y + bias[None]
    return y if residual is None else residual + y


def swiglu(
    x: jax.Array,
    gate_up: jax.Array | ByInput,
    *,
    norm: jax.Array | None = None,
    eps: float = 1e-6,
    impl: str = "auto",
) -> jax.Array:
    """silu(gate) * up of x[N, in] by gate_up[2*F, in], the rows normed before if `norm` is."""
    x, norm = _norm_by_product(x, norm, eps)
    w, by_input = _as_stored(gate_up)
    return pk.skinny_matmul_swiglu(x, w, norm=norm, eps=eps, by_input=by_input, impl=impl)


def _as_stored(weight: jax.Array | ByInput) -> tuple[jax.Array, bool]:
    """A matrix, and whether it is [in, out]."""
    return (weight.array, True) if isinstance(weight, ByInput) else (weight, False)


def _norm_by_product(
    x: jax.Array, norm: jax.Array | None, eps: float
) -> tuple[jax.Array, jax.Array | None]:
    """Leave the norm to the product where it rounds as the product does."""
    if norm is None or norm.dtype == x.dtype:
        return x, norm
    return rms_norm(x, norm, eps), None


def logits_of(x: jax.Array, head: jax.Array, *, impl: str = "auto") -> jax.Array:
    """x[N, E] @ head[V, E].T as f32[N, V]."""
    return pk.skinny_matmul(x, head, out_dtype=jnp.float32, impl=impl)


def embed(ids: jax.Array, table: jax.Array, scale: float = 1.0) -> jax.Array:
    """Rows of table[V, E] for i32 ids, times `scale` in the table's dtype."""
    rows = table.at[ids].get(mode="fill", fill_value=0)
    return rows if scale == 1.0 else rows * jnp.asarray(scale, table.dtype)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies f64[D/2] of one rope type.

    default: theta^(-2j/D). linear: that over `factor`. llama3: long waves over `factor`, short ones
    kept, a ramp between. yarn: spec/drafters.md §3.2, `low`/`high` rounded outward if `truncate`.
    """
    index = np.arange(head_dim // 2, dtype=np.float64)
    base = rope.theta ** (-2.0 * index / head_dim)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        wavelength = 2.0 * math.pi / base
        smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        smooth = np.clip(smooth, 0.0, 1.0)
        return base * smooth + base / rope.factor * (1.0 - smooth)

    def dim_of(rotations: float) -> float:
        span = rope.original_context / (rotations * 2.0 * math.pi)
        return head_dim * math.log(span) / (2.0 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((index - low) / max(high - low, 1e-3), 0.0, 1.0)
    return base / rope.factor * ramp + base * (1.0 - ramp)


@lru_cache(maxsize=32)
def _rope_tables(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[np.ndarray, ...]:
    """cos and sin of 256 * high and of low, from f64: (cos_high, sin_high, cos_low, sin_low)."""
    freqs = rope_frequencies(rope, head_dim)
    high = np.arange(-(-max_positions // _LOW_POSITIONS), dtype=np.float64) * _LOW_POSITIONS
    low = np.arange(_LOW_POSITIONS, dtype=np.float64)
    angles = np.outer(high, freqs), np.outer(low, freqs)
    tables = [f(angle) for angle in angles for f in (np.cos, np.sin)]
    return tuple(table.astype(np.float32) for table in tables)


def rope_angles(
    positions: jax.Array, rope: RopeConfig, head_dim: int, max_positions: int
) -> tuple[jax.Array, jax.Array]:
    """cos and sin f32[N, D/2] at i32 positions[N] below `max_positions`; D the dims that turn.

    f32 positions times f32 frequencies are 3e-3 rad off at 131,071, so the angle is put together
    from two small exact tables: cos(a + b) and sin(a + b) with a = 256 * high, b = low.
    """
    cos_high, sin_high, cos_low, sin_low = _rope_tables(
        rope, rope.rotary_dim(head_dim), max_positions
    )
    high = jnp.clip(positions // _LOW_POSITIONS, 0, cos_high.shape[0] - 1)
    low = positions % _LOW_POSITIONS
    ch, sh = jnp.asarray(cos_high)[high], jnp.asarray(sin_high)[high]
    cl, sl = jnp.asarray(cos_low)[low], jnp.asarray(sin_low)[low]
    cos, sin = ch * cl - sh * sl, sh * cl + ch * sl
    if rope.attention_factor != 1.0:
        cos, sin = cos * rope.attention_factor, sin * rope.attention_factor
    return cos, sin


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x[N, H, D] by cos, sin f32[N, n], pair (i, i + n); f32 inside, one rounding.

    The first 2n dims turn, which is all of them unless the model turns a part of each head.
    """
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    c, s = cos[:, None, :], sin[:, None, :]
    parts = [first * c - second * s, second * c + first * s]
    if 2 * half < x.shape[-1]:
        parts.append(wide[..., 2 * half :])
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)
