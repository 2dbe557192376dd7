"""DSpark's heads in training: the chain with given predecessors, its loss, and its own drafts.

The loss of a row is 0.1 cross entropy + 0.9 total variation to the target's distribution, and 1.0
binary cross entropy of its confidence against one less that variation, which is the chance that a
draft drawn from the row is accepted (spec/drafters.md §5.2).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dflash_jax.config import DraftConfig
from dflash_jax.train.dense import Tensors, linear

CROSS_ENTROPY, VARIATION, CONFIDENCE = 0.1, 0.9, 1.0  # weights of the three parts
_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@jax.custom_vjp
def wide_logits(x: jax.Array, table: jax.Array) -> jax.Array:
    """x[N, E] @ table[V, E].T as f32[N, V], with gradients in the operands' dtype."""
    return jnp.einsum("ne,ve->nv", x, table, preferred_element_type=jnp.float32)


def _wide_logits_fwd(x: jax.Array, table: jax.Array):
    return wide_logits(x, table), (x, table)


def _wide_logits_bwd(saved, grad: jax.Array):
    x, table = saved
    grad = grad.astype(x.dtype)
    return (
        jnp.einsum("nv,ve->ne", grad, table, preferred_element_type=x.dtype),
        jnp.einsum("nv,ne->ve", grad, x, preferred_element_type=table.dtype),
    )


wide_logits.defvjp(_wide_logits_fwd, _wide_logits_bwd)


class Step(NamedTuple):
    """What a Markov head makes of one row's predecessor."""

    code: jax.Array  # [N, rank], whose product with the second table is the bias
    latent: jax.Array  # [N, rank]
    memory: jax.Array  # [N, rank] of a recurrent head


def markov_step(
    tensors: Tensors, config: DraftConfig, previous: jax.Array, row: jax.Array, memory: jax.Array
) -> Step:
    """previous i32[N] and row [N, E] to the row's code."""
    latent = tensors[_W1][previous]
    if config.markov_kind == "vanilla":
        return Step(latent, latent, memory)
    is_gated = config.markov_kind == "gated"
    name = "gate_proj" if is_gated else "joint_proj"
    read = [row, latent] if is_gated else [memory, latent, row]
    mixed = linear(jnp.concatenate(read, axis=-1), tensors[f"markov_head.{name}.weight"])
    mixed = mixed + tensors[f"markov_head.{name}.bias"]
    if is_gated:
        return Step(jax.nn.sigmoid(mixed) * latent, latent, memory)
    gate, candidate, out = jnp.split(mixed, 3, axis=-1)
    gate = jax.nn.sigmoid(gate)
    return Step(jnp.tanh(out), latent, gate * memory + (1 - gate) * jnp.tanh(candidate))


def _given(
    tensors: Tensors, config: DraftConfig, rows: jax.Array, previous: jax.Array
) -> tuple[jax.Array, jax.Array] | None:
    """Codes and latents [M, J, rank] of rows [M, J, E] after given tokens; None for rank 0."""
    if not config.markov_rank:
        return None
    memory = jnp.zeros((rows.shape[0], config.markov_rank), rows.dtype)
    steps = []
    for j in range(rows.shape[1]):
        steps.append(markov_step(tensors, config, previous[:, j], rows[:, j], memory))
        memory = steps[-1].memory
    codes, latents = ([step[i] for step in steps] for i in (0, 1))
    return jnp.stack(codes, axis=1), jnp.stack(latents, axis=1)


def confidence_logits(
    tensors: Tensors, config: DraftConfig, rows: jax.Array, latents: jax.Array | None
) -> jax.Array:
    """f32[N] of rows [N, E] and latents [N, rank]."""
    read = rows
    if latents is not None and config.confidence_reads_markov:
        read = jnp.concatenate([rows, latents], axis=-1)
    logits = linear(read, tensors["confidence_head.proj.weight"])[:, 0].astype(jnp.float32)
    return logits + tensors["confidence_head.proj.bias"].astype(jnp.float32)


class RowLosses(NamedTuple):
    """Of each row."""

    cross_entropy: jax.Array  # f32[N]
    variation: jax.Array  # f32[N] half the distance of the two distributions
    best: jax.Array  # i32[N] argmax


def _chunk(head: jax.Array, second: jax.Array | None, scale: float, piece) -> RowLosses:
    rows, code, target_rows, labels = piece
    logits = scale * wide_logits(rows, head)
    if second is not None:
        logits = logits + wide_logits(code, second)
    log_q = jax.nn.log_softmax(logits, axis=-1)
    p = jax.nn.softmax(wide_logits(target_rows, head), axis=-1)
    gold = jnp.take_along_axis(log_q, labels[:, None], axis=1)[:, 0]
    variation = 0.5 * jnp.abs(jnp.exp(log_q) - jax.lax.stop_gradient(p)).sum(-1)
    return RowLosses(-gold, variation, jnp.argmax(logits, axis=-1).astype(jnp.int32))


def row_losses(
    head: jax.Array,
    second: jax.Array | None,
    scale: float,
    rows: jax.Array,
    code: jax.Array | None,
    target_rows: jax.Array,
    labels: jax.Array,
    chunk: int,
) -> RowLosses:
    """Losses of rows [N, E] in pieces whose logits are formed again on the way back.

    Args:
      head: [V, E], not trained; second: [V, rank] of the Markov head; code: [N, rank].
      target_rows: [N, E] the target's final rows at the same places.
    """
    count = rows.shape[0]
    pieces = max(1, -(-count // chunk))
    while count % pieces:
        pieces += 1
    cut = lambda x: None if x is None else x.reshape(pieces, count // pieces, *x.shape[1:])
    one = jax.checkpoint(partial(_chunk, jax.lax.stop_gradient(head), second, scale))
    losses = jax.lax.map(one, tuple(map(cut, (rows, code, target_rows, labels))))
    return jax.tree.map(lambda x: x.reshape(count), losses)


def spark_losses(
    tensors: Tensors,
    config: DraftConfig,
    head: jax.Array,
    rows: jax.Array,
    labels: jax.Array,
    previous: jax.Array,
    weights: jax.Array,
    target_rows: jax.Array,
    chunk: int,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The training loss and figures to log.

    Args:
      rows: [B, A, J, E] drafting rows; labels, previous: i32[B, A, J]; weights: f32[B, A, J].
      target_rows: [B, A, J, E] of the target, each behind the same text as its row.
    """
    flat = rows.reshape(-1, *rows.shape[2:])  # [M, J, E]
    given = _given(tensors, config, flat, previous.reshape(flat.shape[:2]))
    join = lambda x: x.reshape(-1, x.shape[-1])
    code, latents = (None, None) if given is None else map(join, given)
    second = None if given is None else tensors[_W2]
    targets = jax.lax.stop_gradient(join(target_rows))
    found = row_losses(
        head, second, config.output_multiplier, join(rows), code, targets, labels.reshape(-1), chunk
    )
    weight = weights.reshape(-1)
    total = jnp.maximum(weight.sum(), 1e-6)
    mean = lambda x: jnp.sum(weight * x) / total
    figures = {"cross_entropy": mean(found.cross_entropy), "variation": mean(found.variation)}
    loss = CROSS_ENTROPY * figures["cross_entropy"] + VARIATION * figures["variation"]
    if config.has_confidence:
        logits = confidence_logits(tensors, config, join(rows), latents)
        chance = 1 - jax.lax.stop_gradient(found.variation)
        entropy = jax.nn.softplus(logits) - chance * logits
        figures["confidence_loss"] = mean(entropy)
        loss = loss + CONFIDENCE * figures["confidence_loss"]
    first = weights[..., 0] > 0
    hit = (found.best == labels.reshape(-1)).reshape(labels.shape)[..., 0] & first
    figures["first_row_hit"] = hit.sum() / jnp.maximum(first.sum(), 1)
    return loss, figures


def spark_drafts(
    tensors: Tensors, config: DraftConfig, head: jax.Array, rows: jax.Array, anchor: jax.Array
) -> jax.Array:
    """Greedy drafts i32[M, J] of drafting rows [M, J, E] after i32[M] anchors."""
    memory = jnp.zeros((rows.shape[0], max(config.markov_rank, 1)), rows.dtype)
    previous, drafts = anchor, []
    for j in range(rows.shape[1]):
        logits = config.output_multiplier * wide_logits(rows[:, j], head)
        if config.markov_rank:
            step = markov_step(tensors, config, previous, rows[:, j], memory)
            logits, memory = logits + wide_logits(step.code, tensors[_W2]), step.memory
        previous = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        drafts.append(previous)
    return jnp.stack(drafts, axis=1)
