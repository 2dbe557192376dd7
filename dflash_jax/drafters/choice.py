"""How a drafter settles on a token: the best one, or one drawn by the request's temperature."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax import distribution
from dflash_jax.fixed import Fixed
from dflash_jax.options import DecodeOptions
from dflash_jax.sampling import draft_uniforms
from dflash_jax.state import DecodeState


class Draws(NamedTuple):
    """Noise and temperature of the drafts of a step."""

    uniforms: jax.Array  # f32[B, J]
    temperature: jax.Array  # f32[B, J]; below `GREEDY_BELOW` the best token is taken

    def row(self, j: int) -> "Draws":
        """Draft j of every sequence, [B] each."""
        return Draws(self.uniforms[:, j], self.temperature[:, j])

    def flat(self) -> "Draws":
        """All drafts, [B * J] each."""
        return Draws(self.uniforms.reshape(-1), self.temperature.reshape(-1))


def draws_of(state: DecodeState, *, fixed: Fixed, options: DecodeOptions) -> Draws | None:
    """What the drafts of a step are drawn with; None where each takes its best token."""
    if options.sampling is None or not options.sampling.samples_drafts:
        return None
    sampling = state.sampling
    assert sampling is not None and sampling.temperature is not None  # by the mode
    uniforms = draft_uniforms(sampling, state.seq_lens, fixed.num_drafts)
    temperature = jnp.broadcast_to(sampling.temperature[:, None], uniforms.shape)
    return Draws(uniforms, temperature)


def choose(
    logits: jax.Array, draws: Draws | None, *, vocab: int, impl: str = "auto"
) -> tuple[jax.Array, jax.Array | None]:
    """Column i32[N] of each row of f32[N, V], and the q f32[N, V] that it was drawn from, if any.

    Filters belong to the target: q follows the temperature alone.
    """
    if draws is None:
        return pk.argmax_rows(logits, vocab=vocab, impl=impl), None
    q = distribution.draft_distribution(logits, draws.temperature, vocab=vocab)
    return distribution.draw(q, draws.uniforms), q


def before_the_first_fault(rows: jax.Array, num_drafts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Drafts i32[B] before the first whose row of [B, J, E] is not finite; bool[B]: there is none.

    Args:
      num_drafts: i32[B] drafts that may be; -1, of a sequence that takes no step, stays.
    """
    offset = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    is_bad = ~jnp.all(jnp.isfinite(rows), axis=2) & (offset < num_drafts[:, None])
    first = jnp.min(jnp.where(is_bad, offset, rows.shape[1]), axis=1)
    return jnp.minimum(num_drafts, first), ~jnp.any(is_bad, axis=1)


def choose_candidate(
    scores: jax.Array, ids: jax.Array, draws: Draws | None
) -> tuple[jax.Array, jax.Array | None]:
    """Token i32[N] among candidates ids i32[N, C] by scores f32[N, C], and q f32[N, C], if drawn.

    Equal scores go to the lowest id. Candidates that are not there score `MASK_VALUE`, id 0.
    """
    best = jnp.max(scores, axis=1, keepdims=True)
    none = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(scores == best, ids, none), axis=1)
    if draws is None:
        return first, None
    # A temperature of 0 divides by 1 and then all of q goes to the best.
    is_drawn = (draws.temperature >= distribution.GREEDY_BELOW)[:, None]
    weights = jnp.exp((scores - best) / jnp.where(is_drawn, draws.temperature[:, None], 1.0))
    q = weights / jnp.sum(weights, axis=1, keepdims=True)
    is_best = (ids == first[:, None]) & (scores == best)
    q = jnp.where(is_drawn, q, is_best.astype(jnp.float32))
    at = distribution.draw(q, draws.uniforms)
    return jnp.take_along_axis(ids, at[:, None], axis=1)[:, 0], q
