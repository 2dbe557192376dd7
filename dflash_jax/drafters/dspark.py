"""DSpark: rows decided one after another, each corrected by the token before it.

All rows draft, the anchor's included: row j says what stands at j + 1 behind the anchor. The chain
over them stays on the device: a row is one product with the Markov head's [V, rank] matrix, the
addition of its base logits and an argmax, all of it one op, or a draw (spec/drafters.md §5).
Without a Markov head (rank 0, DeepSpec's DFlash) rows are independent.

Exactly, a draft is chosen from the whole vocabulary. `options.markov_top_k` restricts the chain to
the best base logits of each row: cheaper, and another drafter, since the bias can then no longer
lift a token into view. The text stays the target's either way.
"""

from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

import pallas_kernels as pk
from dflash_jax.drafters import backbone, confidence, vocabulary
from dflash_jax.drafters.choice import (
    Draws,
    before_the_first_fault,
    choose,
    choose_candidate,
    draws_of,
)
from dflash_jax.drafters.proposal import Proposal, SparseQ
from dflash_jax.fixed import Fixed
from dflash_jax.layers import embed, linear, logits_of
from dflash_jax.options import DecodeOptions
from dflash_jax.params import DraftParams, MarkovParams, Params
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState


class Link(NamedTuple):
    """What the token before a row says of it."""

    code: jax.Array  # [B, rank]; the bias is `out` @ code
    latent: jax.Array  # [B, rank] row of the embedding
    memory: jax.Array  # [B, rank] of a recurrent head, for the next row


def link(
    markov: MarkovParams,
    kind: str,
    previous: jax.Array,
    hidden: jax.Array,
    memory: jax.Array,
    *,
    impl: str = "auto",
) -> Link:
    """One step of a Markov head (spec/drafters.md §5.1).

    Args:
      kind: vanilla, gated or rnn.
      previous: i32[B] tokens before the row.
      hidden: [B, E] the row after the final norm.
      memory: [B, rank], zeros before the first row.
    """
    # Tokens are in range, and a lookup that does not ask costs two launches a row less.
    latent = markov.embed.at[previous].get(mode="clip")
    if kind == "vanilla":
        return Link(latent, latent, memory)
    # Concatenation orders are the checkpoint's; the recurrent output reads the old memory.
    read = [hidden, latent] if kind == "gated" else [memory, latent, hidden]
    mixed = linear(jnp.concatenate(read, axis=1), markov.mix, markov.mix_bias, impl=impl)
    mixed = mixed.astype(jnp.float32)
    if kind == "gated":
        code = jax.nn.sigmoid(mixed) * latent.astype(jnp.float32)
        return Link(code.astype(latent.dtype), latent, memory)
    gate, candidate, out = jnp.split(mixed, 3, axis=1)
    gate = jax.nn.sigmoid(gate)
    after = gate * memory.astype(jnp.float32) + (1 - gate) * jnp.tanh(candidate)
    return Link(jnp.tanh(out).astype(latent.dtype), latent, after.astype(latent.dtype))


class Chain(NamedTuple):
    """A block decided row by row."""

    tokens: jax.Array  # i32[B, J]
    latents: jax.Array | None = None  # [B, J, rank] of each row's predecessor; None for rank 0
    # f32[B, V] of the last row, or of every one; none where candidates alone were scored
    biases: tuple[jax.Array, ...] = ()
    q: jax.Array | SparseQ | None = None  # as in `Proposal`


def decide(
    draft: DraftParams,
    rows: jax.Array,
    base: jax.Array,
    anchor: jax.Array,
    draws: Draws | None = None,
    *,
    vocab: int,
    top_k: int = 0,
    every_bias: bool = False,
    impl: str = "auto",
) -> Chain:
    """Decide rows, each from its logits and the token before it.

    Args:
      rows: [B, J, E] after the final norm.
      base: f32[B, J, V] their logits.
      anchor: i32[B] the token before the first row.
      draws: noise; None takes the best tokens, ties to the lowest id.
      vocab: columns that may be chosen.
      top_k: choose among so many best base logits; 0 among all.
      every_bias: whether to return the bias of every row; a kernel writes what is returned.
    """
    if draft.markov is None:
        flat = base.reshape(-1, base.shape[-1])
        ids, q = choose(flat, draws and draws.flat(), vocab=vocab, impl=impl)
        q = q if q is None else vocabulary.over_target(draft, q).reshape(*base.shape[:2], -1)
        return Chain(vocabulary.target_ids(draft, ids).reshape(base.shape[:2]), q=q)
    candidates = _candidates(draft, base, top_k, vocab, impl) if top_k else None
    memory = jnp.zeros((rows.shape[0], draft.config.markov_rank), rows.dtype)
    previous, tokens, latents, biases, qs = anchor, [], [], [], []
    for j in range(rows.shape[1]):
        kind = draft.config.markov_kind
        step = link(draft.markov, kind, previous, rows[:, j], memory, impl=impl)
        row = None if draws is None else draws.row(j)
        if candidates is None:
            with_bias = every_bias or j == rows.shape[1] - 1
            static = {"vocab": vocab, "with_bias": with_bias, "impl": impl}
            ids, q, bias = _choose_with_bias(base, step.code, draft.markov.out, j, row, **static)
            q = q if q is None else vocabulary.over_target(draft, q)
            previous = vocabulary.target_ids(draft, ids)
            biases += [bias] if with_bias else []
        else:
            previous, q = choose_candidate(
                candidates.scores(j, step.code), candidates.ids[:, j], row
            )
        memory = step.memory
        tokens.append(previous)
        latents.append(step.latent)
        qs.append(q)
    q = None if draws is None else jnp.stack(qs, axis=1)
    if q is not None and candidates is not None:
        q = SparseQ(candidates.ids, q)
    return Chain(jnp.stack(tokens, axis=1), jnp.stack(latents, axis=1), tuple(biases), q)


def _choose_with_bias(
    base: jax.Array,
    code: jax.Array,
    out: jax.Array,
    j: int,
    row: Draws | None,
    *,
    vocab: int,
    with_bias: bool,
    impl: str,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """`choose` of row j's base logits and the bias that `code` adds, and that bias."""
    if row is None:
        best = pk.markov_argmax(base, code, out, j, vocab=vocab, with_bias=with_bias, impl=impl)
        return best.ids, None, best.bias
    bias = logits_of(code, out, impl=impl)
    return *choose(base[:, j] + bias, row, vocab=vocab, impl=impl), bias


class _Candidates(NamedTuple):
    """The best base logits of each row."""

    values: jax.Array  # f32[B, J, C]
    ids: jax.Array  # i32[B, J, C] of the target
    codes: jax.Array  # f32[B, J, C, rank] rows of the Markov head's output

    def scores(self, j: int, code: jax.Array) -> jax.Array:
        """f32[B, C] of row j: its logits and the bias of `code` [B, rank]."""
        bias = jnp.sum(self.codes[:, j] * code.astype(jnp.float32)[:, None], axis=2)
        return self.values[:, j] + bias


def _candidates(
    draft: DraftParams, base: jax.Array, top_k: int, vocab: int, impl: str
) -> _Candidates:
    markov = cast(MarkovParams, draft.markov)
    if not 1 <= top_k <= pk.CANDIDATES:
        raise ValueError(f"dspark: markov_top_k is {top_k}, wanted 0 (all) to {pk.CANDIDATES}")
    values, ids = pk.top16(base.reshape(-1, base.shape[-1]), k=top_k, vocab=vocab, impl=impl)
    shape = (*base.shape[:2], -1)
    codes = embed(ids, markov.out).astype(jnp.float32).reshape(*base.shape[:2], ids.shape[1], -1)
    ids = vocabulary.target_ids(draft, ids)
    return _Candidates(values.reshape(shape), ids.reshape(shape), codes)


def propose(
    params: Params,
    state: DecodeState,
    num_rows: jax.Array,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[Proposal, Buffers, DflashScratch]:
    """Run the block, decide its rows, and cut them where confidence ends.

    Fills `logits` (base logits), `markov_*` (of the last row) and `conf_out`.
    """
    draft, target, impl = cast(DraftParams, params.draft), params.target, options.impl
    buffers, scratch = backbone.forward(
        draft, target, state, num_rows, buffers, scratch, fixed=fixed, impl=impl
    )
    rows = backbone.draft_rows(scratch, draft.config, fixed)
    logits = vocabulary.draft_logits(draft, target, rows, impl=impl)
    base = logits.reshape(fixed.batch, fixed.num_drafts, -1)
    vocab = vocabulary.num_choices(draft, target)
    draws = draws_of(state, fixed=fixed, options=options)
    top_k = options.markov_top_k
    chain = decide(draft, rows, base, state.anchor, draws, vocab=vocab, top_k=top_k, impl=impl)
    scratch = scratch.replace(logits=logits)
    if chain.latents is not None:
        scratch = scratch.replace(markov_embed=chain.latents[:, -1])
    if chain.biases:
        scratch = scratch.replace(markov_bias=chain.biases[-1])
    num_proposed, is_finite = before_the_first_fault(rows, num_rows - 1)
    if draft.confidence is not None:
        scores = confidence.logits(draft.confidence, rows, chain.latents)
        scratch = scratch.replace(conf_out=scores)
        if draft.policy is not None:
            # Those beyond the first row that is not finite would say the same of themselves.
            _, is_sure = before_the_first_fault(scores[:, :, None], num_proposed)
            num_proposed = confidence.keep(draft.policy, scores, num_proposed, fixed=fixed)
            is_finite &= is_sure
    return Proposal(chain.tokens, num_proposed, chain.q, is_finite), buffers, scratch
