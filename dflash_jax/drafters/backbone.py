"""The block-diffusion backbone: one pass over a block that sees the context's keys.

Context keys and values depend on a committed token's target feature and position alone, so they
are written once, when the token is committed (`fuse_context`). Block rows write theirs behind
them for the length of one propose; the next context rows overwrite those (spec/drafters.md §3).
"""

from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax.config import DraftConfig, LayerAttention
from dflash_jax.drafters.proposal import CommittedRows
from dflash_jax.drafters.vocabulary import embed_block
from dflash_jax.fixed import Fixed
from dflash_jax.layers import linear, rms_norm, rope_angles
from dflash_jax.metadata import AttnMetadata, indirect_args, rows_metadata
from dflash_jax.paged_kv import write_and_attend
from dflash_jax.params import ConvParams, DraftParams, LayerParams, Params, TargetParams
from dflash_jax.scratch import DflashScratch
from dflash_jax.shapes import check_shape
from dflash_jax.state import Buffers, DecodeState


def draft_pools(buffers: Buffers, config: DraftConfig) -> tuple[tuple, tuple]:
    """The drafter's pools: the last `num_layers` of all."""
    first = len(buffers.k_pools) - config.num_layers
    return buffers.k_pools[first:], buffers.v_pools[first:]


def _with_draft_pools(
    buffers: Buffers, k_pools: Sequence[jax.Array], v_pools: Sequence[jax.Array]
) -> Buffers:
    first = len(buffers.k_pools) - len(k_pools)
    return buffers.replace(
        k_pools=buffers.k_pools[:first] + tuple(k_pools),
        v_pools=buffers.v_pools[:first] + tuple(v_pools),
    )


def _lead(field: jax.Array, rows: jax.Array) -> jax.Array:
    """`field` with its first rows replaced; a prefill bucket or a step may fill less than all.

    A full update goes the same way: jit would drop an input that nothing reads, and with it the
    donation that lets the output take its place.
    """
    return jax.lax.dynamic_update_slice_in_dim(field, rows.astype(field.dtype), 0, axis=0)


def fuse_context(
    params: Params,
    rows: CommittedRows,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    impl: str = "auto",
) -> tuple[Buffers, DflashScratch]:
    """Turn target features of committed tokens into every drafter layer's context K/V.

    Args:
      params: the pair.
      rows: T <= W committed rows, of which `features`, `positions` and `slots` are read.
      buffers, scratch: donated; fills `precompute_in`, `fc_proj`, `fused_kv_out`,
        `slot_mapping_dev` and the drafter's pools.
    """
    draft = cast(DraftParams, params.draft)
    config, features, slots = draft.config, rows.features, rows.slots
    width = len(config.target_layer_ids) * config.width
    check_shape("fuse_context: features", features, "T M*E", {"M*E": width})
    context = rms_norm(linear(features, draft.fc, impl=impl), draft.hidden_norm, config.rms_eps)
    fused = linear(context, draft.fused_kv, draft.fused_kv_bias, impl=impl)  # [T, L*2*K*D]
    angles = rope_angles(rows.positions, config.rope, config.head_dim, fixed.capacity)
    written = pk.norm_rope_cache(
        fused,
        *angles,
        *draft_pools(buffers, config),
        slots,
        num_heads=0,
        k_norms=[layer.k_norm for layer in draft.layers],
        eps=config.rms_eps,
        impl=impl,
    )
    scratch = scratch.replace(
        precompute_in=_lead(scratch.precompute_in, features),
        fc_proj=_lead(scratch.fc_proj, context),
        fused_kv_out=_lead(scratch.fused_kv_out, fused),
        slot_mapping_dev=_lead(scratch.slot_mapping_dev, slots),
    )
    return _with_draft_pools(buffers, written.k_pools, written.v_pools), scratch


def forward(
    params: DraftParams,
    target: TargetParams,
    state: DecodeState,
    num_rows: jax.Array,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    impl: str = "auto",
) -> tuple[Buffers, DflashScratch]:
    """Run the block [anchor, mask, ...] of every sequence; `scratch.norm_buf` holds its rows.

    Args:
      params: DraftParams.
      target: TargetParams, whose embedding the rows enter through unless the drafter has one.
      state: DecodeState; the block starts at `seq_lens`.
      num_rows: i32[B] rows to verify; block rows beyond those that their drafts need are masked as
        keys, which equals a shorter block.
      buffers, scratch: donated.
    """
    config = params.config
    rows, num_rows = config.rows_for(fixed.num_drafts), num_rows - 1 + config.first_draft_row
    num_rows = jnp.maximum(num_rows, 0)
    meta = rows_metadata(state.seq_lens, num_rows, buffers.meta.block_table, rows, fixed.page_size)
    args = indirect_args(state.seq_lens, num_rows)
    ids = jnp.full((fixed.batch, fixed.verify_rows), config.mask_id, jnp.int32)
    ids = ids.at[:, 0].set(state.anchor)
    x = embed_block(params, target, ids[:, :rows].reshape(-1))  # [N, E]
    angles = rope_angles(meta.positions, config.rope, config.head_dim, fixed.capacity)
    scratch = scratch.replace(
        stream_buf=x,
        draft_tokens_dev=ids.reshape(-1),
        position_ids=meta.positions,
        option_b_indirect_args_dev=args,
    )
    k_pools, v_pools = map(list, draft_pools(buffers, config))
    for i, params_i in enumerate(params.layers):
        k_pools[i], v_pools[i], scratch = layer(
            params_i,
            k_pools[i],
            v_pools[i],
            scratch,
            meta=meta,
            angles=angles,
            config=config,
            attention=config.attention[i],
            impl=impl,
        )
    hidden = rms_norm(scratch.stream_buf, params.norm, config.rms_eps)
    return _with_draft_pools(buffers, k_pools, v_pools), scratch.replace(norm_buf=hidden)


def draft_rows(scratch: DflashScratch, config: DraftConfig, fixed: Fixed) -> jax.Array:
    """Final-norm rows of the drafts [B, num_drafts, E]."""
    rows = scratch.norm_buf.reshape(fixed.batch, -1, config.width)
    return rows[:, config.first_draft_row :]


def layer(
    params: LayerParams,
    k_pool: jax.Array,
    v_pool: jax.Array,
    scratch: DflashScratch,
    *,
    meta: AttnMetadata,
    angles: tuple[jax.Array, jax.Array],
    config: DraftConfig,
    attention: LayerAttention,
    impl: str = "auto",
) -> tuple[jax.Array, jax.Array, DflashScratch]:
    """One drafter layer over the block rows in `scratch.stream_buf`.

    Fills every field of the block stream and, for DFlash2, `conv_dyn` and `conv_tmp`.
    """
    sequences = meta.block_table.shape[0]
    args = scratch.option_b_indirect_args_dev
    x = scratch.stream_buf
    normed, finish, _ = _prepare(
        params.attention_conv, x, params.input_norm, sequences, config, impl
    )
    qkv = linear(normed, params.qkv, params.qkv_bias, impl=impl)
    out, k_pool, v_pool, q, k, v = write_and_attend(
        qkv,
        (params.q_norm, params.k_norm),
        angles,
        k_pool,
        v_pool,
        meta,
        args,
        num_heads=config.num_heads,
        eps=config.rms_eps,
        attention=attention,
        keep_kv=True,  # for the scratch
        impl=impl,
    )
    _, x = finish(linear(out, params.o, params.o_bias, impl=impl), x)
    normed, finish, dynamic = _prepare(
        params.mlp_conv, x, params.post_norm, sequences, config, impl
    )
    gate, up = jnp.split(linear(normed, params.gate_up, impl=impl), 2, axis=1)  # [N, F] each
    inner = jax.nn.silu(gate.astype(jnp.float32)).astype(gate.dtype) * up
    added, x = finish(linear(inner, params.down, impl=impl), x)
    scratch = scratch.replace(
        stream_buf=x,
        q_buf=q.reshape(q.shape[0], -1),
        k_buf=k.reshape(k.shape[0], -1),
        v_buf=v.reshape(v.shape[0], -1),
        attn_out=out,
        mlp_up=up,
        mlp_intermediate=inner,
        stream_acc=added,
    )
    if dynamic is not None:
        scratch = scratch.replace(conv_dyn=dynamic, conv_tmp=added)
    return k_pool, v_pool, scratch


def _prepare(
    conv: ConvParams | None,
    x: jax.Array,
    norm: jax.Array,
    sequences: int,
    config: DraftConfig,
    impl: str,
):
    """Norm the rows of a sub-layer and convolve them; return them, its finish, and its kernels.

    finish(z, stream) is what the sub-layer adds to the stream, convolved, and the stream with it.
    Both convolutions take their dynamic kernels from the rows before any of them
    (spec/drafters.md §4.1). Without a convolution both are the identity.
    """
    eps = config.rms_eps
    if conv is None:
        return rms_norm(x, norm, eps), lambda z, stream: (z, stream + z), None
    # A kernel norms the rows that it reads; XLA's form of both ops norms them once.
    dynamic = pk.skinny_matmul(x, conv.projection, norm=norm, eps=eps, impl=impl)
    kernels = dynamic.reshape(sequences, -1, 2, config.conv_taps, config.num_conv_groups)

    def blocks(rows: jax.Array) -> jax.Array:
        return rows.reshape(sequences, -1, rows.shape[-1])  # [B, R, E]

    prepared = pk.dynamic_conv(blocks(x), kernels, conv.base, side=0, norm=norm, eps=eps, impl=impl)

    def finish(z: jax.Array, stream: jax.Array) -> tuple[jax.Array, jax.Array]:
        added, total = pk.dynamic_conv(
            blocks(z), kernels, conv.base, side=1, residual=blocks(stream), impl=impl
        )
        return added.reshape(z.shape), total.reshape(z.shape)

    return cast(jax.Array, prepared).reshape(x.shape), finish, dynamic
