"""Write drafters in z-lab's config and tensor names, in full or as int8 with float scales.

int8 is this project's own storage: a matrix `NAME` is I8 with `NAME.scale`, f32, one a row. The two
selector codebooks have `NAME.column_scale` instead, one a column: their rows are looked up one by
one, and a scale a row would be as large as the rows.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dflash_jax.config import DraftConfig, LayerAttention, RopeConfig
from dflash_jax.params import ConvParams, DraftParams, LayerParams
from dflash_jax.safetensors_io import SINGLE_NAME, write_file

_CODEBOOK_ENDING = "_codebook"


def save_drafter(
    params: DraftParams, folder: str | os.PathLike[str], *, int8: bool = False
) -> None:
    """Write config.json and model.safetensors that `load_drafter` reads back."""
    write_drafter(folder, params.config, drafter_tensors(params), int8=int8)


def write_drafter(
    folder: str | os.PathLike[str],
    config: DraftConfig,
    tensors: Mapping[str, Any],
    *,
    int8: bool = False,
) -> None:
    """Write a drafter given by checkpoint names; matrices are `[out, in]`.

    Raises:
      ValueError: a config that z-lab's keys cannot say.
    """
    folder = Path(folder)
    hf = drafter_to_hf(config)
    arrays = {name: np.asarray(x) for name, x in tensors.items()}
    hf["dtype"] = str(arrays["norm.weight"].dtype)
    if int8:
        arrays = _quantised(arrays)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / SINGLE_NAME, arrays, {"format": "pt"})
    temporary = folder / f".config.json.{os.getpid()}.part"
    try:
        temporary.write_text(json.dumps(hf, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, folder / "config.json")
    finally:
        temporary.unlink(missing_ok=True)


def drafter_to_hf(config: DraftConfig) -> dict[str, Any]:
    """The z-lab `config.json` of a drafter: what `DraftConfig.from_hf` reads back as the same."""
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.kind == "dflash2":
        nested |= {
            "block_size": config.block_rows,
            "conv_kernel_size": config.conv_taps,
            "conv_group_size": config.conv_group,
            "selector_rank": config.selector_rank,
            "selector_top_k": config.selector_top_k,
        }
    if config.input_embedding_scale != 1.0:
        nested["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        nested["output_multiplier"] = config.output_multiplier
    if config.soft_cap is not None:
        nested["final_logit_softcapping"] = config.soft_cap
    is_second = config.kind == "dflash2"
    hf = {
        "architectures": ["DFlash2DraftModel" if is_second else "DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": config.vocab,
        "hidden_size": config.width,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_eps,
        "max_position_embeddings": config.max_context,
        "attention_bias": config.has_attention_bias,
        "tie_word_embeddings": False,
        "num_target_layers": config.num_target_layers,
        **_attention_to_hf(config.attention),
        **_rope_to_hf(config.rope),
        **({} if is_second else {"block_size": config.block_rows}),
        "dflash_config": nested,
    }
    if DraftConfig.from_hf(hf) != config:
        raise ValueError(f"drafter config: z-lab's keys cannot say {config.attention}")
    return hf


def _attention_to_hf(attention: tuple[LayerAttention, ...]) -> dict[str, Any]:
    """Windows and causality; left out, causality follows the window, as readers take it."""
    windows = {layer.window for layer in attention if layer.window is not None}
    causal = {layer.is_causal for layer in attention}
    slides = [layer.window is not None for layer in attention]
    if len(causal) == 2 and not windows:
        slides = [layer.is_causal for layer in attention]  # sliding without a window
    kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
    hf = {
        "layer_types": kinds,
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows) if windows else None,
    }
    return hf | ({"is_causal": causal.pop()} if len(causal) == 1 else {})


def _rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if rope.kind != "default":
        scaling = {
            "rope_type": rope.kind,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_context,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
        if rope.kind == "yarn":
            scaling["attention_factor"] = rope.attention_factor
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def drafter_tensors(params: DraftParams) -> dict[str, np.ndarray]:
    """Params as checkpoint tensors: q, k, v and gate, up apart again."""
    tensors = {
        "fc.weight": params.fc,
        "hidden_norm.weight": params.hidden_norm,
        "norm.weight": params.norm,
    }
    for i, layer in enumerate(params.layers):
        tensors |= _layer_tensors(layer, f"layers.{i}.", params.config)
    if params.selector is not None:
        at = "candidate_selector."
        tensors |= {
            f"{at}hidden_projection.weight": params.selector.hidden_projection,
            f"{at}predecessor_codebook": params.selector.predecessor,
            f"{at}successor_codebook": params.selector.successor,
        }
    return {name: np.asarray(x) for name, x in tensors.items()}


def _layer_tensors(layer: LayerParams, at: str, c: DraftConfig) -> dict[str, Any]:
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


def _quantised(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices as int8 with a scale; norms, biases and base kernels as they are."""
    stored: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        if array.ndim != 2:
            stored[name] = array
            continue
        is_codebook = name.removesuffix(".weight").endswith(_CODEBOOK_ENDING)
        axis = 0 if is_codebook else 1  # the axis that shares a scale
        wide = array.astype(np.float32)
        scale = np.abs(wide).max(axis=axis) / 127.0
        scale = np.where(scale == 0.0, 1.0, scale).astype(np.float32)
        stored[name] = np.rint(wide / np.expand_dims(scale, axis)).astype(np.int8)
        stored[name + (".column_scale" if is_codebook else ".scale")] = scale
    return stored
