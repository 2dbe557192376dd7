"""`AttnMetadata`: where the rows of one step sit, computed on the device each step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.fixed import AttnMetadataSpec


class AttnMetadata(struct.PyTreeNode):
    """Rows are flattened sequence-major: row n belongs to sequence n // R.

    `slot_mapping` is page * page_size + offset of the row's K/V, -1 where nothing may be written.
    `seq_lens` counts committed tokens, whose K/V the pools hold.
    """

    positions: jax.Array  # i32[N] absolute
    slot_mapping: jax.Array  # i32[N]
    seq_lens: jax.Array  # i32[B]
    block_table: jax.Array  # i32[B, P] page ids, -1 past the end


def init_metadata(spec: AttnMetadataSpec) -> AttnMetadata:
    """Metadata that addresses nothing."""
    return AttnMetadata(
        positions=jnp.zeros((spec.rows,), jnp.int32),
        slot_mapping=jnp.full((spec.rows,), -1, jnp.int32),
        seq_lens=jnp.zeros((spec.sequences,), jnp.int32),
        block_table=jnp.full((spec.sequences, spec.pages), -1, jnp.int32),
    )


def slots_at(block_table: jax.Array, positions: jax.Array, page_size: int) -> jax.Array:
    """Slots i32[B, R] of absolute positions[B, R]; -1 where the table has no page.

    Positions below zero or past the table have no page either.
    """
    pages = block_table.shape[1]
    index = positions // page_size
    page = jnp.take_along_axis(block_table, jnp.clip(index, 0, pages - 1), axis=1)
    has_page = (page >= 0) & (positions >= 0) & (index < pages)
    return jnp.where(has_page, page * page_size + positions % page_size, -1)


def rows_metadata(
    start: jax.Array, num_rows: jax.Array, block_table: jax.Array, rows: int, page_size: int
) -> AttnMetadata:
    """Metadata of `rows` rows a sequence from `start`, of which the first `num_rows` are real.

    Args:
      start: i32[B] absolute position of row 0, the committed length.
      num_rows: i32[B] rows that exist; the others write nothing and nobody reads them.
      block_table: i32[B, P].
      rows: R, static.
    """
    offset = jnp.arange(rows, dtype=jnp.int32)[None]
    positions = start[:, None] + offset
    is_real = offset < num_rows[:, None]
    slots = jnp.where(is_real, slots_at(block_table, positions, page_size), -1)
    return AttnMetadata(
        positions=positions.reshape(-1),
        slot_mapping=slots.reshape(-1),
        seq_lens=start,
        block_table=block_table,
    )


def indirect_args(start: jax.Array, num_rows: jax.Array) -> jax.Array:
    """u32[B, 3] (kv_len, q_offset, q_rope_pos) that the attention op reads at entry."""
    return jnp.stack([start + num_rows, start, start], axis=1).astype(jnp.uint32)
