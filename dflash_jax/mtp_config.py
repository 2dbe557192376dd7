"""Hyperparameters of a multi-token-prediction head (spec/drafters.md §6)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dflash_jax.config import DraftConfig, RuleConfig, TargetConfig
from dflash_jax.json_values import Json, flag, integer

DEFAULT_DRAFTS = 3  # of a head whose file does not say; each draft more is a pass over the lm_head
MOST_DRAFTS = 32
_WHO = "MTP config"


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """A head with one full-attention layer of the target's own kind.

    `layer` holds that layer's sizes: a target of one layer. `reads_residual`: the head takes the
    target's hidden rows before their final norm; by default after it, as Qwen3-Next and Qwen3.5 do.
    """

    layer: TargetConfig
    max_drafts: int = DEFAULT_DRAFTS
    reads_residual: bool = False

    kind = "mtp"  # the drafter family, as of the other configs

    @property
    def backbone(self) -> None:
        """It reads no tapped layer and shares no pools: its own are in `Fixed.draft`."""
        return None

    @staticmethod
    def from_hf(config: Json) -> MtpConfig:
        """Read the head of a target's config.json, or of one that holds a head alone.

        Raises:
          NotImplementedError: more layers than one, or an embedding of its own.
          ValueError: no head, or a number of drafts that cannot be.
        """
        text = {**config, **(config.get("text_config") or {})}
        depth = integer(text, "mtp_num_hidden_layers", _WHO, 1, least=0)
        if depth != 1:
            raise NotImplementedError(
                f"{_WHO}: mtp_num_hidden_layers is {depth}, supported is 1, whose layer serves all "
                "drafts"
            )
        if flag(text, "mtp_use_dedicated_embeddings", _WHO):
            raise NotImplementedError(f"{_WHO}: mtp_use_dedicated_embeddings is not supported")
        drafts = integer(text, "num_speculative_tokens", _WHO, DEFAULT_DRAFTS, least=1)
        if drafts > MOST_DRAFTS:
            raise ValueError(
                f"{_WHO}: num_speculative_tokens is {drafts}, wanted at most {MOST_DRAFTS}"
            )
        target = TargetConfig.from_hf(config)
        layer = replace(
            target,
            num_layers=1,
            gdn=None,
            gdn_layers=(),
            moe_layers=(0,) if target.moe is not None else (),
            real_vocab=target.vocab,
        )
        return MtpConfig(layer, drafts, flag(text, "mtp_reads_residual", _WHO))


DrafterConfig = DraftConfig | MtpConfig | RuleConfig  # of any drafter there is


def head_of(draft: DrafterConfig) -> MtpConfig | None:
    """The multi-token-prediction head that runs, as the drafter or inside of an oracle."""
    inner = draft.inner if isinstance(draft, RuleConfig) else draft
    return inner if isinstance(inner, MtpConfig) else None
