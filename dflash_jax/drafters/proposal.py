"""`Proposal`: what every drafter returns."""

from typing import NamedTuple

import jax


class Proposal(NamedTuple):
    """Drafts of one step. Entries from `num_proposed` on are never looked at."""

    tokens: jax.Array  # i32[B, num_drafts]
    num_proposed: jax.Array  # i32[B]; may be -1 for a sequence that takes no step
