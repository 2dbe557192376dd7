"""`DflashScratch`: the drafter's 27 working arrays, each under the name the field knows it by.

Donated and carried: a stage fills its fields and hands the struct on, with equal shapes. Every
layer overwrites them, so that after a step they hold the last layer. None means that the drafter
has no such head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from dflash_jax.config import DraftConfig
from dflash_jax.fixed import ArraySpec, Fixed
from dflash_jax.mtp_config import DrafterConfig, MtpConfig, head_of
from dflash_jax.params import MaybeArray

SELECTOR_CANDIDATES = 16  # width of sel_*; a smaller selector_top_k masks the rest


class DflashScratch(struct.PyTreeNode):
    """Working arrays of one propose: N block rows, J = B*num_drafts draft rows, W context rows.

    Where the anchor's row drafts, a block has one row less than a verification, and so has N;
    `draft_tokens_*` keep a verification's.

    Integers are i32 (the seeds' slots are i64; x64 stays off), arguments and the event u32.
    """

    # block stream
    stream_buf: MaybeArray  # [N, E] residual stream
    norm_buf: MaybeArray  # [N, E] final-norm rows
    q_buf: MaybeArray  # [N, H*D] queries, normed and rotated
    k_buf: MaybeArray  # [N, K*D] block keys, normed and rotated
    v_buf: MaybeArray  # [N, K*D] block values
    attn_out: MaybeArray  # [N, H*D] attention before o_proj
    mlp_intermediate: MaybeArray  # [N, F] silu(gate) * up
    mlp_up: MaybeArray  # [N, F] up
    stream_acc: MaybeArray  # [N, E] what the feed-forward adds to the stream
    # context
    fc_proj: MaybeArray  # [W, E] context rows after fc and hidden_norm
    fused_kv_out: MaybeArray  # [W, L*2*K*D] their keys and values, before norm and rope
    slot_mapping_dev: MaybeArray  # i32[W] slots the context rows were written to
    precompute_in: MaybeArray  # [W, M*E] target features of the rows
    # positions
    option_b_indirect_args_dev: jax.Array  # u32[B, 3] kv_len, q_offset, q_rope_pos
    position_ids: jax.Array  # i32[N] absolute positions of the block rows
    # tokens out
    # A donated carry cannot live in host memory (XLA would alias it with a device buffer of its
    # shape), so this is the dispatch's last block, in device memory, for copy_to_host_async.
    draft_tokens_host_pinned: jax.Array  # i32[N]
    draft_tokens_event: jax.Array  # u32[] steps proposed so far: wait for it, then read
    draft_tokens_dev: jax.Array  # i32[N] anchor and drafts
    logits: MaybeArray  # f32[J, V] drafter logits, transformed; the anchor's row has none
    # DSpark
    markov_embed: MaybeArray  # [B, rank] latent of the last predecessor
    markov_bias: MaybeArray  # f32[B, V] its bias
    conf_out: MaybeArray  # f32[B, num_drafts] confidence logits
    # DFlash2
    conv_dyn: MaybeArray  # [N, 2*taps*groups] dynamic kernels: side, tap, group
    conv_tmp: MaybeArray  # [N, E] output of the last convolution
    sel_vals: MaybeArray  # f32[J, 16] candidate logits, descending
    sel_idx: MaybeArray  # i32[J, 16] their token ids
    sel_hproj: MaybeArray  # f32[J, rank] projected hidden rows


def scratch_specs(draft: DrafterConfig, fixed: Fixed) -> dict[str, ArraySpec | None]:
    """Shape and dtype of each scratch field for a drafter; None where it has no such head."""
    rows = fixed.num_rows
    specs: dict[str, ArraySpec | None] = dict.fromkeys(DflashScratch.__dataclass_fields__)
    specs.update(
        option_b_indirect_args_dev=ArraySpec((fixed.batch, 3), "uint32"),
        position_ids=ArraySpec((rows,), "int32"),
        draft_tokens_host_pinned=ArraySpec((rows,), "int32"),
        draft_tokens_event=ArraySpec((), "uint32"),
        draft_tokens_dev=ArraySpec((rows,), "int32"),
    )
    layers, head = draft.backbone, head_of(draft)
    if head is not None:
        return specs | _head_specs(head, fixed)
    return specs if layers is None else specs | _layer_specs(layers, fixed)


def _head_specs(draft: MtpConfig, fixed: Fixed) -> dict[str, ArraySpec | None]:
    """Fields that an MTP head fills, whose rows are drafts."""
    rows = fixed.batch * fixed.num_drafts
    return {
        "norm_buf": ArraySpec((rows, draft.layer.width), fixed.hidden.dtype),
        "position_ids": ArraySpec((rows,), "int32"),
        "logits": ArraySpec((rows, draft.layer.vocab), "float32"),
    }


def _layer_specs(draft: DraftConfig, fixed: Fixed) -> dict[str, ArraySpec | None]:
    """Fields that a drafter with layers fills."""
    rows, width = fixed.batch * max(draft.rows_for(fixed.num_drafts), 1), fixed.max_rows
    dtype = fixed.hidden.dtype
    q, kv = draft.num_heads * draft.head_dim, draft.num_kv_heads * draft.head_dim
    drafts = fixed.batch * fixed.num_drafts
    taps = len(draft.target_layer_ids)
    block = {
        "stream_buf": draft.width,
        "norm_buf": draft.width,
        "q_buf": q,
        "k_buf": kv,
        "v_buf": kv,
        "attn_out": q,
        "mlp_intermediate": draft.ffn,
        "mlp_up": draft.ffn,
        "stream_acc": draft.width,
    }
    specs: dict[str, ArraySpec | None] = {
        name: ArraySpec((rows, size), dtype) for name, size in block.items()
    }
    specs.update(
        fc_proj=ArraySpec((width, draft.width), dtype),
        fused_kv_out=ArraySpec((width, draft.num_layers * 2 * kv), dtype),
        slot_mapping_dev=ArraySpec((width,), "int32"),
        precompute_in=ArraySpec((width, taps * draft.width), dtype),
        logits=ArraySpec((drafts, min(draft.num_draft_ids, fixed.logits.shape[1])), "float32"),
        position_ids=ArraySpec((rows,), "int32"),
    )
    if draft.markov_rank:
        specs.update(
            markov_embed=ArraySpec((fixed.batch, draft.markov_rank), dtype),
            markov_bias=ArraySpec((fixed.batch, draft.num_draft_ids), "float32"),
        )
    if draft.has_confidence:
        specs.update(conf_out=ArraySpec((fixed.batch, fixed.num_drafts), "float32"))
    if draft.kind == "dflash2":
        kernels = 2 * draft.conv_taps * draft.num_conv_groups
        specs.update(
            conv_dyn=ArraySpec((rows, kernels), dtype),
            conv_tmp=ArraySpec((rows, draft.width), dtype),
            sel_vals=ArraySpec((drafts, SELECTOR_CANDIDATES), "float32"),
            sel_idx=ArraySpec((drafts, SELECTOR_CANDIDATES), "int32"),
            sel_hproj=ArraySpec((drafts, draft.selector_rank), "float32"),
        )
    return specs


def init_scratch(draft: DrafterConfig, *, fixed: Fixed) -> DflashScratch:
    """Scratch of zeros for a drafter's config."""
    specs = scratch_specs(draft, fixed)
    arrays: dict[str, MaybeArray] = {
        name: None if spec is None else jnp.zeros(spec.shape, spec.dtype)
        for name, spec in specs.items()
    }
    return DflashScratch(**arrays)
