"""What every kind of drafter trains on and drafts, over whole sequences of the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.params import TargetParams
from dflash_jax.train.dense import Tensors, draft_hidden
from dflash_jax.train.head import chain_rows
from dflash_jax.train.losses import RowScores, RowTargets, block_losses, draft_tokens, score_rows
from dflash_jax.train.spark import spark_drafts, spark_losses, wide_logits

Trainable = DraftConfig | MtpConfig


class Seen(NamedTuple):
    """Sequences as the target left them."""

    tokens: jax.Array  # i32[B, T]
    features: jax.Array | None  # [B, T, M*E]; None if nothing is tapped
    hidden: jax.Array  # [B, T, E] after the final norm


def losses_of(
    tensors: Tensors,
    config: Trainable,
    target: TargetParams,
    seen: Seen,
    anchors: jax.Array,
    wanted: RowTargets,
    chunk: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The training loss of one drafter and figures to log.

    Args:
      tensors: its weights, in the compute dtype.
      anchors: i32[B, A], negative where there is none, whose rows weigh nothing.
      wanted: from `losses.row_targets` for as many drafts as the drafter has.
    """
    if isinstance(config, MtpConfig):
        # The row that says draft j has read the text up to draft j - 1.
        given = lambda j, _: wanted.labels[..., j]
        rows = chain_rows(tensors, config, target.embed, seen.hidden, seen.tokens, anchors, given)
        return _head_losses(target, rows, wanted, chunk)
    hidden = _block_hidden(tensors, config, target, seen, anchors)
    if config.kind != "dspark":
        return block_losses(tensors, config, target.lm_head, hidden, wanted, chunk)
    rows = hidden[:, :, config.first_draft_row :]
    length = seen.tokens.shape[1]
    at = jnp.clip(anchors[..., None] + jnp.arange(config.max_drafts), 0, length - 1)
    target_rows = jnp.take_along_axis(seen.hidden, at.reshape(at.shape[0], -1, 1), axis=1)
    target_rows = target_rows.reshape(*at.shape, -1)
    return spark_losses(
        tensors, config, target.lm_head, rows, wanted.labels, wanted.previous, wanted.weights,
        target_rows, chunk,
    )  # fmt: skip


def drafts_of(
    tensors: Tensors,
    config: Trainable,
    target: TargetParams,
    seen: Seen,
    anchors: jax.Array,
    chunk: int,
) -> jax.Array:
    """Greedy drafts i32[B, A, J] at i32[B, A] anchors, each from the drafts before it."""
    shape = anchors.shape
    if isinstance(config, MtpConfig):

        def own(j: int, rows: jax.Array) -> jax.Array:
            logits = wide_logits(rows.reshape(-1, rows.shape[-1]), target.lm_head)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32).reshape(shape)

        rows = chain_rows(tensors, config, target.embed, seen.hidden, seen.tokens, anchors, own)
        return jnp.stack([own(j, rows[:, :, j]) for j in range(rows.shape[2])], axis=-1)
    hidden = _block_hidden(tensors, config, target, seen, anchors)
    first = jnp.take_along_axis(seen.tokens, jnp.maximum(anchors, 0), axis=1)
    if config.kind == "dspark":
        rows = hidden[:, :, config.first_draft_row :]
        flat = rows.reshape(-1, *rows.shape[2:])
        drafts = spark_drafts(tensors, config, target.lm_head, flat, first.reshape(-1))
        return drafts.reshape(*shape, -1)
    return draft_tokens(tensors, config, target.lm_head, hidden, first, chunk)


def taps_of(configs: Sequence[Trainable]) -> tuple[int, ...]:
    """The taps that all drafters of a run share; an MTP head has none.

    Raises:
      ValueError: they differ.
      NotImplementedError: windows, soft-caps, and heads of hybrid targets.
    """
    blocks = [config for config in configs if isinstance(config, DraftConfig)]
    taps = {config.target_layer_ids for config in blocks}
    if len(taps) > 1:
        raise ValueError(f"drafters of one run tap {sorted(taps)}, wanted the same layers")
    for config in blocks:
        if config.soft_cap or any(layer.window for layer in config.attention):
            raise NotImplementedError(
                f"training {config.kind}: soft-cap and windows are not supported"
            )
    for config in configs:
        if isinstance(config, MtpConfig) and (
            config.layer.has_output_gate or config.layer.moe or config.reads_residual
        ):
            raise NotImplementedError(
                "training mtp: heads of hybrid and mixture-of-experts targets, and heads that read "
                "the residual stream, are not supported"
            )
    return taps.pop() if taps else ()


def _block_hidden(
    tensors: Tensors, config: DraftConfig, target: TargetParams, seen: Seen, anchors: jax.Array
) -> jax.Array:
    """[B, A, R, E] of a block drafter."""
    assert seen.features is not None  # a block drafter taps layers
    anchors = jnp.maximum(anchors, 0)
    return draft_hidden(tensors, config, target.embed, seen.features, seen.tokens, anchors)


def _head_losses(
    target: TargetParams, rows: jax.Array, wanted: RowTargets, chunk: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross entropy of every row of the chains."""
    labels, weights = wanted.labels.reshape(-1), wanted.weights.reshape(-1)
    flat = rows.reshape(-1, rows.shape[-1])
    scores: RowScores = score_rows(flat, target.lm_head, labels, weights, 1.0, 0, chunk)
    loss = scores.loss / jnp.maximum(weights.sum(), 1e-6)
    first = wanted.weights[..., 0] > 0
    hit = (scores.best == labels).reshape(wanted.labels.shape)[..., 0] & first
    return loss, {
        "cross_entropy": loss,
        "first_row_hit": hit.sum() / jnp.maximum(first.sum(), 1),
    }
