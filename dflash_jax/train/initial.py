"""Untrained drafters for a target: the config to write, and weights to start from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.params import TargetParams

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}


def drafter_config(
    kind: str,
    target: TargetConfig,
    *,
    taps: tuple[int, ...],
    mask_id: int,
    block_rows: int = 8,
    num_layers: int = 3,
    ffn: int = 704,
    selector_rank: int = 16,
) -> dict[str, Any]:
    """The `config.json` of a drafter in z-lab form, heads and width as the target's.

    Args:
      kind: dflash or dflash2.
      taps: target layers read, by layer-output id; never the last layer.
      mask_id: a vocabulary entry that never occurs in text.
      block_rows: rows of a block, the anchor's included.
    """
    if kind not in _ARCHITECTURES:
        raise ValueError(f"drafter kind {kind!r}, wanted one of {', '.join(_ARCHITECTURES)}")
    if max(taps) > target.num_layers - 2:
        raise ValueError(f"taps {taps}, wanted ids up to {target.num_layers - 2}")
    own: dict[str, Any] = {"mask_token_id": mask_id, "target_layer_ids": list(taps)}
    if kind == "dflash2":
        own |= {
            "conv_kernel_size": 2,
            "conv_group_size": 16,
            "selector_rank": selector_rank,
            "selector_top_k": 16,
        }
    return {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": target.width,
        "intermediate_size": ffn,
        "num_hidden_layers": num_layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab,
        "rms_norm_eps": target.rms_eps,
        "max_position_embeddings": target.max_context,
        "rope_theta": target.rope.theta,
        "layer_types": ["full_attention"] * num_layers,
        "is_causal": False,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": block_rows,
        "num_target_layers": target.num_layers,
        "dflash_config": own,
    }


def initial_tensors(
    config: DraftConfig, target: TargetParams, key: jax.Array
) -> dict[str, jax.Array]:
    """Weights to start from, f32, by checkpoint name.

    Random with the variance of their fan-in, outputs of a layer damped by its depth, convolutions
    the identity, edges of the selector zero, and the final norm a third of the target's: the head
    is the target's, and rows that are not aligned with it yet would start with huge logits.
    `fc` is for features of size one (`loop.scaled`).
    """
    width, ffn, dim = config.width, config.ffn, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    taps = len(config.target_layer_ids)
    keys = iter(jax.random.split(key, 16 * config.num_layers + 8))

    def normal(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns), jnp.float32) * scale * columns**-0.5

    ones = lambda n: jnp.ones(n, jnp.float32)
    tensors = {
        "fc.weight": normal(width, taps * width),
        "hidden_norm.weight": ones(width),
        "norm.weight": target.norm.astype(jnp.float32) / 3,
    }
    damped = (2 * config.num_layers) ** -0.5
    for i in range(config.num_layers):
        at = f"layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": ones(width),
            f"{at}post_attention_layernorm.weight": ones(width),
            f"{at}self_attn.q_proj.weight": normal(query, width),
            f"{at}self_attn.k_proj.weight": normal(kv, width),
            f"{at}self_attn.v_proj.weight": normal(kv, width),
            f"{at}self_attn.o_proj.weight": normal(width, query, damped),
            f"{at}self_attn.q_norm.weight": ones(dim),
            f"{at}self_attn.k_norm.weight": ones(dim),
            f"{at}mlp.gate_proj.weight": normal(ffn, width),
            f"{at}mlp.up_proj.weight": normal(ffn, width),
            f"{at}mlp.down_proj.weight": normal(width, ffn, damped),
        }
        for conv in ("attention_conv", "mlp_conv") if config.conv_taps else ():
            base = jnp.zeros((2, config.conv_taps, width), jnp.float32).at[:, 0].set(1.0)
            rows = 2 * config.conv_taps * config.num_conv_groups
            tensors[f"{at}{conv}.base_kernel"] = base
            tensors[f"{at}{conv}.kernel_projection.weight"] = jnp.zeros((rows, width), jnp.float32)
    if config.selector_rank:
        tensors |= _initial_selector(config, target)
    return tensors


def _initial_selector(config: DraftConfig, target: TargetParams) -> dict[str, jax.Array]:
    """Codes that begin as the principal axes of the target's tables, so that like tokens are alike.

    Rare tokens are seldom a predecessor in training; from these codes they start with what their
    neighbours learn. The hidden projection is zero: no edge yet, and a gradient to grow one.
    """

    def axes(table: jax.Array) -> jax.Array:
        centred = table.astype(jnp.float32)
        centred = centred - centred.mean(0)
        _, vectors = jnp.linalg.eigh(centred.T @ centred)
        codes = centred @ vectors[:, -config.selector_rank :]
        return codes / jnp.sqrt(jnp.mean(codes**2, axis=0))

    zeros = jnp.zeros((config.selector_rank, config.width), jnp.float32)
    return {
        "candidate_selector.hidden_projection.weight": zeros,
        "candidate_selector.predecessor_codebook": axes(target.embed),
        "candidate_selector.successor_codebook": axes(target.lm_head),
    }
