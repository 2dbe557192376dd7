"""`Fixed`: everything about a decode that never changes shape, and `plan`, which chooses it.

In the engine these names come from, each was an address that captured graphs bake in; here each is
a shape that a compiled step bakes in. Equal `Fixed` means the same executable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dflash_jax.config import TargetConfig
from dflash_jax.mtp_config import DrafterConfig, MtpConfig, head_of
from dflash_jax.pairs import check_pair
from dflash_jax.shapes import check_integers


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype name of an array that some carrier holds."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        itemsize = 2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize
        return math.prod(self.shape) * itemsize


@dataclass(frozen=True, slots=True)
class AttnMetadataSpec:
    """Sizes of the attention metadata of one step form."""

    rows: int  # N, all sequences together
    sequences: int  # B
    pages: int  # P, pages a sequence


@dataclass(frozen=True, slots=True)
class GdnLayerSpec:
    """Arrays of one Gated-DeltaNet layer; what each holds is at `gdn_state.GdnLayerState`."""

    state: ArraySpec
    conv: ArraySpec
    past_kv: ArraySpec
    past_g: ArraySpec
    past_beta: ArraySpec


@dataclass(frozen=True, slots=True)
class StateTableSpec(ArraySpec):
    """A table of slots i32[B], and what it points at: arrays of `num_slots` rows a layer.

    In the engine this name comes from, the table was one of addresses; what stood at them is as
    fixed as the table, so it is described here.
    """

    num_slots: int
    layers: tuple[GdnLayerSpec, ...]


@dataclass(frozen=True, slots=True)
class DraftFixed:
    """Arrays of a bound multi-token-prediction head, which keeps its own cache."""

    embed: ArraySpec
    meta: AttnMetadataSpec
    k_pool: ArraySpec
    v_pool: ArraySpec
    block_size: int
    cache_stride: int
    vocab: int
    rows: int


@dataclass(frozen=True, slots=True)
class Fixed:
    """The 16 static names; `Buffers` holds a live twin of each that is an array."""

    hidden: ArraySpec  # [W, E] final-norm rows of a step; W is the longest prefill chunk or N
    residual: ArraySpec  # [W, E] residual stream before the final norm
    logits: ArraySpec  # f32[N, V] of the verify rows
    tokens: ArraySpec  # i32[W] ids that entered the step
    meta: AttnMetadataSpec  # one sequence, one row
    batch_meta: AttnMetadataSpec  # every sequence, one row each
    verify_meta: AttnMetadataSpec  # one sequence, anchor and drafts
    verify_batch_meta: AttnMetadataSpec  # every sequence, anchor and drafts
    draft: DraftFixed | None  # None: no multi-token-prediction head is bound
    verify_wy_tables: StateTableSpec | None  # i32[B] GDN state slot a sequence; None: no GDN layer
    verify_batch_tokens: ArraySpec  # i32[N] argmax of each verify row
    ffn_act_q8: ArraySpec | None  # None: no quantised feed-forward exists yet
    k_pools: tuple[ArraySpec, ...]  # one an attention layer: the target's, then the drafter's
    v_pools: tuple[ArraySpec, ...]
    block_size: int  # tokens a page (the seeds' name; read it as `page_size`)
    cache_stride: int  # elements between consecutive pages of the target's pools

    @property
    def page_size(self) -> int:
        return self.block_size

    @property
    def batch(self) -> int:
        return self.verify_batch_meta.sequences

    @property
    def verify_rows(self) -> int:
        """Rows a sequence in one step: the anchor and the drafts."""
        return self.verify_batch_meta.rows // self.batch

    @property
    def num_drafts(self) -> int:
        return self.verify_rows - 1

    @property
    def num_rows(self) -> int:
        """N, the flattened rows of a step."""
        return self.verify_batch_meta.rows

    @property
    def max_rows(self) -> int:
        """W, rows of the widest call: the longest prefill chunk, or a step."""
        return self.hidden.shape[0]

    @property
    def num_pages(self) -> int:
        return self.k_pools[0].shape[0]

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that the block table can address."""
        return self.verify_batch_meta.pages * self.page_size

    @property
    def step_meta(self) -> AttnMetadataSpec:
        """The form a decode step takes: by batch (one, many) and by rows (plain, verify)."""
        if self.verify_rows == 1:
            return self.meta if self.batch == 1 else self.batch_meta
        return self.verify_meta if self.batch == 1 else self.verify_batch_meta


def pool_shape(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """The one place that orders a pool's axes: [pages, K, page_size, D]."""
    return (num_pages, num_kv_heads, page_size, head_dim)


def plan(
    target: TargetConfig,
    draft: DrafterConfig,
    *,
    batch: int = 1,
    max_context: int,
    num_drafts: int | None = None,
    page_size: int = 64,
    prefill_chunk: int = 512,
    num_pages: int | None = None,
    dtype: str = "bfloat16",
) -> Fixed:
    """Choose every static size of a decode.

    Args:
      target: config of the target.
      draft: config of the drafter; its `max_drafts` is the default for `num_drafts`.
      batch: sequences decoded together.
      max_context: prompt and new tokens of the longest sequence.
      num_drafts: drafts a step; a trained block may be shortened, never lengthened.
      page_size: tokens a KV page, a power of two from 4.
      prefill_chunk: most prompt tokens a prefill call takes, a power of two.
      num_pages: pages of each pool; by default every sequence can fill its block table.
      dtype: of pools and activations, that of the weights.

    Raises:
      ValueError: a size outside what is stated above, or a pair that cannot work together.
    """
    num_drafts = draft.max_drafts if num_drafts is None else num_drafts
    _check_sizes(target, draft, batch, max_context, num_drafts, page_size, prefill_chunk, num_pages)
    # NumPy's integers pass the checks, but JSON does not take them.
    batch, max_context, num_drafts = int(batch), int(max_context), int(num_drafts)
    page_size, prefill_chunk = int(page_size), int(prefill_chunk)
    layers, head = draft.backbone, head_of(draft)
    own = layers if head is None else head
    if own is not None:
        check_pair(target, own)
    rows, pages = num_drafts + 1, -(-max_context // page_size)
    num_rows = batch * rows
    num_pages = batch * pages if num_pages is None else int(num_pages)
    width = max(prefill_chunk, num_rows)
    pool = ArraySpec(pool_shape(num_pages, page_size, target.num_kv_heads, target.head_dim), dtype)
    pools = (pool,) * target.num_attention_layers
    if layers is not None:
        shape = pool_shape(num_pages, page_size, layers.num_kv_heads, layers.head_dim)
        pools += (ArraySpec(shape, dtype),) * layers.num_layers
    return Fixed(
        hidden=ArraySpec((width, target.width), dtype),
        residual=ArraySpec((width, target.width), dtype),
        logits=ArraySpec((num_rows, target.vocab), "float32"),
        tokens=ArraySpec((width,), "int32"),
        meta=AttnMetadataSpec(1, 1, pages),
        batch_meta=AttnMetadataSpec(batch, batch, pages),
        verify_meta=AttnMetadataSpec(rows, 1, pages),
        verify_batch_meta=AttnMetadataSpec(num_rows, batch, pages),
        draft=None if head is None else _head_specs(head, pool, batch, pages),
        verify_wy_tables=_state_table(target, batch, rows, dtype),
        verify_batch_tokens=ArraySpec((num_rows,), "int32"),
        ffn_act_q8=None,
        k_pools=pools,
        v_pools=pools,
        block_size=page_size,
        cache_stride=math.prod(pool.shape[1:]),
    )


def _state_table(
    target: TargetConfig, num_slots: int, rows: int, dtype: str
) -> StateTableSpec | None:
    """States of a hybrid target's Gated-DeltaNet layers, a slot a sequence."""
    gdn = target.gdn
    if gdn is None:
        return None

    def of_rows(*shape: int, dtype: str = dtype) -> ArraySpec:
        return ArraySpec((num_slots, *shape), dtype)

    heads = gdn.num_value_heads
    layer = GdnLayerSpec(
        state=of_rows(heads, gdn.key_dim, gdn.value_dim, dtype="float32"),
        conv=of_rows(gdn.conv_taps - 1 + rows, gdn.conv_width),
        past_kv=of_rows(rows, gdn.conv_width - gdn.key_width),
        past_g=of_rows(rows, heads, dtype="float32"),
        past_beta=of_rows(rows, heads, dtype="float32"),
    )
    layers = (layer,) * len(target.gdn_layers)
    return StateTableSpec((num_slots,), "int32", num_slots, layers)


def _head_specs(head: MtpConfig, pool: ArraySpec, batch: int, pages: int) -> DraftFixed:
    """What an MTP head carries; its pool has the pages of the target's `pool`."""
    c, dtype = head.layer, pool.dtype
    num_pages, _, page_size, _ = pool.shape
    own = ArraySpec(pool_shape(num_pages, page_size, c.num_kv_heads, c.head_dim), dtype)
    return DraftFixed(
        embed=ArraySpec((batch, c.width), dtype),
        meta=AttnMetadataSpec(batch, batch, pages),
        k_pool=own,
        v_pool=own,
        block_size=page_size,
        cache_stride=math.prod(own.shape[1:]),
        vocab=c.vocab,
        rows=batch,
    )


def _check_sizes(
    target: TargetConfig,
    draft: DrafterConfig,
    batch: int,
    max_context: int,
    num_drafts: int,
    page_size: int,
    prefill_chunk: int,
    num_pages: int | None,
) -> None:
    check_integers(
        "plan",
        batch=batch,
        max_context=max_context,
        num_drafts=num_drafts,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        num_pages=num_pages,
    )
    if batch < 1:
        raise ValueError(f"plan: batch is {batch}, wanted at least 1")
    if page_size < 4 or page_size & (page_size - 1):
        raise ValueError(f"plan: page_size is {page_size}, wanted a power of two from 4")
    if prefill_chunk < 1 or prefill_chunk & (prefill_chunk - 1):
        raise ValueError(f"plan: prefill_chunk is {prefill_chunk}, wanted a power of two")
    if not 0 <= num_drafts <= draft.max_drafts:
        raise ValueError(
            f"plan: num_drafts is {num_drafts}, the {draft.kind} drafter offers 0 to "
            f"{draft.max_drafts}"
        )
    if max_context < 2:
        raise ValueError(f"plan: max_context is {max_context}, wanted at least 2")
    if max_context > target.max_context:
        raise ValueError(
            f"plan: max_context is {max_context}, the target was built for {target.max_context}"
        )
    if num_pages is not None and num_pages < 1:
        raise ValueError(f"plan: num_pages is {num_pages}, wanted at least 1")
