"""Distributions over the vocabulary: the target's as a request wants it, a drafter's, and draws.

Rows are independent; everything is f32. A filter's threshold is found by bisection over the bit
patterns of the weights, which order non-negative floats: exact, without sorting a vocabulary. It
reads the weights 30 times, 30 * N * V * 4 bytes a filter (292 MB for 16 rows of 151,936, which an
H200's L2 holds at 10 MB a pass); where tokens tie at the threshold, the lowest ids are kept by
another V.bit_length() passes, which run only then.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels as pk
from dflash_jax.sampling import GREEDY_BELOW, Purpose, SamplingState, uniforms

_NODE = 128  # entries summed a level when drawing
_WEIGHT_BITS = 30  # bit patterns of floats up to 1.0 lie below 2^30


def processed_logits(
    logits: jax.Array, drafts: jax.Array, sampling: SamplingState | None
) -> jax.Array:
    """Logits after bias and penalties, f32[B * R, V]; the same array if there are none of them.

    Args:
      logits: f32[B * R, V] of the target.
      drafts: i32[B, R-1]; row i is read as if drafts 0..i-1 were part of the answer, so a token
        that a block repeats is penalised inside it.
    """
    if sampling is None or (sampling.bias is None and sampling.counts is None):
        return logits
    batch = drafts.shape[0]
    x = logits.reshape(batch, -1, logits.shape[1])
    if sampling.bias is not None:
        x = x + sampling.bias[:, None]
    if sampling.counts is not None:
        x = _penalised(x, _row_counts(drafts, sampling.counts), sampling)
    return x.reshape(logits.shape)


def _row_counts(drafts: jax.Array, counts: jax.Array) -> jax.Array:
    """i32[B, R, V]: how often each token stands in the answer before the token of each row.

    Integers, so that a row counts the same bits wherever in a block it stands.
    """
    batch, behind = drafts.shape
    rows = jnp.broadcast_to(counts[:, None], (batch, behind + 1, counts.shape[1]))
    row = jnp.arange(behind + 1, dtype=jnp.int32)[None, :, None]
    draft = jnp.arange(behind, dtype=jnp.int32)[None, None]
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
    return rows.at[sequence, row, drafts[:, None]].add((draft < row).astype(jnp.int32))


def _penalised(x: jax.Array, counts: jax.Array, sampling: SamplingState) -> jax.Array:
    repetition, presence, frequency, in_prompt = (
        sampling.repetition,
        sampling.presence,
        sampling.frequency,
        sampling.in_prompt,
    )
    assert repetition is not None and presence is not None
    assert frequency is not None and in_prompt is not None

    def per_sequence(value: jax.Array) -> jax.Array:
        return value[:, None, None]

    seen = in_prompt[:, None] | (counts > 0)
    factor = per_sequence(repetition)
    x = jnp.where(seen, jnp.where(x > 0, x / factor, x * factor), x)
    x = x - per_sequence(frequency) * counts.astype(jnp.float32)
    return x - per_sequence(presence) * (counts > 0).astype(jnp.float32)


def distribution(logits: jax.Array, rows: SamplingState, *, vocab: int) -> jax.Array:
    """Probabilities f32[N, V] after temperature, top-k, top-p and min-p (spec/verify.md §2.2).

    Args:
      logits: f32[N, V], bias and penalties applied.
      rows: the filters of each row, as `SamplingState.rows` gives them; None leaves one out.
      vocab: tokens that exist; columns from there on get nothing.
    """
    assert rows.temperature is not None
    weights = _weights(logits, rows.temperature, vocab)
    if rows.top_k is not None:
        weights = keep_top_k(weights, rows.top_k)
    if rows.top_p is not None:
        weights = keep_top_p(weights, rows.top_p)
    if rows.min_p is not None:
        weights = jnp.where(weights >= rows.min_p[:, None], weights, 0.0)  # the best weighs 1
    return _or_best(weights / jnp.sum(weights, axis=1, keepdims=True), logits, rows, vocab)


def target_choice(
    logits: jax.Array,
    sampling: SamplingState | None,
    positions: jax.Array,
    *,
    vocab: int,
    best: jax.Array | None = None,
) -> jax.Array:
    """The target's own token behind every row, i32[B, R]: the best one, or drawn.

    Args:
      logits: f32[B * R, V], bias and penalties applied.
      sampling: of the B sequences; None takes the best tokens.
      positions: i32[B, R] where the tokens will stand.
      best: i32[B * R] the best token of each row, if the caller has them.
    """
    if sampling is None or sampling.keys is None:
        best = pk.argmax_rows(logits, vocab=vocab) if best is None else best
        return best.reshape(positions.shape)
    p = distribution(logits, sampling.rows(positions.shape[1]), vocab=vocab)
    u = uniforms(sampling.keys, positions, Purpose.TARGET)
    return draw(p, u.reshape(-1)).reshape(positions.shape)


def draft_distribution(logits: jax.Array, temperature: jax.Array, *, vocab: int) -> jax.Array:
    """q f32[N, V] of drafter rows, by temperature f32[N] alone: filters belong to the target."""
    return distribution(logits, SamplingState(temperature=temperature), vocab=vocab)


def _weights(logits: jax.Array, temperature: jax.Array, vocab: int) -> jax.Array:
    """exp((logit - best) / T): the best of a row weighs 1."""
    divisor = jnp.where(temperature < GREEDY_BELOW, 1.0, temperature)[:, None]
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    x = jnp.where(column < vocab, logits, -jnp.inf)
    return jnp.exp((x - jnp.max(x, axis=1, keepdims=True)) / divisor)


def _or_best(p: jax.Array, logits: jax.Array, rows: SamplingState, vocab: int) -> jax.Array:
    """p, or for a row at temperature 0 all of it on its best token."""
    assert rows.temperature is not None
    best = pk.argmax_rows(logits, vocab=vocab)
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    is_best = (column == best[:, None]).astype(jnp.float32)
    return jnp.where((rows.temperature < GREEDY_BELOW)[:, None], is_best, p)


def keep_top_k(weights: jax.Array, k: jax.Array) -> jax.Array:
    """weights[N, V] with all but the k[N] largest zero; equal ones go to the lowest ids."""

    def count(chosen: jax.Array) -> jax.Array:
        return jnp.sum(chosen, axis=1, dtype=jnp.int32)

    return _keep(weights, count, k, lambda above, _: k - above)


def keep_top_p(weights: jax.Array, p: jax.Array) -> jax.Array:
    """weights[N, V] with all zero but the largest, while what precedes each is below p[N] of all.

    A p of 1 keeps all, also what is too small to change the sum.
    """
    limit = p * jnp.sum(weights, axis=1)

    def mass(chosen: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, weights, 0.0), axis=1)

    def room(above: jax.Array, tied: jax.Array) -> jax.Array:
        return jnp.ceil((limit - above) / tied).astype(jnp.int32)

    return jnp.where((p >= 1)[:, None], weights, _keep(weights, mass, limit, room))


def _keep(
    weights: jax.Array,
    measure: Callable[[jax.Array], jax.Array],
    limit: jax.Array,
    room: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Zero all weights but those, in order, before which `measure` has not reached `limit`.

    Args:
      weights: f32[N, V], 0 to 1.
      measure: of bool[N, V] chosen entries, [N]; grows with them.
      room: how many entries at the threshold fit, of measure above it and their common weight.
    """
    keys = lax.bitcast_convert_type(weights, jnp.int32)  # orders floats that are not negative
    threshold = _least(lambda t: measure(keys > t[:, None]) < limit, keys.shape[0], _WEIGHT_BITS)
    tied = keys == threshold[:, None]
    above = measure(keys > threshold[:, None])
    fits = room(above, lax.bitcast_convert_type(threshold, jnp.float32))
    fits = jnp.where(threshold == 0, weights.shape[1], jnp.maximum(fits, 1))  # zeros do not matter
    has_surplus = jnp.sum(tied, axis=1, dtype=jnp.int32) > fits
    kept_ties = lax.cond(jnp.any(has_surplus), _lowest_ids, lambda tied, _: tied, tied, fits)
    return jnp.where((keys > threshold[:, None]) | kept_ties, weights, 0.0)


def _lowest_ids(chosen: jax.Array, count: jax.Array) -> jax.Array:
    """The first `count`[N] of the true entries of bool[N, V]."""
    column = jnp.arange(chosen.shape[1], dtype=jnp.int32)[None]

    def enough(t: jax.Array) -> jax.Array:
        return jnp.sum(chosen & (column <= t[:, None]), axis=1, dtype=jnp.int32) >= count

    last = _least(enough, chosen.shape[0], chosen.shape[1].bit_length())
    return chosen & (column <= last[:, None])


def _least(holds: Callable[[jax.Array], jax.Array], rows: int, bits: int) -> jax.Array:
    """i32[N]: the least number of `bits` bits for which `holds`, which is so for all above it."""

    def narrow(i: jax.Array, found: jax.Array) -> jax.Array:
        step = jnp.int32(1) << (bits - 1 - i)
        return jnp.where(holds(found + (step - 1)), found, found + step)

    return lax.fori_loop(0, bits, narrow, jnp.zeros((rows,), jnp.int32))


def draw(weights: jax.Array, u: jax.Array) -> jax.Array:
    """i32[N]: the first index whose running sum of weights f32[N, V] exceeds u[N] of the whole.

    Sums are taken in a tree of 128 entries a node, so one pass reads the weights and the rest is
    small. Never an entry of weight 0, unless all are: a rounded sum may point past the last one.
    """
    levels = [weights]
    while levels[-1].shape[1] > 1:
        levels.append(jnp.sum(_nodes(levels[-1]), axis=2))
    index = jnp.zeros(u.shape, jnp.int32)
    rest = u * levels[-1][:, 0]
    for level in reversed(levels[:-1]):
        children = jnp.take_along_axis(_nodes(level), index[:, None, None], axis=1)[:, 0]
        child, rest = _descend(children, rest)
        index = index * _NODE + child
    return index


def token_logprobs(logits: jax.Array, tokens: jax.Array, *, vocab: int) -> jax.Array:
    """log softmax of f32[N, V] over the first `vocab` columns, at tokens i32[N]: f32[N]."""
    real = logits[:, :vocab]
    chosen = jnp.take_along_axis(real, tokens[:, None], axis=1)[:, 0]
    return chosen - jax.nn.logsumexp(real, axis=1)


def _nodes(level: jax.Array) -> jax.Array:
    """[N, X] as [N, ceil(X / 128), 128], padded with zeros."""
    rows, width = level.shape
    padded = jnp.pad(level, ((0, 0), (0, -width % _NODE)))
    return padded.reshape(rows, -1, _NODE)


def _descend(children: jax.Array, rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of [N, 128] children holds the running sum `rest`[N], and what of it is left there."""
    sums = jnp.cumsum(children, axis=1)
    column = jnp.arange(_NODE, dtype=jnp.int32)[None]
    full = children > 0
    first = jnp.min(jnp.where(full & (sums > rest[:, None]), column, _NODE), axis=1)
    last = jnp.max(jnp.where(full, column, 0), axis=1)
    child = jnp.where(first < _NODE, first, last)
    before = jnp.take_along_axis(sums, jnp.maximum(child - 1, 0)[:, None], axis=1)[:, 0]
    before = jnp.where(child > 0, before, 0.0)
    return child, jnp.maximum(rest - before, 0.0)
