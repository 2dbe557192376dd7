"""DFlash: every draft row's argmax, independently (spec/drafters.md §3.4)."""

from typing import cast

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax.config import DraftConfig
from dflash_jax.drafters import backbone
from dflash_jax.drafters.proposal import Proposal
from dflash_jax.fixed import Fixed
from dflash_jax.layers import logits_of
from dflash_jax.options import DecodeOptions
from dflash_jax.params import DraftParams, Params
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState


def draft_rows(scratch: DflashScratch, fixed: Fixed) -> jax.Array:
    """Final-norm rows of the drafts [B, num_drafts, E]: every block row but the anchor's."""
    rows = scratch.norm_buf.reshape(fixed.batch, fixed.verify_rows, -1)
    return rows[:, 1:]


def draft_logits(
    rows: jax.Array, head: jax.Array, config: DraftConfig, *, impl: str = "auto"
) -> jax.Array:
    """Transformed drafter logits f32[J, V]: times output_multiplier, then soft-capped."""
    logits = logits_of(rows.reshape(-1, rows.shape[-1]), head, impl=impl)
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    if config.soft_cap is not None:
        logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
    return logits


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
    rows = draft_rows(scratch, fixed)
    logits = draft_logits(rows, target.lm_head, draft.config, impl=options.impl)
    tokens = pk.argmax_rows(logits, vocab=target.config.real_vocab)
    scratch = scratch.replace(logits=logits)
    return (
        Proposal(tokens.reshape(fixed.batch, fixed.num_drafts), num_rows - 1),
        buffers,
        scratch,
    )
