"""What an MTP head carries: keys and values of its own layer, and the row its first draft needs.

Its pools share the block table and the slots of the target's: entry t of a sequence belongs to the
row of token t, which has read token t + 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.fixed import DraftFixed


class DraftBuffers(struct.PyTreeNode):
    """Live twins of what `DraftFixed` describes."""

    embed: jax.Array  # [B, E] embeddings of the tokens that entered the last draft step
    hidden: jax.Array  # [B, E] the target's row of each sequence's last committed token
    k_pool: jax.Array  # [pages, K, page_size, D]
    v_pool: jax.Array


def init_draft_buffers(fixed: DraftFixed) -> DraftBuffers:
    """Buffers of zeros."""

    def zeros(spec) -> jax.Array:
        return jnp.zeros(spec.shape, spec.dtype)

    return DraftBuffers(
        embed=zeros(fixed.embed),
        hidden=zeros(fixed.embed),
        k_pool=zeros(fixed.k_pool),
        v_pool=zeros(fixed.v_pool),
    )
