"""Hyperparameters of drafters: with layers (`DraftConfig`) or following a rule (`RuleConfig`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dflash_jax.draft_forms import WHO, draft_form
from dflash_jax.json_values import REQUIRED, Json, flag, integer, items, number
from dflash_jax.rope_config import RopeConfig
from dflash_jax.words import counted

if TYPE_CHECKING:
    from dflash_jax.mtp_config import MtpConfig  # which imports this module


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one drafter layer sees keys: causal in the block or not, and its window (None: all)."""

    is_causal: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A block-diffusion drafter with its own layers: `kind` is dflash, dflash2 or dspark.

    `block_rows` are the rows that run, the anchor's included. Rows 1.. draft the token at their own
    position or, where `drafts_from_anchor`, all rows the one behind it. `target_layer_ids` index
    decoder layers by output. Head transforms: logits * output_multiplier, then soft-cap.
    `draft_vocab` is the number of ids that a reduced head knows; None: all. Embedding and head are
    the target's unless the file has its own, which the loader notes in `has_embed` and `has_head`.
    """

    kind: str
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
    has_attention_bias: bool
    block_rows: int
    mask_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    attention: tuple[LayerAttention, ...]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    soft_cap: float | None = None
    conv_taps: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    drafts_from_anchor: bool = False
    markov_kind: str = "vanilla"  # of the head, where markov_rank is not 0
    markov_rank: int = 0
    has_confidence: bool = False
    confidence_reads_markov: bool = False
    draft_vocab: int | None = None
    has_embed: bool = False
    has_head: bool = False

    @property
    def num_draft_ids(self) -> int:
        """Columns of the drafter's logits."""
        return self.draft_vocab or self.vocab

    @property
    def max_drafts(self) -> int:
        """Drafts of a full block."""
        return self.block_rows - self.first_draft_row

    @property
    def first_draft_row(self) -> int:
        """Index of the first row that drafts."""
        return 0 if self.drafts_from_anchor else 1

    def rows_for(self, num_drafts: int) -> int:
        """Block rows that yield `num_drafts` drafts; none is run for nothing."""
        return num_drafts + self.first_draft_row

    @property
    def backbone(self) -> DraftConfig | None:
        """Config of the layers that run: its own."""
        return self

    @property
    def num_conv_groups(self) -> int:
        return self.width // self.conv_group if self.conv_group else 0

    @staticmethod
    def from_hf(config: Json, *, num_target_layers: int | None = None) -> DraftConfig:
        """Read a config.json in any form that `draft_forms` knows.

        Args:
          config: the drafter's `config.json`.
          num_target_layers: of the target, used where the config does not say.

        Raises:
          NotImplementedError: a drafter family or variant that is not built.
          ValueError: a missing key or one that contradicts another.
        """
        form = draft_form(config, num_target_layers)
        kind, config = form.kind, form.facts
        who = f"{WHO} ({kind})"
        if kind not in _BUILT:
            raise NotImplementedError(
                f"{who}: the {form.publisher} form of {kind} is not supported, wanted one of "
                f"{', '.join(_BUILT)}"
            )
        wanted = _BLOCK_KEYS + (_SELECTOR_KEYS if kind == "dflash2" else ())
        missing = [name for name in wanted if config.get(name) is None]
        if missing:
            raise ValueError(f"{who}: no {missing[0]}, in dflash_config or at top level")
        if config.get("attention_sink_bias"):
            raise NotImplementedError(f"{who}: attention_sink_bias is not supported")
        if config.get("hidden_act", "silu") != "silu":
            raise NotImplementedError(
                f"{who}: hidden_act {config['hidden_act']!r}, supported: silu"
            )
        num_layers = _depth(config, "num_hidden_layers", who)
        heads = integer(config, "num_attention_heads", who, least=1)
        kv_heads = integer(config, "num_key_value_heads", who, heads, least=1)
        if heads % kv_heads:
            raise ValueError(
                f"{who}: {heads} query heads are not a multiple of {kv_heads} kv heads"
            )
        layers_of_target = _depth(config, "num_target_layers", who, num_target_layers)
        if layers_of_target is None:
            raise ValueError(f"{who}: no num_target_layers, and no target was given")
        ids = items(config, "target_layer_ids", who, int)

        def of_selector(name: str) -> int:
            return integer(config, name, who, least=1) if kind == "dflash2" else 0

        draft = DraftConfig(
            kind=kind,
            vocab=integer(config, "vocab_size", who, least=1),
            width=integer(config, "hidden_size", who, least=1),
            ffn=integer(config, "intermediate_size", who, least=1),
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=integer(config, "head_dim", who, least=1),
            rms_eps=number(config, "rms_norm_eps", who, 1e-6),
            rope=RopeConfig.from_hf(config, default_theta=1e6, who=who),
            max_context=integer(config, "max_position_embeddings", who, 32768, least=2),
            has_attention_bias=flag(config, "attention_bias", who),
            # HF's block_size counts rows: DFlash's first one drafts nothing, DSpark's does
            block_rows=integer(config, "block_size", who),
            mask_id=integer(config, "mask_token_id", who),
            target_layer_ids=ids or default_taps(layers_of_target, num_layers),
            num_target_layers=layers_of_target,
            attention=_layer_attention(config, num_layers, who),
            input_embedding_scale=number(config, "input_embedding_scale", who, 1.0),
            output_multiplier=number(config, "output_multiplier", who, 1.0)
            * (number(config, "logit_scale", who, 1.0) or 1.0),
            soft_cap=number(config, "final_logit_softcapping", who, None) or None,  # 0: none
            conv_taps=of_selector("conv_kernel_size"),
            conv_group=of_selector("conv_group_size"),
            selector_rank=of_selector("selector_rank"),
            selector_top_k=of_selector("selector_top_k"),
            **_spark_heads(config, kind, who),
            draft_vocab=_reduced_vocab(config, who),
        )
        _check_draft(draft, who)
        return draft


@dataclass(frozen=True, slots=True)
class RuleConfig:
    """A drafter without weights: `kind` is none, prompt_lookup or oracle.

    `ngram` is prompt lookup's match length. `inner` is the config of the drafter whose work an
    oracle runs before it replaces the drafts, so that a forced acceptance costs what a real one
    does.
    """

    kind: str
    max_drafts: int
    ngram: int = 0
    inner: DraftConfig | MtpConfig | None = None

    @property
    def backbone(self) -> DraftConfig | None:
        """Config of the layers that run, if any do and share the target's pools."""
        return None if self.inner is None else self.inner.backbone


def default_taps(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Layer-output ids when a config names none (spec/drafters.md §1, Python's rounding)."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))


_MOST_LAYERS = 4096  # a config that says more is damaged, and a tuple of them would not fit
_BLOCK_KEYS = ("block_size", "mask_token_id")
_SELECTOR_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_BUILT = ("dflash", "dflash2", "dspark")
_MARKOV_KINDS = ("vanilla", "gated", "rnn")


def _spark_heads(config: Json, kind: str, who: str) -> dict[str, Any]:
    """Row convention, Markov head and confidence head; rank 0 is no Markov head."""
    if kind != "dspark":
        if flag(config, "sample_from_anchor", who):
            raise ValueError(f"{who}: sample_from_anchor is true, which only DSpark's rows are")
        return {}
    rank = integer(config, "markov_rank", who, 0, least=0)
    markov_kind = str(config.get("markov_head_type") or "vanilla")
    if rank and markov_kind not in _MARKOV_KINDS:
        raise NotImplementedError(
            f"{who}: markov_head_type {markov_kind[:80]!r} is not supported, wanted one of "
            f"{', '.join(_MARKOV_KINDS)}"
        )
    has_confidence = flag(config, "enable_confidence_head", who)
    reads_markov = has_confidence and flag(config, "confidence_head_with_markov", who)
    if reads_markov and not rank:
        raise ValueError(f"{who}: confidence_head_with_markov is true, but markov_rank is 0")
    return {
        "drafts_from_anchor": flag(config, "sample_from_anchor", who, True),
        "markov_kind": markov_kind if rank else "vanilla",
        "markov_rank": rank,
        "has_confidence": has_confidence,
        "confidence_reads_markov": reads_markov,
    }


def _depth(config: Json, name: str, who: str, default: Any = REQUIRED) -> int:
    depth = integer(config, name, who, default, least=1)
    if depth is not None and depth > _MOST_LAYERS:
        raise ValueError(f"{who}: {name} is {str(depth)[:20]}, wanted at most {_MOST_LAYERS}")
    return depth


def _reduced_vocab(config: Json, who: str) -> int | None:
    """Ids of a head that knows a part of the vocabulary."""
    vocab = integer(config, "vocab_size", who, least=1)
    reduced = integer(config, "draft_vocab_size", who, vocab, least=1)
    if reduced > vocab:
        raise ValueError(f"{who}: draft_vocab_size {reduced} is above the vocab_size of {vocab}")
    return None if reduced == vocab else reduced


def _layer_attention(config: Json, num_layers: int, who: str) -> tuple[LayerAttention, ...]:
    """Window and causality a layer (spec/drafters.md §3.1, vLLM's priority).

    A sliding layer without an explicit causality is causal in the block; a full one is not.
    Hugging Face nulls `sliding_window` unless `use_sliding_window` is true.
    """
    kinds = items(config, "layer_types", who, str)
    slides = flag(config, "use_sliding_window", who)
    if not kinds:
        first = integer(config, "max_window_layers", who, num_layers)
        kinds = tuple(
            "sliding_attention" if slides and i >= first else "full_attention"
            for i in range(num_layers)
        )
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise NotImplementedError(f"{who}: layer types {sorted(unknown)} are not supported")
    if len(kinds) != num_layers:
        raise ValueError(f"{who}: {len(kinds)} layer_types for {counted(num_layers, 'layer')}")
    window = integer(config, "sliding_window", who, None, least=0) if slides else None
    window = integer(config, "swa_window_size", who, window, least=0) or None  # 0: none
    causal = config.get("is_causal")
    causal = config.get("causal") if causal is None else causal
    slides_everywhere = flag(config, "use_swa", who)

    def one(kind: str) -> LayerAttention:
        is_sliding = kind == "sliding_attention"
        return LayerAttention(
            is_causal=is_sliding if causal is None else bool(causal),
            window=window if is_sliding or slides_everywhere else None,
        )

    return tuple(one(kind) for kind in kinds)


def _check_draft(draft: DraftConfig, who: str) -> None:
    """The loader checks that need the config alone (spec/checkpoints.md §6)."""
    if draft.max_drafts < 1:
        least = draft.rows_for(1)
        raise ValueError(f"{who}: block_size {draft.block_rows}, wanted at least {least}")
    if not 0 <= draft.mask_id < draft.vocab:
        raise ValueError(
            f"{who}: mask_token_id {draft.mask_id} is outside the vocabulary of {draft.vocab}"
        )
    taps = draft.target_layer_ids
    if list(taps) != sorted(set(taps)):
        raise ValueError(f"{who}: target_layer_ids {list(taps)} are not strictly increasing")
    if taps[0] < -1 or taps[-1] >= draft.num_target_layers:
        raise ValueError(
            f"{who}: target_layer_ids {list(taps)} leave the target's layers, "
            f"-1..{draft.num_target_layers - 1}"
        )
    if draft.kind != "dflash2":
        return
    if not 1 <= draft.selector_top_k <= 16:
        raise ValueError(f"{who}: selector_top_k {draft.selector_top_k}, supported: 1 to 16")
    if not 1 <= draft.conv_taps <= 4:
        raise ValueError(f"{who}: conv_kernel_size {draft.conv_taps}, supported: 1 to 4")
    if draft.conv_group < 1 or draft.width % draft.conv_group:
        raise ValueError(
            f"{who}: conv_group_size {draft.conv_group} does not divide hidden_size {draft.width}"
        )
