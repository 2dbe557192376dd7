"""DFlash2: sixteen candidates a row, and a walk that scores each against its predecessor.

The dynamic convolutions live in `backbone.layer`; this module is the selector
(spec/drafters.md §4.2).
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax.drafters import backbone
from dflash_jax.drafters.choice import Draws, choose_candidate, draws_of
from dflash_jax.drafters.proposal import Proposal, SparseQ
from dflash_jax.drafters.vocabulary import draft_logits, num_choices, target_ids
from dflash_jax.fixed import Fixed
from dflash_jax.layers import embed
from dflash_jax.options import DecodeOptions
from dflash_jax.params import DraftParams, Params, SelectorParams
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

    lattice = Lattice(*map(per_sequence, (vals, ids, projected)))
    scratch = scratch.replace(logits=logits, sel_vals=vals, sel_idx=ids, sel_hproj=projected)
    draws = draws_of(state, fixed=fixed, options=options)
    if draws is not None:
        path, probs = sampled_walk(state.anchor, lattice, selector, draws)
        return Proposal(path, num_rows - 1, SparseQ(lattice.ids, probs)), buffers, scratch
    path, _ = pk.selector_walk(
        state.anchor,
        *lattice,
        selector.predecessor,
        selector.successor,
        k=config.selector_top_k,
        impl=options.impl,
    )
    return Proposal(path, num_rows - 1), buffers, scratch


class Lattice(NamedTuple):
    """What the selector walks over; from `selector_top_k` on candidates are masked."""

    values: jax.Array  # f32[B, J, C] candidate logits
    ids: jax.Array  # i32[B, J, C]
    projected: jax.Array  # f32[B, J, rank] hidden rows


def sampled_walk(
    anchor: jax.Array, lattice: Lattice, selector: SelectorParams, draws: Draws
) -> tuple[jax.Array, jax.Array]:
    """Walk by drawing each row's token from softmax(scores / T) over its candidates.

    Returns:
      path i32[B, J], and f32[B, J, C] the probabilities that each was drawn by.
    """
    previous, path, probs = anchor, [], []
    for j in range(lattice.ids.shape[1]):
        ids = lattice.ids[:, j]
        left = embed(previous, selector.predecessor).astype(jnp.float32) * lattice.projected[:, j]
        right = embed(ids, selector.successor).astype(jnp.float32)  # [B, C, rank]
        scores = lattice.values[:, j] + jnp.sum(left[:, None] * right, axis=2)
        # Masked values are so low that no edge lifts them.
        previous, q = choose_candidate(scores, ids, draws.row(j))
        path.append(previous)
        probs.append(q)
    return jnp.stack(path, axis=1), jnp.stack(probs, axis=1)
