"""DFlash: every draft row by itself, its best token or one drawn (spec/drafters.md §3.4)."""

from typing import cast

import jax

import pallas_kernels as pk
from dflash_jax.distribution import distribution, draw
from dflash_jax.drafters import backbone
from dflash_jax.drafters.choice import Draws, draws_of
from dflash_jax.drafters.proposal import Proposal
from dflash_jax.drafters.vocabulary import draft_logits, num_choices, over_target, target_ids
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
    draws = draws_of(state, fixed=fixed, options=options)
    vocab = num_choices(draft, target)
    tokens, q = _choose(draft, logits, state, draws, vocab=vocab, impl=options.impl)
    scratch = scratch.replace(logits=logits)
    return Proposal(tokens, num_rows - 1, q), buffers, scratch


def _choose(
    draft: DraftParams,
    logits: jax.Array,
    state: DecodeState,
    draws: Draws | None,
    *,
    vocab: int,
    impl: str,
) -> tuple[jax.Array, jax.Array | None]:
    """Each row's best token i32[B, J], or one drawn, and then q f32[B, J, V] it was drawn from.

    The request's filters shape q as they shape the target's distribution (spec/drafters.md §3.4).
    """
    batch = state.seq_lens.shape[0]
    if draws is None:
        ids = target_ids(draft, pk.argmax_rows(logits, vocab=vocab, impl=impl))
        return ids.reshape(batch, -1), None
    assert state.sampling is not None  # where there are draws
    q = distribution(logits, state.sampling.rows(draws.uniforms.shape[1]), vocab=vocab)
    ids = target_ids(draft, draw(q, draws.flat().uniforms)).reshape(batch, -1)
    return ids, over_target(draft, q).reshape(*ids.shape, -1)
