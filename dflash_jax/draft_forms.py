"""Drafter configs in their publishers' forms, brought to one set of flat keys.

z-lab and SpecForge nest the block's keys in `dflash_config` or `dspark_config`, DeepSpec writes
them flat, speculators nests the layers' keys and counts taps by the layer they enter
(spec/checkpoints.md §1, §4). What comes out is z-lab's keys, all at top level.
"""

from typing import Any, NamedTuple

from dflash_jax.json_values import Json, flag, integer, items, mapping

WHO = "drafter config"
_ARCHITECTURES = {
    "DFlashDraftModel": ("z-lab", "dflash"),
    "DFlash2DraftModel": ("z-lab", "dflash2"),
    "DSparkDraftModel": ("SpecForge", "dspark"),
    "Qwen3DSparkModel": ("DeepSpec", "dspark"),
}
_SPECULATORS = ("dflash", "dspark")
_PROJECTORS = ("dflash", "dspark")
# Nested objects of the block's keys; in z-lab's order of priority, both before top level.
_NESTED = ("dflash_config", "dspark_config")
# speculators leaves out what equals the defaults of Hugging Face's Qwen3Config.
_QWEN3_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "rope_theta": 10000.0,
}
_SPARK_DEFAULTS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


class DraftForm(NamedTuple):
    """A drafter's config in its publisher's form.

    `sample_from_anchor` in `facts` says the row convention: true when row 0 drafts, each row the
    token behind its own position (DSpark's); false when rows 1.. fill in their own positions.
    """

    publisher: str
    kind: str  # dflash, dflash2 or dspark
    facts: dict[str, Any]


def draft_form(config: Json, num_target_layers: int | None = None) -> DraftForm:
    """Recognise a drafter's config.json (spec/checkpoints.md §1).

    Raises:
      NotImplementedError: a family or variant that is not built.
      ValueError: a value of the wrong type.
    """
    if config.get("speculators_model_type") is not None:
        return _speculators(config, num_target_layers)
    found = (*items(config, "architectures", WHO, str), "none given")[0]
    if found not in _ARCHITECTURES:
        raise NotImplementedError(
            f"{WHO}: architecture {found!r} is not supported, wanted one of "
            f"{', '.join(_ARCHITECTURES)}, or speculators' dflash or dspark"
        )
    publisher, kind = _ARCHITECTURES[found]
    facts = dict(config)
    for name in reversed(_NESTED):
        nested = mapping(config, name, WHO)
        facts |= {key: value for key, value in nested.items() if value is not None}
    kind = _by_projector(facts, found, kind)
    facts.setdefault("sample_from_anchor", kind == "dspark")
    return DraftForm(publisher, kind, facts)


def _by_projector(facts: Json, architecture: str, kind: str) -> str:
    """SpecForge's `projector_type`, which must not contradict the architecture."""
    projector = facts.get("projector_type")
    if projector is None:
        return kind
    if projector not in _PROJECTORS:
        raise NotImplementedError(
            f"{WHO}: projector_type {str(projector)[:80]!r} is not supported, wanted one of "
            f"{', '.join(_PROJECTORS)}"
        )
    if kind == "dflash":
        return projector
    if projector != kind:
        raise ValueError(
            f"{WHO}: projector_type is {projector!r}, but the architecture is {architecture}"
        )
    return kind


def _speculators(config: Json, num_target_layers: int | None) -> DraftForm:
    found = config["speculators_model_type"]
    if found not in _SPECULATORS:
        raise NotImplementedError(
            f"{WHO}: speculators_model_type {str(found)[:80]!r} is not supported, wanted one of "
            f"{', '.join(_SPECULATORS)}"
        )
    body = mapping(config, "transformer_layer_config", WHO)
    if body.get("model_type", "qwen3") != "qwen3":
        raise NotImplementedError(
            f"{WHO}: transformer_layer_config of model_type {str(body['model_type'])[:80]!r} is "
            "not supported, wanted qwen3"
        )
    facts = {**_QWEN3_DEFAULTS, **{k: v for k, v in body.items() if v is not None}}
    if found == "dspark":
        facts |= _SPARK_DEFAULTS
    outer = ("block_size", "mask_token_id", "draft_vocab_size", "target_hidden_size", "dtype")
    for name in (*outer, *_SPARK_DEFAULTS, "sample_from_anchor"):
        if config.get(name) is not None:
            facts[name] = config[name]
    facts["target_layer_ids"] = _taps(config, facts, num_target_layers)
    if config.get("sliding_window_non_causal") is not None or "is_causal" not in facts:
        # Sliding layers are causal in the block unless this says otherwise; full ones never are.
        facts["is_causal"] = False if flag(config, "sliding_window_non_causal", WHO) else None
    anchor = flag(facts, "sample_from_anchor", WHO, found == "dspark")
    facts["sample_from_anchor"] = anchor
    # DFlash rows that start at the anchor are DSpark's without its heads.
    return DraftForm("speculators", "dspark" if anchor else found, facts)


def _taps(config: Json, facts: Json, num_target_layers: int | None) -> list[int] | None:
    """Layer-output ids; speculators names the layer that a hidden state enters, one more."""
    ids = items(config, "aux_hidden_state_layer_ids", WHO, int)
    if not ids:
        depth = integer(facts, "num_target_layers", WHO, num_target_layers, least=4)
        if depth is None:
            return None  # DraftConfig says that the number of target layers is missing
        ids = (2, depth // 2, depth - 3)
    return [i - 1 for i in ids]
