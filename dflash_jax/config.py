"""Hyperparameters of targets and drafters: frozen, hashable, read from Hugging Face dicts.

A config is the static field of its params, so two params with equal configs share an executable.
Everything a checkpoint may spell in several ways is settled here, once: a target's below, a
drafter's in `draft_config`, rotary embeddings in `rope_config`.
"""

from __future__ import annotations

from dataclasses import dataclass

from dflash_jax.draft_config import DraftConfig, LayerAttention, RuleConfig, default_taps
from dflash_jax.json_values import Json, flag, integer, items, mapping, number
from dflash_jax.layer_config import GdnConfig, MoeConfig, gdn_layers, moe_layers
from dflash_jax.rope_config import RopeConfig

__all__ = [
    "DraftConfig",
    "GdnConfig",
    "LayerAttention",
    "MoeConfig",
    "RopeConfig",
    "RuleConfig",
    "TargetConfig",
    "default_taps",
]

_HYBRID_TYPES = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_TARGET_TYPES = ("qwen3", "llama", "qwen3_moe", *_HYBRID_TYPES)
_THETA = {"llama": 1e4, "qwen3": 1e6, "qwen3_moe": 1e6}  # where a config names none
_HYBRID_THETA = 1e7
_HYBRID_ROTATED = 0.25


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """A target: Qwen3 (per-head q/k norm), Llama (none), Qwen3-MoE, Qwen3-Next or Qwen3.5.

    `real_vocab` is the number of ids that may be emitted; rows of the head beyond it are padding.
    Hybrids: layers in `gdn_layers` are Gated DeltaNet, the others full attention whose output has a
    gate (`has_output_gate`); norms are `1 + w` (`has_unit_norms`) but for the one inside GDN.
    Layers in `moe_layers` have experts, the others a feed-forward of `ffn` inner columns.
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
    has_output_gate: bool = False
    has_unit_norms: bool = False
    gdn: GdnConfig | None = None
    gdn_layers: tuple[int, ...] = ()
    moe: MoeConfig | None = None
    moe_layers: tuple[int, ...] = ()

    @property
    def num_attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.num_layers - len(self.gdn_layers)

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
        is_hybrid = kind in _HYBRID_TYPES
        _require_known_layers(config, who, is_hybrid)
        heads = integer(config, "num_attention_heads", who, least=1)
        kv_heads = integer(config, "num_key_value_heads", who, heads, least=1)
        width = integer(config, "hidden_size", who, least=1)
        if heads % kv_heads:
            raise ValueError(
                f"{who}: {heads} query heads are not a multiple of {kv_heads} kv heads"
            )
        vocab = integer(config, "vocab_size", who, least=1)
        num_layers = integer(config, "num_hidden_layers", who, least=1)
        moe = None
        if is_hybrid or kind == "qwen3_moe":
            # Hugging Face's defaults: only Qwen3-MoE's router leaves the probabilities as they are.
            moe = MoeConfig.from_hf(config, who, renormalises=is_hybrid)
        sparse = () if moe is None else moe_layers(config, num_layers, who)
        linear = gdn_layers(config, num_layers, who) if is_hybrid else ()
        ffn = integer(config, "intermediate_size", who, least=1) if len(sparse) < num_layers else 0
        return TargetConfig(
            model_type=kind,
            vocab=vocab,
            width=width,
            ffn=ffn,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=integer(config, "head_dim", who, width // heads, least=1),
            rms_eps=number(config, "rms_norm_eps", who, 1e-6),
            rope=RopeConfig.from_hf(
                config,
                default_theta=_THETA.get(kind, _HYBRID_THETA),
                default_rotated=_HYBRID_ROTATED if is_hybrid else None,
                who=who,
            ),
            max_context=integer(config, "max_position_embeddings", who, 32768, least=2),
            is_tied=flag(config, "tie_word_embeddings", who),
            has_qk_norm=kind != "llama",
            has_attention_bias=flag(config, "attention_bias", who),
            real_vocab=vocab,
            has_output_gate=is_hybrid,
            has_unit_norms=is_hybrid,
            gdn=GdnConfig.from_hf(config, who) if linear else None,
            gdn_layers=linear,
            moe=moe if sparse else None,
            moe_layers=sparse,
        )


def _require_known_layers(config: Json, who: str, is_hybrid: bool) -> None:
    """Reject what the layers do not compute: other activations, gates, windows, biases."""
    if config.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"{who}: hidden_act {config['hidden_act']!r}, supported: silu")
    if config.get("mlp_bias"):
        raise NotImplementedError(f"{who}: mlp_bias is not supported")
    if is_hybrid and not flag(config, "attn_output_gate", who, True):
        raise NotImplementedError(
            f"{who}: attn_output_gate false is not supported, wanted the sigmoid gate that is the "
            "second half of each head's query projection"
        )
    if is_hybrid and flag(config, "attention_bias", who):
        raise NotImplementedError(f"{who}: attention_bias is not supported in a hybrid target")
    kinds = set(items(config, "layer_types", who, str)) - {"full_attention"}
    if kinds and not is_hybrid:
        raise NotImplementedError(
            f"{who}: layer types {sorted(kinds)} are not supported, wanted full_attention"
        )
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise NotImplementedError(f"{who}: a sliding window in the target is not supported")
