"""Hybrid and mixture-of-experts targets for `make_tiny`: configs and random tensors.

"qwen3_moe" is Qwen3's attention with experts; "qwen3_next" has Gated-DeltaNet layers, experts and a
shared one, flat names and projections grouped by key head; "qwen3_5" is dense, wrapped as the
multimodal checkpoints are, with a tensor of a vision part. The last layer is full attention, those
before it are Gated DeltaNet.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

ARCHITECTURES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
}
# Dims that the kernel serves.
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 16, 16, 4
EXPERTS, EXPERT_FFN = 4, 32


def config_of(kind: str, dense: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of one kind, from that of a dense target of the same sizes."""
    config = {**dense, "architectures": [ARCHITECTURES[kind]], "model_type": kind}
    experts = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": EXPERT_FFN,
        "norm_topk_prob": True,
    }
    if kind == "qwen3_moe":
        return config | experts
    num_layers = dense["num_hidden_layers"]
    config |= {
        "layer_types": ["linear_attention"] * (num_layers - 1) + ["full_attention"],
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": KEY_DIM,
        "linear_value_head_dim": VALUE_DIM,
        "linear_conv_kernel_dim": TAPS,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    }
    if kind == "qwen3_next":
        return config | experts | {"shared_expert_intermediate_size": EXPERT_FFN}
    outer = {"architectures": config.pop("architectures"), "model_type": kind}
    return outer | {"text_config": config | {"model_type": "qwen3_5_text"}, "vision_config": {}}


def text_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The text part's keys, wherever they stand."""
    return {**config, **config.get("text_config", {})}


def layer_tensors(
    config: Mapping[str, Any], rng: np.random.Generator, is_full_attention: bool
) -> dict[str, np.ndarray]:
    """One layer; `config` as `text_of` gives it."""
    width, dim = config["hidden_size"], config["head_dim"]
    has_unit_norms = config["model_type"] != "qwen3_moe"

    def gain(size: int) -> np.ndarray:
        around = 0.0 if has_unit_norms else 1.0
        return around + 0.1 * rng.standard_normal(size)

    layer = {
        "input_layernorm.weight": gain(width),
        "post_attention_layernorm.weight": gain(width),
    }
    if is_full_attention:
        halves = 2 if has_unit_norms else 1
        query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
        layer |= {
            "self_attn.q_proj.weight": _matrix(rng, halves * query, width),
            "self_attn.k_proj.weight": _matrix(rng, kv, width),
            "self_attn.v_proj.weight": _matrix(rng, kv, width),
            "self_attn.o_proj.weight": _matrix(rng, width, query),
            # Gains of about two make attention pick a few keys.
            "self_attn.q_norm.weight": 1.0 + gain(dim),
            "self_attn.k_norm.weight": 1.0 + gain(dim),
        }
    else:
        is_grouped = config["model_type"] == "qwen3_next"
        own = _gdn(width, rng, is_grouped=is_grouped)
        layer |= {f"linear_attn.{name}": x for name, x in own.items()}
    return layer | {f"mlp.{name}": x for name, x in _feed_forward(config, rng).items()}


def outer_tensors(config: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What a wrapped checkpoint has beside its text part."""
    return {"model.visual.pos_embed.weight": np.zeros((2, 4))} if "text_config" in config else {}


def _gdn(width: int, rng: np.random.Generator, *, is_grouped: bool) -> dict[str, np.ndarray]:
    keys, values = KEY_HEADS * KEY_DIM, VALUE_HEADS * VALUE_DIM
    channels = 2 * keys + values
    layer = {
        "conv1d.weight": rng.standard_normal((channels, 1, TAPS)) / np.sqrt(TAPS),
        # Slow decays, so that a state remembers what should not be in it.
        "A_log": np.log(rng.uniform(0.02, 0.5, VALUE_HEADS)),
        "dt_bias": 0.5 * rng.standard_normal(VALUE_HEADS),
        "norm.weight": 1.0 + 0.1 * rng.standard_normal(VALUE_DIM),
        "out_proj.weight": _matrix(rng, width, values),
    }
    if is_grouped:
        layer["in_proj_qkvz.weight"] = _matrix(rng, channels + values, width)
        layer["in_proj_ba.weight"] = _matrix(rng, 2 * VALUE_HEADS, width)
        return layer
    rows = {"qkv": channels, "z": values, "b": VALUE_HEADS, "a": VALUE_HEADS}
    return layer | {f"in_proj_{name}.weight": _matrix(rng, n, width) for name, n in rows.items()}


def _feed_forward(config: Mapping[str, Any], rng: np.random.Generator) -> dict[str, np.ndarray]:
    width = config["hidden_size"]

    def dense(at: str, ffn: int) -> dict[str, np.ndarray]:
        return {
            f"{at}gate_proj.weight": _matrix(rng, ffn, width),
            f"{at}up_proj.weight": _matrix(rng, ffn, width),
            f"{at}down_proj.weight": _matrix(rng, width, ffn),
        }

    if "num_experts" not in config:
        return dense("", config["intermediate_size"])
    tensors = {"gate.weight": 2.0 * _matrix(rng, EXPERTS, width)}
    for i in range(EXPERTS):
        tensors |= dense(f"experts.{i}.", EXPERT_FFN)
    if "shared_expert_intermediate_size" in config:
        tensors |= dense("shared_expert.", EXPERT_FFN)
        tensors["shared_expert_gate.weight"] = _matrix(rng, 1, width)
    return tensors


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.standard_normal((rows, columns)) / np.sqrt(columns)
