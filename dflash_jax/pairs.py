"""Whether a drafter fits a target: one answer for the loader, the planner and the doctor."""

from collections.abc import Iterator
from typing import NamedTuple

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.words import counted


class Misfit(NamedTuple):
    """One reason why a pair cannot work, and what would help."""

    topic: str
    reason: str
    mend: str


def misfits(target: TargetConfig, draft: DraftConfig | MtpConfig) -> Iterator[Misfit]:
    """Every reason, from configs alone (spec/checkpoints.md §6); a fitting pair has none.

    A tap on the target's last layer is none: it reads the residual stream before the final norm.
    """

    def unequal(name: str, of_draft: int, of_target: int) -> str:
        return f"{name} is {of_draft} for the drafter and {of_target} for the target"

    other = "take the drafter that was made for this target"
    if isinstance(draft, MtpConfig):
        head = draft.layer
        if head.width != target.width:
            yield Misfit("width", unequal("hidden_size", head.width, target.width), other)
        if head.vocab != target.vocab:
            yield Misfit("vocabulary", unequal("vocab_size", head.vocab, target.vocab), other)
        return
    if draft.width != target.width:
        yield Misfit("width", unequal("hidden_size", draft.width, target.width), other)
    if draft.vocab < target.vocab or (draft.vocab > target.vocab and not draft.has_embed):
        reason = unequal("vocab_size", draft.vocab, target.vocab)
        yield Misfit("vocabulary", reason, f"{other}, or one with an embedding of its own")
    elif draft.vocab > target.vocab and (draft.draft_vocab is not None or draft.markov_rank):
        what = (
            "a Markov head" if draft.draft_vocab is None else f"a head of {draft.draft_vocab} ids"
        )
        reason = f"vocab_size {draft.vocab} is above the target's {target.vocab}"
        yield Misfit("vocabulary", f"{reason}, which is not supported beside {what}", other)
    if draft.num_target_layers != target.num_layers:
        reason = unequal("num_target_layers", draft.num_target_layers, target.num_layers)
        yield Misfit("taps", reason, other)
    taps = list(draft.target_layer_ids)
    if taps[0] < -1 or taps[-1] >= target.num_layers:
        reason = f"target_layer_ids {taps} for a target of {counted(target.num_layers, 'layer')}"
        yield Misfit("taps", reason, "write layer-output ids, counted from 0, into its config")
    rows = draft.vocab if draft.has_embed else target.vocab
    if not 0 <= draft.mask_id < rows:
        reason = f"mask_token_id {draft.mask_id} is outside the vocabulary of {rows}"
        yield Misfit("mask", reason, "write the id that it was trained with into its config")


def check_pair(
    target: TargetConfig,
    draft: DraftConfig | MtpConfig,
    *,
    who: str = "drafter and target do not fit",
) -> None:
    """Raise ValueError with the first reason why a drafter does not fit a target."""
    for misfit in misfits(target, draft):
        raise ValueError(f"{who}: {misfit.reason}")
