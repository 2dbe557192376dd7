"""DFlash2: sixteen candidates a row, and a walk that scores each against its predecessor.

The dynamic convolutions live in `backbone.layer`; this module is the selector
(spec/drafters.md §4.2).
"""

from typing import cast

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax.drafters import backbone
from dflash_jax.drafters.choice import draws_of
from dflash_jax.drafters.proposal import Proposal, SparseQ
from dflash_jax.drafters.vocabulary import draft_logits, num_choices, target_ids
from dflash_jax.fixed import Fixed
from dflash_jax.options import DecodeOptions
from dflash_jax.params import DraftParams, Params, SelectorParams
from dflash_jax.sampling import GREEDY_BELOW
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
    """Guess a block and walk its candidates; fills `logits` and `sel_*`."""
    draft, target = cast(DraftParams, params.draft), params.target
    selector, config = cast(SelectorParams, draft.selector), draft.config
    buffers, scratch = backbone.forward(
        draft, target, state, num_rows, buffers, scratch, fixed=fixed, impl=options.impl
    )
    rows = backbone.draft_rows(scratch, config, fixed)
    logits = draft_logits(draft, target, rows, impl=options.impl)
    vals, ids = pk.top16(
        logits, k=config.selector_top_k, vocab=num_choices(draft, target), impl=options.impl
    )
    ids = target_ids(draft, ids)
    projected = pk.skinny_matmul(
        rows.reshape(-1, rows.shape[-1]),
        selector.hidden_projection,
        out_dtype=jnp.float32,
        impl=options.impl,
    )  # [J, rank]

    def per_sequence(x: jax.Array) -> jax.Array:
        return x.reshape(fixed.batch, fixed.num_drafts, -1)

    vals_bj, ids_bj = per_sequence(vals), per_sequence(ids)
    scratch = scratch.replace(logits=logits, sel_vals=vals, sel_idx=ids, sel_hproj=projected)
    walked = (state.anchor, vals_bj, ids_bj, per_sequence(projected))
    books, k = (selector.predecessor, selector.successor), config.selector_top_k
    draws = draws_of(state, fixed=fixed, options=options)
    if draws is None:
        path, _ = pk.selector_walk(*walked, *books, k=k, impl=options.impl)
        return Proposal(path, num_rows - 1), buffers, scratch
    temperature = draws.temperature[:, 0]  # of a sequence
    temperature = jnp.where(temperature < GREEDY_BELOW, 0.0, temperature)
    path, _, q = pk.selector_walk_sampled(
        *walked, *books, temperature, draws.uniforms, k=k, impl=options.impl
    )
    return Proposal(path, num_rows - 1, SparseQ(ids_bj, q)), buffers, scratch
