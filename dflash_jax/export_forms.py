"""A drafter's config in the forms of its publishers; what a form cannot say is refused.

Every writer is checked by reading back what it wrote: nothing is dropped silently.
"""

from dataclasses import fields, replace
from typing import Any

from dflash_jax.config import DraftConfig, LayerAttention, RopeConfig

FORMS = ("zlab", "deepspec", "speculators")
OWNERS = {"zlab": "z-lab's", "deepspec": "DeepSpec's", "speculators": "speculators'"}
# Kinds whose rows a form takes for granted: all of them draft (spec/checkpoints.md §1). DFlash with
# such rows, as DeepSpec trains it, is DSpark of rank 0 to us.
_ALL_ROWS_DRAFT = {"zlab": ("dspark",), "deepspec": ("dflash", "dspark"), "speculators": ()}


def drafter_to_hf(config: DraftConfig, form: str = "zlab") -> dict[str, Any]:
    """The `config.json` of a drafter: what `DraftConfig.from_hf` reads back as the same.

    Raises:
      ValueError: an unknown form, or a config that its keys cannot say.
    """
    if form not in FORMS:
        raise ValueError(f"drafter config: form {form!r}, wanted one of {', '.join(FORMS)}")
    _check_kind(config, form)
    hf = {"zlab": _zlab, "deepspec": _deepspec, "speculators": _speculators}[form](config)
    said, wanted = DraftConfig.from_hf(hf), replace(config, has_embed=False, has_head=False)
    for field in fields(config):
        value = getattr(wanted, field.name)
        if getattr(said, field.name) != value:
            raise ValueError(f"drafter config: {OWNERS[form]} keys cannot say {field.name} {value}")
    return hf


def _check_kind(config: DraftConfig, form: str) -> None:
    """Refuse a family that a form has no keys for, and rows that it would read in another way."""
    kind, who = config.kind, f"drafter config: {OWNERS[form]} form"
    if kind == "dflash2" and form != "zlab":
        raise ValueError(
            f"{who} has no dflash2 drafter, only dflash and dspark: there are no keys for "
            "convolutions and a selector; supported: zlab"
        )
    if not config.drafts_from_anchor and kind in _ALL_ROWS_DRAFT[form]:
        others = "zlab and speculators" if kind == "dflash" else "speculators"
        raise ValueError(
            f"{who} cannot say this {kind} drafter's rows: there every row, the anchor's too, "
            "drafts the token behind its own; here the anchor's drafts nothing and each other row "
            f"its own token, so the same weights would draft other tokens; supported: {others}"
        )


def _zlab(config: DraftConfig) -> dict[str, Any]:
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
    if config.kind == "dspark":
        nested |= {"projector_type": "dspark", **_spark_heads(config)}
    if config.input_embedding_scale != 1.0:
        nested["input_embedding_scale"] = config.input_embedding_scale
    if config.output_multiplier != 1.0:
        nested["output_multiplier"] = config.output_multiplier
    if config.soft_cap is not None:
        nested["final_logit_softcapping"] = config.soft_cap
    architectures = {
        "dflash": "DFlashDraftModel",
        "dflash2": "DFlash2DraftModel",
        "dspark": "DSparkDraftModel",
    }
    return {
        "architectures": [architectures[config.kind]],
        **_body(config),
        "num_target_layers": config.num_target_layers,
        **_attention_to_hf(config.attention),
        **({} if config.kind == "dflash2" else {"block_size": config.block_rows}),
        "dflash_config": nested,
    }


def _deepspec(config: DraftConfig) -> dict[str, Any]:
    """Flat, and all layers full: DeepSpec trains no other."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        **_body(config),
        "num_target_layers": config.num_target_layers,
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "block_size": config.block_rows,
        "mask_token_id": config.mask_id,
        "target_layer_ids": list(config.target_layer_ids),
        "num_anchors": 1,  # of a training row; its reader wants the key
        **_spark_heads(config),
    }


def _speculators(config: DraftConfig) -> dict[str, Any]:
    windows = {layer.window for layer in config.attention if layer.window is not None}
    slides = [layer.window is not None for layer in config.attention]
    body = {
        **_body(config),
        "num_target_layers": config.num_target_layers,  # for us alone; the others ask the target
        "layer_types": ["sliding_attention" if x else "full_attention" for x in slides],
        "use_sliding_window": bool(windows),
        "sliding_window": max(windows, default=None),
    }
    free = [not layer.is_causal for layer in config.attention if layer.window is not None]
    algorithm = config.kind
    return {
        "architectures": [{"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}[algorithm]],
        "speculators_model_type": algorithm,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_rows,
        "draft_vocab_size": config.num_draft_ids,
        "mask_token_id": config.mask_id,
        "sample_from_anchor": config.drafts_from_anchor,
        "sliding_window_non_causal": any(free),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": body,
        **(_spark_heads(config) if algorithm == "dspark" else {}),
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.max_drafts}
            ],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
    }


def _body(config: DraftConfig) -> dict[str, Any]:
    """What every form says of the layers under one name."""
    return {
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
        **rope_to_hf(config.rope),
    }


def _spark_heads(config: DraftConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": config.confidence_reads_markov,
    }


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


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`."""
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
