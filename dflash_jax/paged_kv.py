"""Keys and values in pages: write the rows of a step, then attend over what is there.

A row's K/V is written before it attends, so row i of a block sees rows up to i of its own block.
Rejected rows are never erased: lengths bound every read, and the next step overwrites them.
"""

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax.config import LayerAttention
from dflash_jax.metadata import AttnMetadata

CAUSAL = LayerAttention(is_causal=True)


def write_and_attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    meta: AttnMetadata,
    args: jax.Array,
    *,
    attention: LayerAttention = CAUSAL,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write K/V of rows to their slots and attend over pages.

    Args:
      q: [N, H, D] queries, RoPE applied.
      k, v: [N, K, D] keys, RoPE applied, and values.
      k_pool, v_pool: [pages, K, page_size, D] of this layer, updated in place under donation.
      meta: slots and block table of the rows; N is a multiple of its sequences.
      args: u32[B, 3] (kv_len, q_offset, q_rope_pos).
      attention: causality and window.
    Returns:
      [N, H * D] in q.dtype, and the pools.
    """
    sequences = meta.block_table.shape[0]
    # A draft that is not finite must not reach the rows before it, and 0 * NaN is NaN: its values
    # are stored as zeros, and its keys carry the NaN to the rows that do see it.
    is_finite = jnp.isfinite(v)
    k, v = jnp.where(is_finite, k, jnp.nan), jnp.where(is_finite, v, 0)
    k_pool, v_pool = pk.reshape_and_cache(k, v, k_pool, v_pool, meta.slot_mapping, impl=impl)
    q_brhd = q.reshape(sequences, -1, *q.shape[1:])
    out = pk.paged_attention(
        q_brhd,
        k_pool,
        v_pool,
        meta.block_table,
        args,
        is_causal=attention.is_causal,
        window=attention.window,
        impl=impl,
    )
    return out.reshape(q.shape[0], -1), k_pool, v_pool
