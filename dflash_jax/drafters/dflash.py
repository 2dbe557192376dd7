"""DFlash: every draft row's argmax, independently (spec/drafters.md §3.4)."""

from typing import cast

import jax

import pallas_kernels as pk
from dflash_jax.drafters import backbone
from dflash_jax.drafters.proposal import Proposal
from dflash_jax.drafters.vocabulary import draft_logits, num_choices, target_ids
from dflash_jax.fixed import Fixed
from dflash_jax.options import DecodeOptions
from dflash_jax.params import DraftParams, Params
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState


def propose(
    params: Params,
    state: DecodeState,
    num_rows: jax.Array,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[Proposal, Buffers, DflashScratch]:
    """Guess a block in one pass; fills `logits` and `draft_tokens_dev`."""
    draft, target = cast(DraftParams, params.draft), params.target
    buffers, scratch = backbone.forward(
        draft, target, state, num_rows, buffers, scratch, fixed=fixed, impl=options.impl
    )
    rows = backbone.draft_rows(scratch, draft.config, fixed)
    logits = draft_logits(draft, target, rows, impl=options.impl)
    tokens = target_ids(draft, pk.argmax_rows(logits, vocab=num_choices(draft, target)))
    scratch = scratch.replace(logits=logits)
    return (
        Proposal(tokens.reshape(fixed.batch, fixed.num_drafts), num_rows - 1),
        buffers,
        scratch,
    )
