"""Keys and values in pages: write the rows of a step, then attend over what is there.

A row's K/V is written before it attends, so row i of a block sees rows up to i of its own block.
Rejected rows are never erased: lengths bound every read, and the next step overwrites them.
"""

from typing import Any, NamedTuple

import jax

import pallas_kernels as pk
from dflash_jax.config import LayerAttention
from dflash_jax.metadata import AttnMetadata

CAUSAL = LayerAttention(is_causal=True)


class Attended(NamedTuple):
    """What attention leaves."""

    out: jax.Array  # [N, H*D]
    k_pool: jax.Array
    v_pool: jax.Array
    q: jax.Array  # [N, H, D] normed and rotated
    k: Any  # [N, K, D] likewise; None unless asked for
    v: Any  # [N, K, D]; None unless asked for


def write_and_attend(
    qkv: jax.Array,
    norms: tuple[jax.Array | None, jax.Array | None],
    angles: tuple[jax.Array, jax.Array],
    k_pool: jax.Array,
    v_pool: jax.Array,
    meta: AttnMetadata,
    args: jax.Array,
    *,
    num_heads: int,
    eps: float,
    attention: LayerAttention = CAUSAL,
    keep_kv: bool = False,
    impl: str = "auto",
) -> Attended:
    """Norm and rotate q and k, write K/V of rows to their slots and attend over pages.

    Args:
      qkv: [N, (H + 2K) * D] rows as the fused projection leaves them; what is behind is not read.
      norms: [D] weights of q and k, None in a model without such norms.
      angles: cos, sin of the rows' positions.
      k_pool, v_pool: [pages, K, page_size, D] of this layer, updated in place under donation.
      meta: slots and block table of the rows; N is a multiple of its sequences.
      args: u32[B, 3] (kv_len, q_offset, q_rope_pos).
      num_heads: H. eps: of the norms. attention: causality and window.
      keep_kv: whether the rows' k and v come back too.
    """
    q_norm, k_norm = norms
    rows = pk.norm_rope_cache(
        qkv,
        *angles,
        (k_pool,),
        (v_pool,),
        meta.slot_mapping,
        num_heads=num_heads,
        q_norm=q_norm,
        k_norms=None if k_norm is None else (k_norm,),
        eps=eps,
        keep_kv=keep_kv,
        impl=impl,
    )
    assert rows.q is not None  # there are query heads
    (k_pool,), (v_pool,) = rows.k_pools, rows.v_pools
    out = pk.paged_attention(
        rows.q.reshape(meta.block_table.shape[0], -1, *rows.q.shape[1:]),
        k_pool,
        v_pool,
        meta.block_table,
        args,
        is_causal=attention.is_causal,
        window=attention.window,
        impl=impl,
    )
    return Attended(out.reshape(qkv.shape[0], -1), k_pool, v_pool, rows.q, rows.k, rows.v)
