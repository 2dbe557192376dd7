"""Write K and V rows into the pages that their slots name, in place under donation.

Pools are `[pages, K, page_size, D]`; slot = page * page_size + offset, and a negative slot writes
nothing. The caller donates the pools; reading a pool before this write in the same loop body needs
an `optimization_barrier` between the two, else XLA copies it (known for gathers).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._launch import (
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    dispatch,
    show,
)


def reshape_and_cache(
    k, v, k_pool, v_pool, slots, *, impl: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Scatter K and V rows to their slots.

    Args:
      k, v: float[N, K, D] rows, cast to the dtype of the pools.
      k_pool, v_pool: float[pages, K, page_size, D], donated by the caller.
      slots: i32[N], no slot twice; a negative slot drops its row.
      impl: which implementation runs.
    Returns:
      k_pool, v_pool: the same shapes and dtypes.
    """
    op = "reshape_and_cache"
    n, kv_heads, d = check_rank(op, "k", k, "N K D")
    check_shape(op, "v", v, (n, kv_heads, d))
    pool_shape = check_rank(op, "k_pool", k_pool, "pages K page_size D")
    check_shape(op, "v_pool", v_pool, pool_shape)
    if (pool_shape[1], pool_shape[3]) != (kv_heads, d):
        raise ValueError(f"{op}: k is {show(k)}, k_pool {show(k_pool)} wants [N, K, D] of its K, D")
    check_shape(op, "slots", slots, (n,))
    check_dtype(op, "slots", slots, jnp.int32)
    check_float(op, k=k, v=v)
    return dispatch(op, impl, None, reshape_and_cache_xla, k, v, k_pool, v_pool, slots)


def reshape_and_cache_xla(k, v, k_pool, v_pool, slots) -> tuple[jax.Array, jax.Array]:
    """`reshape_and_cache` as one scatter a pool."""
    pages, kv_heads, page_size, _ = k_pool.shape
    # A dropped row gets its own page past the end: index -1 would wrap to the last page, and equal
    # indices would break the promise of unique_indices.
    past_end = pages + jnp.arange(slots.shape[0], dtype=jnp.int32)
    slot = jnp.maximum(slots, 0)
    page = jnp.where(slots < 0, past_end, lax.div(slot, page_size))[:, None]  # [N, 1]
    offset = lax.rem(slot, page_size)[:, None]
    # Indexing the kv head as well keeps the indexed axes leading: with a slice between them XLA
    # would transpose the pool.
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :]  # [1, K]

    def write(pool, rows):
        return pool.at[page, head, offset].set(
            rows.astype(pool.dtype),
            mode="drop",
            unique_indices=True,
            wrap_negative_indices=False,
        )

    return write(k_pool, k), write(v_pool, v)
