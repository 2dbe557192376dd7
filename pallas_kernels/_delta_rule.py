"""What the two ops of the gated delta rule share: their operands, and heads in XLA's forms."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._launch import check_dtype, check_float, check_rank, check_shape, show

NORM_EPS = 1e-6  # beside the sum of squares, inside the root
_DIMS = (16, 32, 64, 128, 256)  # powers of two that a tile of registers holds


def unserved_dims(
    op: str, block_v: int, key_dim: int, value_dim: int, *, least: int = 1
) -> str | None:
    """What a kernel does not serve of a head, for `dispatch`; `least` columns make a block.

    Raises:
      ValueError: it would serve the head, but not by blocks of `block_v` columns.
    """
    if key_dim not in _DIMS or value_dim not in _DIMS:
        return f"has a kernel for dims of {_DIMS}, not {key_dim} x {value_dim}"
    if block_v < least or value_dim % min(block_v, value_dim):
        at_least = f" from {least}" if least > 1 else ""
        raise ValueError(
            f"{op}: block_v is {block_v}, wanted a divisor of {value_dim} value dims{at_least}"
        )
    return None


def check_rows(op: str, qkv, g, beta, num_rows, state, key_heads: int) -> None:
    """Check a call's rows against each other and a state [S, Hv, Dk, Dv]."""
    batch, rows, width = check_rank(op, "qkv", qkv, "B R C")
    heads, key_dim, value_dim = check_rank(op, "state", state, "S Hv Dk Dv")[1:]
    if key_heads < 1 or heads % key_heads:
        raise ValueError(
            f"{op}: state {show(state)} has {heads} value heads, not a multiple of {key_heads} "
            "key heads"
        )
    wanted = 2 * key_heads * key_dim + heads * value_dim
    if width != wanted:
        raise ValueError(
            f"{op}: qkv is {show(qkv)}, wanted {wanted} channels for {key_heads} key heads and "
            f"state {show(state)}"
        )
    check_float(op, qkv=qkv)
    check_shape(op, "num_rows", num_rows, (batch,))
    check_dtype(op, "num_rows", num_rows, jnp.int32)
    for name, x in (("g", g), ("beta", beta)):
        check_shape(op, name, x, (batch, rows, heads))
        check_dtype(op, name, x, jnp.float32)
    check_dtype(op, "state", state, jnp.float32)


def split_heads(
    mixed: jax.Array, key_heads: int, heads: int, key_dim: int, value_dim: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k [..., Hv, Dk] repeated for their value heads, and v [..., Hv, Dv], of mixed[..., C]."""
    shape, width = mixed.shape[:-1], key_heads * key_dim

    def of_values(x):
        x = x.reshape(*shape, key_heads, 1, key_dim)
        wide = jnp.broadcast_to(x, (*shape, key_heads, heads // key_heads, key_dim))
        return wide.reshape(*shape, heads, key_dim)

    q, k = of_values(mixed[..., :width]), of_values(mixed[..., width : 2 * width])
    return q, k, mixed[..., 2 * width :].reshape(*shape, heads, value_dim)


def inverse_length(x: jax.Array) -> jax.Array:
    """One over the length of x[..., D], [..., 1]."""
    return lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPS)
