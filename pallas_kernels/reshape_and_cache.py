"""Write K and V rows into the pages that their slots name, in place under donation.

Pools are `[pages, K, page_size, D]`; slot = page * page_size + offset, and a negative slot writes
nothing. The caller donates the pools; reading a pool before this write in the same loop body needs
an `optimization_barrier` between the two, else XLA copies it (known for gathers).

The kernel runs a warp for each row and kv head, which copies D keys and D values: 128 KiB for 16
rows of 8 heads of 128 in bf16, so that the launch (1 to 1.3 us in a captured loop) is all of its
cost. Where norms and RoPE come before the write, `norm_rope_cache` does all in one launch.
"""

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
    show,
)

_MAX_HEAD_DIM = 4096  # 128 values a thread of the one warp


def reshape_and_cache(
    k, v, k_pool, v_pool, slots, *, impl: str = "auto"
) -> tuple[jax.Array, jax.Array]:
    """Scatter K and V rows to their slots, in the kernel for any head dim to 4096.

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
    check_float(op, k_pool=k_pool, v_pool=v_pool)
    unserved = None if d <= _MAX_HEAD_DIM else f"has a kernel for head dims to 4096, not {d}"
    arrays = (k, v, k_pool, v_pool, slots)
    return dispatch(op, impl, _by_kernel, reshape_and_cache_xla, *arrays, unserved=unserved)


@partial(jax.jit, static_argnames=("interpret",))
def _by_kernel(k, v, k_pool, v_pool, slots, *, interpret) -> tuple[jax.Array, jax.Array]:
    """Launch a program for each row and kv head."""
    n, kv_heads, _ = k.shape
    whole = pl.BlockSpec(memory_space=pl.ANY)
    pools = [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in (k_pool, v_pool)]
    out = pl.pallas_call(
        _reshape_and_cache_kernel,
        out_shape=pools,
        grid=(kv_heads, n),
        in_specs=[whole] * 5,
        out_specs=[whole] * 2,
        input_output_aliases={3: 0, 4: 1},
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="reshape_and_cache",
    )(slots, k, v, k_pool, v_pool)
    return out[0], out[1]


def _reshape_and_cache_kernel(
    slots_ref,  # i32[N]
    k_ref,  # [N, K, D]
    v_ref,  # [N, K, D]
    _k_pool_ref,  # [pages, K, page_size, D], the memory of k_pool_ref
    _v_pool_ref,  # [pages, K, page_size, D], the memory of v_pool_ref
    k_pool_ref,  # out [pages, K, page_size, D]
    v_pool_ref,  # out [pages, K, page_size, D]
):
    """One row of one kv head."""
    head, row = pl.program_id(0), pl.program_id(1)
    page_size, d = k_pool_ref.shape[2:]
    column = jnp.arange(next_power_of_2(d), dtype=jnp.int32)
    slot = slots_ref[row]
    page, offset = jnp.maximum(slot, 0) // page_size, jnp.maximum(slot, 0) % page_size
    for rows_ref, pool_ref in ((k_ref, k_pool_ref), (v_ref, v_pool_ref)):
        x = plgpu.load(rows_ref.at[row, head, column], mask=column < d, other=0.0)
        at = (page, head, offset, column)
        mask = (column < d) & (slot >= 0)
        plgpu.store(pool_ref.at[at], x.astype(pool_ref.dtype), mask=mask)


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
