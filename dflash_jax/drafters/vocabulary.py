"""A drafter's way in and out of token ids: embedding, head and id map, its own or the target's.

A head that knows a part of the vocabulary numbers its ids by itself: whatever is chosen from its
logits becomes a target id at once, by `d2t` (spec/drafters.md §2, §3).
"""

import jax
import jax.numpy as jnp

from dflash_jax.layers import embed, logits_of
from dflash_jax.params import DraftParams, TargetParams
from pallas_kernels import MASK_VALUE


def embed_block(draft: DraftParams, target: TargetParams, ids: jax.Array) -> jax.Array:
    """Rows [N, E] of i32[N] target ids, the mask's replaced where the drafter has its own."""
    config = draft.config
    rows = embed(ids, target.embed if draft.embed is None else draft.embed)
    if draft.mask_embed is not None:
        rows = jnp.where((ids == config.mask_id)[:, None], draft.mask_embed[None], rows)
    if config.input_embedding_scale == 1.0:
        return rows
    return rows * jnp.asarray(config.input_embedding_scale, rows.dtype)


def draft_logits(
    draft: DraftParams, target: TargetParams, rows: jax.Array, *, impl: str = "auto"
) -> jax.Array:
    """Transformed logits f32[J, Vd] of final-norm rows [..., E]: a multiplier, then a soft cap.

    A column that maps to padding of the target's vocabulary is masked here; without a map such
    columns come last, and `num_choices` leaves them out. Those beyond the target's are cut off.
    """
    config = draft.config
    head = target.lm_head if draft.head is None else draft.head
    logits = logits_of(rows.reshape(-1, rows.shape[-1]), head, impl=impl)
    logits = logits[:, : target.config.vocab]
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    if config.soft_cap is not None:
        logits = config.soft_cap * jnp.tanh(logits / config.soft_cap)
    if draft.d2t is not None and target.config.real_vocab < target.config.vocab:
        logits = jnp.where((draft.d2t < target.config.real_vocab)[None], logits, MASK_VALUE)
    return logits


def num_choices(draft: DraftParams, target: TargetParams) -> int:
    """Columns of the logits that may be chosen; those from there on are padding."""
    columns = (target.lm_head if draft.head is None else draft.head).shape[0]
    return columns if draft.d2t is not None else min(columns, target.config.real_vocab)


def over_target(draft: DraftParams, q: jax.Array) -> jax.Array:
    """A distribution f32[N, Vd] over columns of the logits, as f32[N, V] over target ids."""
    if draft.d2t is None:
        return q
    wide = jnp.zeros((q.shape[0], draft.config.vocab), q.dtype)
    return wide.at[:, draft.d2t].add(q, mode="drop")


def target_ids(draft: DraftParams, ids: jax.Array) -> jax.Array:
    """Target ids i32 of ids that were chosen from the drafter's logits."""
    return ids if draft.d2t is None else draft.d2t.at[ids].get(mode="clip")
