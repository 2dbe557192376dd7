"""What a decode carries: `DecodeState` (what sequences mean) and `Buffers` (of fixed shape)."""

from __future__ import annotations

import enum
import math

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.draft_state import DraftBuffers, init_draft_buffers
from dflash_jax.fixed import ArraySpec, Fixed
from dflash_jax.gdn_state import GdnState, init_gdn_state
from dflash_jax.metadata import AttnMetadata, init_metadata
from dflash_jax.sampling import SamplingMode, SamplingState, sampling_state

MAX_STOP_IDS = 16


class Status(enum.IntEnum):
    """Why a sequence is where it is; written on the device, read by `engine`."""

    EMPTY = 0  # no prompt yet
    ACTIVE = 1
    STOP = 2  # a stop token was committed
    LENGTH = 3  # the token budget is used up
    CONTEXT = 4  # no page is left for the next token
    NON_FINITE = 5  # the target's logits were not finite


class DecodeState(struct.PyTreeNode):
    """Sequences: their tokens, how many are committed, and what still may be emitted.

    `tokens[b, :seq_lens[b] + 1]` is the sequence, its last entry the anchor.
    """

    tokens: jax.Array  # i32[B, S + 1]
    seq_lens: jax.Array  # i32[B] committed tokens, whose K/V is in the pools
    anchor: jax.Array  # i32[B] last token, not yet through the target
    remaining: jax.Array  # i32[B] tokens that may still be emitted
    max_lens: jax.Array  # i32[B] tokens its pages hold
    keep: jax.Array  # i32[B] drafts that may be kept a step; 0 is plain decoding
    stop_ids: jax.Array  # i32[B, 16], -1 padded
    status: jax.Array  # i32[B], a Status
    num_steps: jax.Array  # i32[] cycles run
    sampling: SamplingState | None = None  # None: every token is the best one
    draft_faults: jax.Array | None = None  # bool[B] a drafter's numbers were not finite some time

    @property
    def is_active(self) -> jax.Array:
        """bool[B]"""
        return self.status == Status.ACTIVE


class Buffers(struct.PyTreeNode):
    """Live twins of what `Fixed` describes."""

    hidden: jax.Array  # [W, E]
    residual: jax.Array  # [W, E]
    logits: jax.Array  # f32[N, V]
    tokens: jax.Array  # i32[W]
    meta: (
        AttnMetadata  # of the last step, in the form `Fixed.step_meta`; its block_table is the one
    )
    verify_wy_tables: jax.Array | None  # i32[B]; None: no GDN layer
    verify_batch_tokens: jax.Array  # i32[N]
    ffn_act_q8: jax.Array | None  # None: no quantised feed-forward
    k_pools: tuple[jax.Array, ...]  # [pages, K, page_size, D] each
    v_pools: tuple[jax.Array, ...]
    draft: DraftBuffers | None = None  # None: no multi-token-prediction head
    gdn: GdnState | None = None  # at the slots of verify_wy_tables; None: no GDN layer


def init_state(fixed: Fixed, sampling: SamplingMode | None = None) -> DecodeState:
    """A batch of empty sequences, each of which takes the best tokens until it is told otherwise.

    `sampling` as in the `DecodeOptions` of the calls that the state is for.
    """
    per_sequence = jnp.zeros((fixed.batch,), jnp.int32)
    return DecodeState(
        tokens=jnp.zeros((fixed.batch, fixed.capacity + 1), jnp.int32),
        seq_lens=per_sequence,
        anchor=jnp.zeros_like(per_sequence),
        remaining=jnp.zeros_like(per_sequence),
        max_lens=jnp.zeros_like(per_sequence),
        keep=jnp.full_like(per_sequence, fixed.num_drafts, jnp.int32),
        stop_ids=jnp.full((fixed.batch, MAX_STOP_IDS), -1, jnp.int32),
        status=jnp.full_like(per_sequence, int(Status.EMPTY)),  # an enum would be weakly typed
        num_steps=jnp.zeros((), jnp.int32),
        sampling=None
        if sampling is None
        else sampling_state(sampling, batch=fixed.batch, vocab=fixed.logits.shape[1]),
        draft_faults=jnp.zeros((fixed.batch,), bool),
    )


def init_buffers(fixed: Fixed) -> Buffers:
    """Buffers of zeros with an empty block table.

    Raises:
      ValueError: target pools whose pages are not `cache_stride` elements apart.
    """
    pool = fixed.k_pools[0].shape
    if math.prod(pool[1:]) != fixed.cache_stride:
        raise ValueError(
            f"init_buffers: cache_stride is {fixed.cache_stride}, wanted {math.prod(pool[1:])} "
            f"elements a page of k_pools {list(pool)}"
        )

    def zeros(spec: ArraySpec) -> jax.Array:
        return jnp.zeros(spec.shape, spec.dtype)

    def optional(spec: ArraySpec | None) -> jax.Array | None:
        return None if spec is None else zeros(spec)

    return Buffers(
        hidden=zeros(fixed.hidden),
        residual=zeros(fixed.residual),
        logits=zeros(fixed.logits),
        tokens=zeros(fixed.tokens),
        meta=init_metadata(fixed.step_meta),
        verify_wy_tables=_own_slots(fixed),
        verify_batch_tokens=zeros(fixed.verify_batch_tokens),
        ffn_act_q8=optional(fixed.ffn_act_q8),
        k_pools=tuple(map(zeros, fixed.k_pools)),
        v_pools=tuple(map(zeros, fixed.v_pools)),
        draft=None if fixed.draft is None else init_draft_buffers(fixed.draft),
        gdn=init_gdn_state(fixed.verify_wy_tables),
    )


def _own_slots(fixed: Fixed) -> jax.Array | None:
    """i32[B]: each sequence at the slot of its own number."""
    spec = fixed.verify_wy_tables
    return None if spec is None else jnp.arange(spec.shape[0], dtype=spec.dtype)
