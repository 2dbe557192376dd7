"""A decoder layer as checkpoint tensors: q, k, v and gate, up apart again."""

from typing import Any

import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.params import ConvParams, LayerParams


def layer_tensors(layer: LayerParams, at: str, c: DraftConfig | TargetConfig) -> dict[str, Any]:
    """Tensors of a layer with attention and a dense feed-forward, names under the prefix `at`."""
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    tensors = {
        f"{at}input_layernorm.weight": layer.input_norm,
        f"{at}post_attention_layernorm.weight": layer.post_norm,
        f"{at}self_attn.o_proj.weight": layer.o,
        f"{at}self_attn.q_norm.weight": layer.q_norm,
        f"{at}self_attn.k_norm.weight": layer.k_norm,
        f"{at}self_attn.o_proj.bias": layer.o_bias,
        f"{at}mlp.gate_proj.weight": layer.gate_up[: c.ffn],
        f"{at}mlp.up_proj.weight": layer.gate_up[c.ffn :],
        f"{at}mlp.down_proj.weight": layer.down,
    }
    for what, joined in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if joined is not None:
            parts = np.split(np.asarray(joined), [query, query + kv])
            for part, rows in zip("qkv", parts, strict=True):
                tensors[f"{at}self_attn.{part}_proj.{what}"] = rows
    for name, conv in (("attention_conv", layer.attention_conv), ("mlp_conv", layer.mlp_conv)):
        tensors |= _conv_tensors(conv, f"{at}{name}.")
    return {name: x for name, x in tensors.items() if x is not None}


def _conv_tensors(conv: ConvParams | None, at: str) -> dict[str, Any]:
    if conv is None:
        return {}
    return {f"{at}base_kernel": conv.base, f"{at}kernel_projection.weight": conv.projection}
