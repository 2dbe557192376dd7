"""What drafters return and what they are fed."""

from typing import NamedTuple

import jax


class SparseQ(NamedTuple):
    """A distribution over a few candidates a draft; an id that is there twice counts twice."""

    ids: jax.Array  # i32[B, num_drafts, C]
    probs: jax.Array  # f32[B, num_drafts, C], 0 behind the candidates that there are


class Proposal(NamedTuple):
    """Drafts of one step. Entries from `num_proposed` on are never looked at.

    `q` is what each draft was drawn from, exactly: over the vocabulary f32[B, num_drafts, V], over
    candidates, or None where drafts were not drawn, so that each is a point mass.
    `is_finite` says whether all numbers behind the drafts were; where they were not, drafts from
    there on are not proposed. None: this drafter does not look.
    """

    tokens: jax.Array  # i32[B, num_drafts]
    num_proposed: jax.Array  # i32[B]; may be -1 for a sequence that takes no step
    q: jax.Array | SparseQ | None = None
    is_finite: jax.Array | None = None  # bool[B]


class CommittedRows(NamedTuple):
    """Rows of the target that became part of the text: of a prefill chunk or of a verification.

    A row whose slot is -1 was not committed; nothing may be kept of it.
    """

    tokens: jax.Array  # i32[T] what stood in the row
    next_tokens: jax.Array  # i32[T] what follows it in the text
    features: jax.Array  # [T, M*E] tapped layer outputs
    hidden: jax.Array  # [T, E] after the target's final norm
    positions: jax.Array  # i32[T] absolute
    slots: jax.Array  # i32[T], -1 = not committed
    sequences: jax.Array  # i32[T] index in the batch
