"""Untrained drafters for a target: the config to write, and weights to start from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.mtp_export import head_to_hf
from dflash_jax.params import TargetParams
from dflash_jax.train.kinds import Trainable

_ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
}


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
    markov_rank: int = 24,
) -> dict[str, Any]:
    """The `config.json` of a drafter in z-lab form, heads and width as the target's.

    Args:
      kind: dflash, dflash2 or dspark.
      taps: target layers read, by layer-output id; never the last layer.
      mask_id: a vocabulary entry that never occurs in text.
      block_rows: rows of a verification, the anchor's included: one more than the drafts.
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
    if kind == "dspark":
        block_rows -= 1  # the anchor's row drafts as well
        own |= {
            "markov_rank": markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": markov_rank > 0,
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


def head_config(target: TargetConfig, *, num_drafts: int, ffn: int) -> dict[str, Any]:
    """The `config.json` of an MTP head with a layer of the target's kind, `ffn` columns wide."""
    layer = replace(target, num_layers=1, ffn=ffn, real_vocab=target.vocab)
    return head_to_hf(MtpConfig(layer, num_drafts))


def initial_tensors(
    config: Trainable, target: TargetParams, key: jax.Array
) -> dict[str, jax.Array]:
    """Weights to start from, f32, by checkpoint name."""
    if isinstance(config, MtpConfig):
        return _initial_head(config, target, key)
    return _initial_drafter(config, target, key)


def _initial_head(config: MtpConfig, target: TargetParams, key: jax.Array) -> dict[str, jax.Array]:
    """An MTP head that begins as the hidden row it reads, a third of its size, and its layer small.

    The target's hidden rows say what stands next; what stands behind that is not far from it.
    """
    c = config.layer
    width, query, kv = c.width, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    keys = iter(jax.random.split(key, 8))

    def normal(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(next(keys), (rows, columns), jnp.float32) * scale * columns**-0.5

    ones, at = lambda n: jnp.ones(n, jnp.float32), "mtp.layers.0."
    eye = jnp.eye(width, dtype=jnp.float32)
    tensors = {
        "mtp.fc.weight": jnp.concatenate([normal(width, width), eye], axis=1),
        "mtp.pre_fc_norm_embedding.weight": ones(width),
        "mtp.pre_fc_norm_hidden.weight": ones(width),
        "mtp.norm.weight": target.norm.astype(jnp.float32) / 3,
        f"{at}input_layernorm.weight": ones(width),
        f"{at}post_attention_layernorm.weight": ones(width),
        f"{at}self_attn.q_proj.weight": normal(query, width),
        f"{at}self_attn.k_proj.weight": normal(kv, width),
        f"{at}self_attn.v_proj.weight": normal(kv, width),
        f"{at}self_attn.o_proj.weight": normal(width, query, 2**-0.5),
        f"{at}mlp.gate_proj.weight": normal(c.ffn, width),
        f"{at}mlp.up_proj.weight": normal(c.ffn, width),
        f"{at}mlp.down_proj.weight": normal(width, c.ffn, 2**-0.5),
    }
    if c.has_qk_norm:
        for which in "qk":
            tensors[f"{at}self_attn.{which}_norm.weight"] = ones(c.head_dim)
    return tensors


def _initial_drafter(
    config: DraftConfig, target: TargetParams, key: jax.Array
) -> dict[str, jax.Array]:
    """A block drafter's weights.

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
    if config.kind == "dspark":
        tensors |= _initial_spark(config, target, next(keys))
    return tensors


def _initial_spark(
    config: DraftConfig, target: TargetParams, key: jax.Array
) -> dict[str, jax.Array]:
    """A Markov head without any bias yet, and a confidence of one half everywhere."""
    rank, width = config.markov_rank, config.width
    tensors = {}
    if rank:
        # Latents as the selector's codes: like tokens are alike. A second table of zeros has a
        # gradient, since the first has none of them.
        tensors["markov_head.markov_w1.weight"] = principal_axes(target.embed, rank)
        tensors["markov_head.markov_w2.weight"] = jnp.zeros((config.vocab, rank), jnp.float32)
        mixes = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}
        if config.markov_kind in mixes:
            name, parts, latents = mixes[config.markov_kind]
            shape = parts * rank, width + latents * rank
            mix = jax.random.normal(key, shape, jnp.float32) * shape[1] ** -0.5
            tensors[f"markov_head.{name}.weight"] = mix
            tensors[f"markov_head.{name}.bias"] = jnp.zeros(shape[0], jnp.float32)
    if config.has_confidence:
        columns = width + (rank if config.confidence_reads_markov else 0)
        tensors["confidence_head.proj.weight"] = jnp.zeros((1, columns), jnp.float32)
        tensors["confidence_head.proj.bias"] = jnp.zeros(1, jnp.float32)
    return tensors


def _initial_selector(config: DraftConfig, target: TargetParams) -> dict[str, jax.Array]:
    """Codes that begin as the principal axes of the target's tables, so that like tokens are alike.

    Rare tokens are seldom a predecessor in training; from these codes they start with what their
    neighbours learn. The hidden projection is zero: no edge yet, and a gradient to grow one.
    """

    rank = config.selector_rank
    zeros = jnp.zeros((rank, config.width), jnp.float32)
    return {
        "candidate_selector.hidden_projection.weight": zeros,
        "candidate_selector.predecessor_codebook": principal_axes(target.embed, rank),
        "candidate_selector.successor_codebook": principal_axes(target.lm_head, rank),
    }


def principal_axes(table: jax.Array, rank: int) -> jax.Array:
    """f32[V, rank]: rows of a table by its largest principal axes, each of size one."""
    centred = table.astype(jnp.float32)
    centred = centred - centred.mean(0)
    _, vectors = jnp.linalg.eigh(centred.T @ centred)
    codes = centred @ vectors[:, -rank:]
    return codes / jnp.sqrt(jnp.mean(codes**2, axis=0))
