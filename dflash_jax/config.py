"""Hyperparameters of targets and drafters: frozen, hashable, read from Hugging Face dicts.

A config is the static field of its params, so two params with equal configs share an executable.
Everything a checkpoint may spell in several ways is settled here, once: a target's below, a
drafter's in `draft_config`, rotary embeddings in `rope_config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_jax.draft_config import DraftConfig, LayerAttention, RuleConfig, default_taps
from dflash_jax.json_values import Json, flag, integer, items, mapping, number
from dflash_jax.rope_config import RopeConfig

__all__ = [
    "DraftConfig",
    "LayerAttention",
    "RopeConfig",
    "RuleConfig",
    "TargetConfig",
    "default_taps",
]

_TARGET_TYPES = ("qwen3", "llama")


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """A dense target: Qwen3 (per-head q/k norm) or Llama (none).

    `real_vocab` is the number of ids that may be emitted; rows of the head beyond it are padding.
    """

    model_type: str
    vocab: int
    width: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope: RopeConfig
    max_context: int
    is_tied: bool
    has_qk_norm: bool
    has_attention_bias: bool
    real_vocab: int

    @staticmethod
    def from_hf(config: Json) -> TargetConfig:
        """Read a flat `config.json`, or the `text_config` of a nested one.

        Raises:
          NotImplementedError: an architecture, activation or layer type that is not built.
          ValueError: a missing key, or head counts that do not divide.
        """
        config = {**config, **mapping(config, "text_config", "target config")}
        kind = str(config.get("model_type"))
        who = f"target config ({kind})"
        if kind not in _TARGET_TYPES:
            raise NotImplementedError(
                f"target config: model_type {kind!r} is not supported, wanted one of "
                f"{', '.join(_TARGET_TYPES)}"
            )
        _require_plain_layers(config, who)
        heads = integer(config, "num_attention_heads", who, least=1)
        kv_heads = integer(config, "num_key_value_heads", who, heads, least=1)
        width = integer(config, "hidden_size", who, least=1)
        if heads % kv_heads:
            raise ValueError(
                f"{who}: {heads} query heads are not a multiple of {kv_heads} kv heads"
            )
        vocab = integer(config, "vocab_size", who, least=1)
        return TargetConfig(
            model_type=kind,
            vocab=vocab,
            width=width,
            ffn=integer(config, "intermediate_size", who, least=1),
            num_layers=integer(config, "num_hidden_layers", who, least=1),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=integer(config, "head_dim", who, width // heads, least=1),
            rms_eps=number(config, "rms_norm_eps", who, 1e-6),
            rope=RopeConfig.from_hf(config, default_theta=1e6 if kind == "qwen3" else 1e4, who=who),
            max_context=integer(config, "max_position_embeddings", who, 32768, least=2),
            is_tied=flag(config, "tie_word_embeddings", who),
            has_qk_norm=kind == "qwen3",
            has_attention_bias=flag(config, "attention_bias", who),
            real_vocab=vocab,
        )


def _require_plain_layers(config: Json, who: str) -> None:
    """Reject what the dense layer does not compute: other activations, windows, MLP biases."""
    if config.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"{who}: hidden_act {config['hidden_act']!r}, supported: silu")
    if config.get("mlp_bias"):
        raise NotImplementedError(f"{who}: mlp_bias is not supported")
    kinds = set(items(config, "layer_types", who, str)) - {"full_attention"}
    if kinds:
        raise NotImplementedError(
            f"{who}: layer types {sorted(kinds)} are not supported, wanted full_attention"
        )
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise NotImplementedError(f"{who}: a sliding window in the target is not supported")
