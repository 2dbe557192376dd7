"""Dense targets, Qwen3 and Llama: rows of any step form to hidden rows and target features.

One function serves prefill chunks, plain steps and verification: rows differ only in their
metadata. Features are taken at layer outputs, before the next norm.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax.layers import apply_rope, embed, linear, rms_norm, rope_angles, split_qkv
from dflash_jax.metadata import AttnMetadata
from dflash_jax.paged_kv import write_and_attend
from dflash_jax.params import LayerParams, TargetParams
from dflash_jax.state import Buffers


class TargetOutput(NamedTuple):
    """What a forward pass leaves."""

    residual: jax.Array  # [N, E] output of the last layer
    hidden: jax.Array  # [N, E] after the final norm, what the head reads
    features: jax.Array  # [N, M*E] tapped layer outputs, in id order
    buffers: Buffers


def forward(
    params: TargetParams,
    tokens: jax.Array,
    meta: AttnMetadata,
    args: jax.Array,
    buffers: Buffers,
    *,
    taps: tuple[int, ...] = (),
    impl: str = "auto",
) -> TargetOutput:
    """Run rows through a dense target.

    Args:
      params: TargetParams.
      tokens: i32[N] ids.
      meta: AttnMetadata of the rows.
      args: u32[B, 3] (kv_len, q_offset, q_rope_pos).
      buffers: donated; the first pools, one a layer of this target, are updated in place.
      taps: layer-output ids whose rows become features; -1 is the embedding's output.
    """
    config = params.config
    k_pools, v_pools = list(buffers.k_pools), list(buffers.v_pools)
    capacity = meta.block_table.shape[1] * k_pools[0].shape[2]
    angles = rope_angles(meta.positions, config.rope, config.head_dim, capacity)
    x = embed(tokens, params.embed)  # [N, E]
    features = [x] if -1 in taps else []
    for i, layer in enumerate(params.layers):
        y, k_pools[i], v_pools[i] = _attention(
            layer, x, meta, args, angles, k_pools[i], v_pools[i], params, impl
        )
        x = x + y
        x = x + _feed_forward(layer, rms_norm(x, layer.post_norm, config.rms_eps), impl)
        if i in taps:
            features.append(x)
    none = jnp.zeros((x.shape[0], 0), x.dtype)
    return TargetOutput(
        residual=x,
        hidden=rms_norm(x, params.norm, config.rms_eps),
        features=jnp.concatenate(features, axis=1) if features else none,
        buffers=buffers.replace(k_pools=tuple(k_pools), v_pools=tuple(v_pools)),
    )


def _attention(
    layer: LayerParams,
    x: jax.Array,
    meta: AttnMetadata,
    args: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    k_pool: jax.Array,
    v_pool: jax.Array,
    params: TargetParams,
    impl: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention sub-layer: what it adds to the stream, and the pools."""
    config = params.config
    normed = rms_norm(x, layer.input_norm, config.rms_eps)
    qkv = linear(normed, layer.qkv, layer.qkv_bias, impl=impl)
    q, k, v = split_qkv(qkv, config.num_heads, config.num_kv_heads, config.head_dim)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = rms_norm(q, layer.q_norm, config.rms_eps)
        k = rms_norm(k, layer.k_norm, config.rms_eps)
    q, k = apply_rope(q, *angles), apply_rope(k, *angles)
    out, k_pool, v_pool = write_and_attend(q, k, v, k_pool, v_pool, meta, args, impl=impl)
    return linear(out, layer.o, layer.o_bias, impl=impl), k_pool, v_pool


def _feed_forward(layer: LayerParams, x: jax.Array, impl: str) -> jax.Array:
    inner = pk.skinny_matmul_swiglu(x, layer.gate_up, impl=impl)  # [N, F]
    return linear(inner, layer.down, impl=impl)
