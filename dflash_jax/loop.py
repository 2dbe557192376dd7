"""The decode loop: prefill, one step, and a chunk of steps in one dispatch.

`decode` runs up to `options.cycles` steps on the device and returns what the host needs as arrays
of their own, since donated carriers cannot be read once the next chunk is under way.
Plain decoding is the same executable with no draft kept (design.md §4).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels as pk
from dflash_jax import drafters
from dflash_jax.commit import commit, write_tokens
from dflash_jax.distribution import processed_logits, target_choice, token_logprobs
from dflash_jax.drafters.proposal import CommittedRows, Proposal
from dflash_jax.fixed import Fixed
from dflash_jax.gdn_state import check_gdn_state
from dflash_jax.layers import logits_of
from dflash_jax.metadata import indirect_args, rows_metadata
from dflash_jax.options import DecodeOptions
from dflash_jax.params import Params
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState, Status
from dflash_jax.verify import Verification, is_stop, target_rows, verify


class FirstToken(NamedTuple):
    """The token a prefill samples, the first anchor; only the last chunk's means anything."""

    token: jax.Array  # i32[]
    logits_hash: jax.Array | None  # u32[], if certified
    status: jax.Array  # i32[] of the sequence
    logprob: jax.Array | None  # f32[], if asked for


class StepOutput(NamedTuple):
    """Records of one step."""

    proposal: Proposal
    verification: Verification


class ChunkOutput(NamedTuple):
    """Records of one dispatch; of a [cycles, ...] array the first `num_cycles` entries count."""

    tokens: jax.Array  # i32[cycles, B, R] committed
    num_committed: jax.Array  # i32[cycles, B]
    num_accepted: jax.Array  # i32[cycles, B]
    num_proposed: jax.Array  # i32[cycles, B] drafts that were verified
    drafts: jax.Array  # i32[cycles, B, num_drafts]
    hashes: jax.Array | None  # u32[cycles, B, R]
    logprobs: jax.Array | None  # f32[cycles, B, R]
    num_cycles: jax.Array  # i32[]
    status: jax.Array  # i32[B] after the chunk
    draft_faults: jax.Array | None = None  # bool[B] the drafter's numbers were not finite some time
    widths: jax.Array | None = None  # i32[cycles] rows a sequence that the target ran, if chosen


# Donated, and kept where a call only overwrites them: an argument that jit drops as unread is not
# donated either, and its output would take new memory.
_CARRIERS = ("state", "buffers", "scratch")

# On a GPU the whole loop becomes one CUDA graph with a conditional node. By default XLA copies the
# predicate to the host each cycle, which drains the launch queue: 6.40 against 5.99 ms a cycle
# (H200, Qwen3-8B shapes, batch 1, 1,024 keys; 203 dispatches). The list is XLA's own and WHILE; a
# CPU ignores it.
LOOP_OPTIONS = {
    "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,"
    "DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
}


@partial(jax.jit, static_argnames=("fixed", "options"), donate_argnames=_CARRIERS, keep_unused=True)
def prefill(
    params: Params,
    tokens: jax.Array,
    num_tokens: jax.Array,
    sequence: jax.Array,
    following: jax.Array,
    state: DecodeState,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[FirstToken, DecodeState, Buffers, DflashScratch]:
    """Run one chunk of one sequence's prompt through the target and into the drafter's context.

    A sequence is prefilled alone, so that its bits do not depend on its batch.

    Args:
      params: the pair.
      tokens: i32[T] prompt tokens, T a bucket of at most `fixed.max_rows`.
      num_tokens: i32[] of them that are real.
      sequence: i32[] index in the batch.
      following: i32[] the prompt's token behind this chunk; -1 behind the last one, which samples
        the anchor, the first new token.
      state, buffers, scratch: donated.

    Raises:
      ValueError: a bucket longer than the plan's.
    """
    if tokens.shape[0] > fixed.max_rows:
        raise ValueError(
            f"prefill: {tokens.shape[0]} tokens in a call, Fixed is planned for {fixed.max_rows}"
        )
    slots = buffers.verify_wy_tables
    check_gdn_state("prefill", buffers.gdn, slots, fixed)
    impl = options.impl
    start = state.seq_lens[sequence][None]
    count = num_tokens[None]
    table = buffers.meta.block_table
    meta = rows_metadata(start, count, table[sequence][None], tokens.shape[0], fixed.page_size)
    hidden, features, buffers = target_rows(
        params,
        tokens,
        meta,
        indirect_args(start, count),
        buffers,
        slots=None if slots is None else slots[sequence][None],
        is_prefill=True,
        impl=impl,
    )
    last_row = lax.dynamic_slice_in_dim(hidden, num_tokens - 1, 1, axis=0)
    logits = logits_of(last_row, params.target.lm_head, impl=impl)  # f32[1, V]
    vocab = params.target.config.real_vocab
    state = _note_prompt(state, sequence, tokens, num_tokens)
    greedy = pk.greedy_rows(logits, vocab=vocab, with_hashes=options.certify, impl=impl)
    first = _first_token(state, sequence, logits, start + count, vocab, best=greedy.ids)
    is_last = following < 0
    next_tokens = jnp.roll(tokens, -1).at[num_tokens - 1].set(jnp.where(is_last, first, following))
    rows = CommittedRows(
        tokens,
        next_tokens,
        features,
        hidden,
        meta.positions,
        meta.slot_mapping,
        jnp.full_like(tokens, sequence),
    )
    buffers, scratch = drafters.get(params.draft).advance(
        params, rows, buffers, scratch, fixed=fixed, impl=impl
    )
    state = _after_prefill(state, sequence, tokens, num_tokens, first, greedy.is_finite[0], is_last)
    logprob = None
    if options.sampling is not None and options.sampling.logprobs:
        logprob = token_logprobs(logits, first[None], vocab=vocab)[0]
    logits_hash = None if greedy.hashes is None else greedy.hashes[0]
    out = FirstToken(first, logits_hash, state.status[sequence], logprob)
    return out, state, buffers, scratch


def _note_prompt(
    state: DecodeState, sequence: jax.Array, tokens: jax.Array, num_tokens: jax.Array
) -> DecodeState:
    """Tell the penalties of a chunk of the prompt."""
    if state.sampling is None:
        return state
    is_real = jnp.arange(tokens.shape[0], dtype=jnp.int32) < num_tokens
    return state.replace(sampling=state.sampling.after_prompt(sequence, tokens, is_real))


def _first_token(
    state: DecodeState,
    sequence: jax.Array,
    logits: jax.Array,
    position: jax.Array,
    vocab: int,
    *,
    best: jax.Array,
) -> jax.Array:
    """The answer's first token, i32[]: the best one of f32[1, V], or drawn for its position."""
    sampling = state.sampling and state.sampling.of(sequence)
    given, logits = logits, processed_logits(logits, jnp.zeros((1, 0), jnp.int32), sampling)
    known = best if logits is given else None
    return target_choice(logits, sampling, position[None], vocab=vocab, best=known)[0, 0]


def _after_prefill(
    state: DecodeState,
    sequence: jax.Array,
    tokens: jax.Array,
    num_tokens: jax.Array,
    first: jax.Array,
    is_finite: jax.Array,
    is_last: jax.Array,
) -> DecodeState:
    """Append the chunk to the sequence's tokens and, after the last one, the anchor."""
    row = state.tokens[sequence][None]
    start = state.seq_lens[sequence]
    offset = jnp.arange(tokens.shape[0], dtype=jnp.int32)[None]
    row = write_tokens(row, tokens[None], start + offset, offset < num_tokens)
    end = start + num_tokens
    row = row.at[0, end].set(jnp.where(is_last, first, row[0, end]))
    remaining = state.remaining[sequence] - is_last.astype(jnp.int32)
    status = jnp.int32(Status.ACTIVE)
    status = jnp.where(end >= state.max_lens[sequence], Status.CONTEXT, status)
    status = jnp.where(remaining <= 0, Status.LENGTH, status)
    stops = is_stop(first[None, None], state.stop_ids[sequence][None])[0, 0]
    status = jnp.where(stops, Status.STOP, status)
    status = jnp.where(is_finite, status, Status.NON_FINITE)
    status = jnp.where(is_last, status, state.status[sequence]).astype(jnp.int32)
    sampling = state.sampling
    if sampling is not None:
        is_new = is_last & (jnp.arange(state.seq_lens.shape[0], dtype=jnp.int32) == sequence)
        every = jnp.broadcast_to(first, (state.seq_lens.shape[0], 1))
        sampling = sampling.after(every, is_new[:, None])
    return state.replace(
        sampling=sampling,
        tokens=state.tokens.at[sequence].set(row[0]),
        seq_lens=state.seq_lens.at[sequence].set(end),
        anchor=state.anchor.at[sequence].set(jnp.where(is_last, first, state.anchor[sequence])),
        remaining=state.remaining.at[sequence].set(remaining),
        status=state.status.at[sequence].set(status),
    )


def _step(
    params: Params,
    state: DecodeState,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    options: DecodeOptions,
) -> tuple[StepOutput, DecodeState, Buffers, DflashScratch]:
    """Propose, verify, commit."""
    static = {"fixed": fixed, "options": options}
    drafters.check_options(params.draft.config, options)
    num_rows = rows_to_run(state, fixed)
    drafter = drafters.get(params.draft)
    propose = drafter.propose if fixed.num_drafts else drafters.propose_nothing
    proposal, buffers, scratch = propose(params, state, num_rows, buffers, scratch, **static)
    scratch = _record_block(scratch, state, proposal)
    if proposal.is_finite is not None and state.draft_faults is not None:
        faults = state.is_active & ~proposal.is_finite
        state = state.replace(draft_faults=state.draft_faults | faults)
    verification, buffers = verify(params, proposal, num_rows, state, buffers, **static)
    state, buffers, scratch = commit(
        params, verification, state, buffers, scratch, fixed=fixed, impl=options.impl
    )
    return StepOutput(proposal, verification), state, buffers, scratch


def rows_to_run(state: DecodeState, fixed: Fixed) -> jax.Array:
    """i32[B] block rows of the next step: anchor and drafts that can still matter.

    One row more than the budget is verified, as z-lab does, so that the drafts at the end of a
    budget equal theirs; the commit drops the surplus.
    """
    rows = jnp.minimum(state.keep, fixed.num_drafts) + 1
    rows = jnp.minimum(rows, state.remaining + 1)
    rows = jnp.minimum(rows, state.max_lens - state.seq_lens)
    return jnp.where(state.is_active, rows, 0)


def _record_block(scratch: DflashScratch, state: DecodeState, proposal: Proposal) -> DflashScratch:
    """Leave the block that goes to verification in the scratch."""
    block = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    return scratch.replace(
        draft_tokens_dev=block.reshape(-1),
        draft_tokens_event=scratch.draft_tokens_event + jnp.uint32(1),
    )


@partial(jax.jit, static_argnames=("fixed", "options"), donate_argnames=_CARRIERS, keep_unused=True)
def step(
    params: Params,
    state: DecodeState,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[StepOutput, DecodeState, Buffers, DflashScratch]:
    """One propose-verify-commit cycle, for looking into."""
    out, state, buffers, scratch = _step(
        params, state, buffers, scratch, fixed=fixed, options=options
    )
    return out, state, buffers, _publish(scratch)


@partial(
    jax.jit,
    static_argnames=("fixed", "options"),
    donate_argnames=_CARRIERS,
    keep_unused=True,
    compiler_options=LOOP_OPTIONS,
)
def decode(
    params: Params,
    state: DecodeState,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[ChunkOutput, DecodeState, Buffers, DflashScratch]:
    """Run up to `options.cycles` cycles, fewer when every sequence is finished.

    Args:
      params: the pair, not donated.
      state, buffers, scratch: donated; they come back with equal shapes.
      fixed: sizes; options: cycles, kernels, certification. Both static.
    Returns:
      ChunkOutput, then the carriers.
    """

    def goes_on(carry) -> jax.Array:
        out, state, _, _ = carry
        return (out.num_cycles < options.cycles) & jnp.any(state.is_active)

    def cycle(carry):
        out, state, buffers, scratch = carry
        record, state, buffers, scratch = _step(
            params, state, buffers, scratch, fixed=fixed, options=options
        )
        return _append(out, record), state, buffers, scratch

    out = _empty_chunk(fixed, options)
    out, state, buffers, scratch = lax.while_loop(goes_on, cycle, (out, state, buffers, scratch))
    out = out._replace(status=state.status, draft_faults=state.draft_faults)
    return out, state, buffers, _publish(scratch)


def decode_autoregressive(
    params: Params,
    state: DecodeState,
    buffers: Buffers,
    scratch: DflashScratch,
    *,
    fixed: Fixed,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[ChunkOutput, DecodeState, Buffers, DflashScratch]:
    """Plain decoding by `decode`'s own executable: no draft is kept, one token a step."""
    state = state.replace(keep=jnp.zeros_like(state.keep))
    return decode(params, state, buffers, scratch, fixed=fixed, options=options)


def _empty_chunk(fixed: Fixed, options: DecodeOptions) -> ChunkOutput:
    per_cycle = (options.cycles, fixed.batch)
    rows = (*per_cycle, fixed.verify_rows)
    return ChunkOutput(
        tokens=jnp.full(rows, -1, jnp.int32),
        num_committed=jnp.zeros(per_cycle, jnp.int32),
        num_accepted=jnp.zeros(per_cycle, jnp.int32),
        num_proposed=jnp.zeros(per_cycle, jnp.int32),
        drafts=jnp.full((*per_cycle, fixed.num_drafts), -1, jnp.int32),
        hashes=jnp.zeros(rows, jnp.uint32) if options.certify else None,
        logprobs=jnp.zeros(rows, jnp.float32)
        if options.sampling is not None and options.sampling.logprobs
        else None,
        num_cycles=jnp.zeros((), jnp.int32),
        status=jnp.zeros((fixed.batch,), jnp.int32),
        widths=jnp.zeros((options.cycles,), jnp.int32) if options.verify_widths else None,
    )


def _append(out: ChunkOutput, record: StepOutput) -> ChunkOutput:
    """Write one step's records at the chunk's next index."""
    proposal, verification = record
    i = out.num_cycles

    def put(field, value):
        return field if value is None else lax.dynamic_update_index_in_dim(field, value, i, axis=0)

    return ChunkOutput(
        tokens=put(out.tokens, verification.committed),
        num_committed=put(out.num_committed, verification.num_committed),
        num_accepted=put(out.num_accepted, verification.num_accepted),
        num_proposed=put(out.num_proposed, jnp.maximum(verification.num_rows - 1, 0)),
        drafts=put(out.drafts, proposal.tokens),
        hashes=put(out.hashes, verification.hashes),
        logprobs=put(out.logprobs, verification.logprobs),
        num_cycles=i + 1,
        status=out.status,
        widths=put(out.widths, verification.width),
    )


def _publish(scratch: DflashScratch) -> DflashScratch:
    """Leave the dispatch's last block where the host reads it."""
    return scratch.replace(draft_tokens_host_pinned=scratch.draft_tokens_dev)
