"""The one place where golden tests touch the library: cases in, plain numpy arrays out.

Arrays come back under the names that the golden vectors use.
"""

from functools import partial
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from dflash_jax import drafters, loop, targets
from dflash_jax.acceptance import Noise, accept_drawn
from dflash_jax.config import RuleConfig
from dflash_jax.drafters import CommittedRows, backbone, confidence, dspark
from dflash_jax.drafters.proposal import SparseQ
from dflash_jax.fixed import plan
from dflash_jax.gdn_state import keep_rows
from dflash_jax.layers import linear, logits_of
from dflash_jax.metadata import indirect_args, rows_metadata, slots_at
from dflash_jax.options import DecodeOptions
from dflash_jax.pages import block_table
from dflash_jax.params import DraftParams, MarkovParams, Params, RuleParams
from dflash_jax.sampling import Purpose, SamplingOptions, mode_of, sampling_state
from dflash_jax.scratch import init_scratch
from dflash_jax.state import Status, init_buffers, init_state
from dflash_jax.targets.gated_delta import causal_conv
from dflash_jax.weights import load_drafter, load_target
from pallas_kernels.delta_rule_tiles import chunked_delta_rule
from tests.golden.nth_element import unsorted_top_k

PAGE_SIZE = 8  # small, so that blocks and prompts straddle pages
PREFILL_CHUNK = 16  # smaller than some prompts


class StepRecord(NamedTuple):
    """What a spec run's arrays say of one step; every array has the step's own rows."""

    start: int
    verify_block_ids: np.ndarray
    target_argmax: np.ndarray
    produced: int
    verify_logits: np.ndarray  # [rows, V]


def load_pair(target_folder, draft_folder, dtype=None):
    """Target and drafter; `dtype` forces both, by default each keeps its file's."""
    target = load_target(target_folder, dtype=dtype)
    return Params(target, load_drafter(draft_folder, target, dtype=dtype))


def plain_pair(target_folder):
    """A target that is decoded by itself."""
    target = load_target(target_folder)
    return Params(target, RuleParams(None, None, None, RuleConfig("none", max_drafts=0)))


def target_outputs(params, ids):
    """ids[B, T] in one call -> logits [B, T, V], hidden 0..L and final-norm rows [B, T, E]."""
    batch, rows = ids.shape
    taps = range(-1, len(params.target.layers))
    fixed = _plan(params, capacity=rows, batch=batch)
    buffers = _with_pages(init_buffers(fixed), fixed)

    @jax.jit
    def run(target, tokens, buffers):
        start = jnp.zeros((batch,), jnp.int32)
        count = jnp.full((batch,), rows, jnp.int32)
        meta = rows_metadata(start, count, buffers.meta.block_table, rows, fixed.page_size)
        args = indirect_args(start, count)
        out = targets.forward(
            target,
            tokens,
            meta,
            args,
            buffers,
            taps=tuple(taps),
            slots=buffers.verify_wy_tables,
            is_prefill=True,
        )
        return logits_of(out.hidden, target.lm_head), out.features, out.hidden

    flat = ids.reshape(-1).astype(np.int32)
    logits, features, hidden = (_f32(x) for x in run(params.target, flat, buffers))
    split = np.split(features, len(taps), axis=1)
    return (
        logits.reshape(batch, rows, -1),
        [x.reshape(batch, rows, -1) for x in split],
        hidden.reshape(batch, rows, -1),
    )


def kept_states(params, ids, prompt_len, counts):
    """One step of rows over a prompt, of which every sequence keeps another number.

    Args:
      ids: [T] one text for all sequences.
      prompt_len: tokens before the step.
      counts: [B] rows that are kept, the most of them the rows of the step.
    Returns:
      logits [R, V] of the step's rows, and a list a Gated-DeltaNet layer of what the next step
      starts from: state [B, Hv, Dk, Dv] and the rows in front of it [B, taps - 1, C].
    """
    batch, rows = len(counts), max(counts)
    pair = params.replace(draft=RuleParams(None, None, None, RuleConfig("prompt_lookup", rows - 1)))
    fixed = _plan(pair, capacity=prompt_len + 2 * rows, batch=batch)
    buffers = _with_pages(init_buffers(fixed), fixed)
    text = np.tile(ids.astype(np.int32), (batch, 1))
    start = jnp.zeros((batch,), jnp.int32)
    _, buffers = _rows(params.target, text[:, :prompt_len], start, buffers, fixed, is_prefill=True)
    step = text[:, prompt_len : prompt_len + rows]
    hidden, buffers = _rows(params.target, step, start + prompt_len, buffers, fixed)
    kept, slots = jnp.asarray(counts, jnp.int32), buffers.verify_wy_tables
    gdn = keep_rows(buffers.gdn, slots, jnp.full_like(kept, rows), kept)
    buffers = buffers.replace(gdn=gdn)
    _, buffers = _rows(params.target, step, start + prompt_len + kept, buffers, fixed)
    taps = params.target.config.gdn.conv_taps - 1
    states = [(_f32(x.state), _f32(x.conv[:, :taps])) for x in buffers.gdn.layers]
    return _f32(logits_of(hidden[:rows], params.target.lm_head)), states


@partial(jax.jit, static_argnames=("fixed", "is_prefill"))
def _rows(target, tokens, start, buffers, fixed, *, is_prefill=False):
    """Hidden rows of tokens[B, R] from positions start[B], and the buffers after them."""
    count = jnp.full_like(start, tokens.shape[1])
    table = buffers.meta.block_table
    meta = rows_metadata(start, count, table, tokens.shape[1], fixed.page_size)
    out = targets.forward(
        target,
        tokens.reshape(-1),
        meta,
        indirect_args(start, count),
        buffers,
        slots=buffers.verify_wy_tables,
        is_prefill=is_prefill,
    )
    return out.hidden, out.buffers


def delta_rule_rows(q, k, v, g, beta, state):
    """The op over all T rows of one sequence: outputs [T, Hv, Dv], states after each row.

    A sequence for every row, which keeps the rows up to it: that is how a state after it comes
    about in a decode.
    """
    count = len(q)
    rows = np.concatenate([x.reshape(1, count, -1) for x in (q, k, v)], axis=2)
    past = np.tile(rows[:, :, k[0].size :], (count, 1, 1))
    gates = [np.tile(x[None], (count, 1, 1)) for x in (g, beta)]
    slots = np.arange(count, dtype=np.int32)
    states = np.tile(state[None], (count, 1, 1, 1))
    one, none = np.ones(1, np.int32), np.zeros(1, np.int32)
    op = jax.jit(pk.gated_delta_rows, static_argnames="num_key_heads")
    heads = {"num_key_heads": k.shape[1]}
    in_front = states[:1], none, past[:1], gates[0][:1], gates[1][:1], none
    out, _ = op(rows, g[None], beta[None], one * count, *in_front, **heads)
    nothing = [np.zeros((count, 1, *x.shape[2:]), np.float32) for x in (rows, *gates)]
    no_rows = np.zeros(count, np.int32)
    _, after = op(*nothing, no_rows, states, slots, past, *gates, slots + 1, **heads)
    return np.asarray(out[0]), np.asarray(after)


def delta_rule_chunks(q, k, v, g, beta, state, normalise):
    """The chunked form over all rows: outputs [T, Hv, Dv] and the state after the last."""
    share = v.shape[1] // k.shape[1]
    if normalise:
        q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, share, axis=1) for x in (q * q.shape[-1] ** -0.5, k))
    inputs = [np.float32(x)[None] for x in (q, k, v, g, beta, state)]
    out, after = jax.jit(chunked_delta_rule)(*inputs, np.ones((1, len(q)), bool))
    return np.asarray(out[0]), np.asarray(after[0])


def convolved(rows, weight):
    """The causal convolution of rows [T, C] by weight [C, taps], from zeros."""
    taps = weight.shape[1]
    window = np.concatenate([np.zeros((taps - 1, rows.shape[1]), rows.dtype), rows])
    return np.asarray(jax.jit(causal_conv)(window[None], weight.T))[0]


def draft_steps(params, ids, features, schedule):
    """One block at each committed length of `schedule`, over a cache that grows.

    Args:
      ids: [T] the committed sequence.
      features: [T, M*E] target features of its tokens.
      schedule: committed lengths; each step feeds the features since the one before.
    Yields:
      {golden array name: array without its batch axis} a step.
    """
    config = params.draft.config
    fixed = _plan(params, capacity=int(schedule[-1]) + config.max_drafts + 1)
    state, scratch = init_state(fixed), init_scratch(config, fixed=fixed)
    buffers = _with_pages(init_buffers(fixed), fixed)
    fed, widest = 0, int(np.max(np.diff(schedule, prepend=0)))
    for start in (int(length) for length in schedule):
        new = np.zeros((widest, features.shape[1]), np.float32)  # one shape for all steps
        new[: start - fed] = features[fed:start]
        state = state.replace(
            seq_lens=np.array([start], np.int32),
            anchor=np.array([ids[start]], np.int32),
            status=np.array([Status.ACTIVE], np.int32),
        )
        fed_rows = new.astype(params.draft.fc.dtype), np.int32(fed), np.int32(start - fed)
        got, buffers, scratch = _draft_step(params, *fed_rows, state, buffers, scratch, fixed=fixed)
        yield _named(got, start - fed, start + config.block_rows)
        fed = start


@partial(jax.jit, static_argnames="fixed")
def _draft_step(params, features, fed, count, state, buffers, scratch, *, fixed):
    """Advance the drafter's context by `count` rows, then propose, keeping what each layer left."""
    draft, layers = params.draft, []
    offset = jnp.arange(features.shape[0], dtype=jnp.int32)
    positions = fed + offset
    slots = slots_at(buffers.meta.block_table, positions[None], fixed.page_size)[0]
    slots = jnp.where(offset < count, slots, -1)
    drafter, layer = drafters.get(draft), backbone.layer
    nothing = jnp.zeros_like(positions)  # context is made of features alone
    hidden = jnp.zeros((features.shape[0], 0), features.dtype)
    committed = CommittedRows(
        nothing, nothing, features, hidden, positions, slots, jnp.zeros_like(slots)
    )
    buffers, scratch = drafter.advance(params, committed, buffers, scratch, fixed=fixed)

    def recording(params_i, k_pool, v_pool, scratch_i, **kwargs):
        out = layer(params_i, k_pool, v_pool, scratch_i, **kwargs)
        layers.append((scratch_i.stream_buf, linear(out[2].attn_out, params_i.o), out))
        return out

    rows = jnp.full((fixed.batch,), fixed.verify_rows, jnp.int32)
    with mock.patch.object(backbone, "layer", recording):
        proposal, buffers, scratch = drafter.propose(
            params, state, rows, buffers, scratch, fixed=fixed, options=DecodeOptions()
        )
    got = {
        "fc_out": linear(features, draft.fc),
        "ctx": scratch.fc_proj[: features.shape[0]],
        "block_ids": scratch.draft_tokens_dev[: draft.config.block_rows],
        "noise_embedding": layers[0][0],
        "final_hidden": scratch.norm_buf,
        "logits": scratch.logits,
        "draft_ids": proposal.tokens[0],
    }
    for i, (_, projected, (k_pool, v_pool, after)) in enumerate(layers):
        got[f"layer{i}.attn_o_proj_out"] = projected
        got[f"layer{i}.out"] = after.stream_buf
        got[f"layer{i}.k_cache"] = _in_order(k_pool, buffers)
        got[f"layer{i}.v_cache"] = _in_order(v_pool, buffers)
    if draft.selector is not None:
        got |= _walk_arrays(draft, state, scratch)
    if draft.config.kind == "dspark":
        got |= _chain_arrays(draft, state, scratch, fixed)
    return got, buffers, scratch


def _chain_arrays(draft, state, scratch, fixed):
    """The base logits of a DSpark block with every row's bias, which the scratch keeps one of."""
    rows, base = backbone.draft_rows(scratch, draft.config, fixed), scratch.logits
    chain = dspark.decide(
        draft, rows, base[None], state.anchor, vocab=base.shape[1], every_bias=True
    )
    bias = jnp.concatenate(chain.biases) if chain.biases else jnp.zeros_like(base)
    got = {"base_logits": base, "markov_bias": bias, "corrected_logits": base + bias}
    if draft.confidence is not None:
        got["confidence_logits"] = scratch.conf_out[0]
    return got


def _walk_arrays(draft, state, scratch):
    """The selector's candidates and its scores on the way that it went."""
    top_k, selector = draft.config.selector_top_k, draft.selector
    lattice = (x[None] for x in (scratch.sel_vals, scratch.sel_idx, scratch.sel_hproj))
    codebooks = selector.predecessor, selector.successor
    _, scores = pk.selector_walk(state.anchor, *lattice, *codebooks, k=top_k)
    return {
        "unary": scratch.sel_vals[:, :top_k],
        "candidate_ids": scratch.sel_idx[:, :top_k],
        "walk_scores": scores[0, :, :top_k],
    }


def _in_order(pool, buffers):
    """[K, S, D]: the pool's rows by position, as golden caches are laid out."""
    pages = pool[buffers.meta.block_table[0]]  # [P, K, page_size, D]
    return jnp.moveaxis(pages, 1, 0).reshape(pool.shape[1], -1, pool.shape[3])


def _named(got, fed_rows, cache_rows):
    """Cut padding off; integers stay integers, floats become f32."""
    arrays = {name: np.asarray(x) for name, x in got.items()}
    for name in ("fc_out", "ctx"):
        arrays[name] = arrays[name][:fed_rows]
    for name in (name for name in arrays if name.endswith("_cache")):
        arrays[name] = arrays[name][:, :cache_rows]
    return {n: x if x.dtype.kind in "iu" else x.astype(np.float32) for n, x in arrays.items()}


def convolve(x, base, projection, sublayer_out, group_size, dtype):
    """Both sides of a convolution, [B, R, E] each, and the finish side's dynamic kernels."""
    dtype = jnp.dtype(dtype)
    inputs = (np.asarray(a).astype(dtype) for a in (x, base, projection, sublayer_out))
    return tuple(_f32(y) for y in _convolve(*inputs, group_size=group_size))


@partial(jax.jit, static_argnames="group_size")
def _convolve(x, base, projection, sublayer_out, *, group_size):
    batch, rows, width = x.shape
    dynamic = linear(x.reshape(-1, width), projection)
    dynamic = dynamic.reshape(batch, rows, 2, base.shape[1], width // group_size)
    prepared = pk.dynamic_conv(x, dynamic[:, :, 0], base[0])
    finished = pk.dynamic_conv(sublayer_out, dynamic[:, :, 1], base[1])
    return prepared, dynamic[:, :, 1], finished


def select(arrays):
    """Candidates, greedy path, its scores, and the scores of every edge, [B, J, ...] each."""
    names = ("hidden", "logits", "hidden_projection", "predecessor_codebook", "successor_codebook")
    inputs = (arrays[name] for name in names)
    anchor = arrays["anchor_ids"].astype(np.int32)
    got = _select(*inputs, anchor, count=arrays["candidate_ids_desc"].shape[-1])
    return {name: np.asarray(x) for name, x in got.items()}


@partial(jax.jit, static_argnames="count")
def _select(hidden, logits, projection, predecessor, successor, anchor, *, count):
    batch, rows = logits.shape[:2]
    vals, ids = pk.top16(logits.reshape(batch * rows, -1), k=count)
    projected = pk.skinny_matmul(hidden.reshape(batch * rows, -1), projection)
    blocks = [x.reshape(batch, rows, -1) for x in (vals, ids, projected)]
    path, scores = pk.selector_walk(anchor, *blocks, predecessor, successor, k=count)
    # Every edge is the first row of a walk whose anchor is the edge's predecessor.
    first = jnp.broadcast_to(anchor[:, None, None], (batch, 1, count))
    before = jnp.concatenate([first, blocks[1][:, :-1, :count]], axis=1).reshape(-1)
    edges = [jnp.repeat(x, count, axis=0)[:, None] for x in (vals, ids, projected)]
    _, edge_scores = pk.selector_walk(before, *edges, predecessor, successor, k=count)
    return {
        "candidate_ids_desc": blocks[1][..., :count],
        "unary_desc": blocks[0][..., :count],
        "greedy_path": path,
        "greedy_walk_scores": scores[..., :count],
        "edge_scores": edge_scores[:, 0, :count].reshape(batch, rows, count, count),
    }


def sampled_select(arrays, temperature, uniforms):
    """The path and q [B, J, C] of a walk that draws by uniforms [B, J]."""
    names = ("hidden", "logits", "hidden_projection", "predecessor_codebook", "successor_codebook")
    inputs = (arrays[name] for name in names)
    anchor = arrays["anchor_ids"].astype(np.int32)
    count = arrays["candidate_ids_desc"].shape[-1]
    noise = np.full(len(anchor), temperature, np.float32), uniforms
    path, q = _sampled_select(*inputs, anchor, *noise, count=count)
    return np.asarray(path), np.asarray(q)[..., :count]


@partial(jax.jit, static_argnames="count")
def _sampled_select(
    hidden, logits, projection, predecessor, successor, anchor, temperature, uniforms, *, count
):
    batch, rows = logits.shape[:2]
    vals, ids = pk.top16(logits.reshape(batch * rows, -1), k=count)
    projected = pk.skinny_matmul(hidden.reshape(batch * rows, -1), projection)
    blocks = [x.reshape(batch, rows, -1) for x in (vals, ids, projected)]
    path, _, q = pk.selector_walk_sampled(
        anchor, *blocks, predecessor, successor, temperature, uniforms, k=count
    )
    return path, q


def markov_chain(kind, arrays):
    """Biases [B, R, V] and tokens [B, R] of a Markov head on its own, greedily."""
    arrays = {n: jnp.asarray(x) for n, x in arrays.items()}
    tensors = {n.removeprefix("param."): x for n, x in arrays.items() if n.startswith("param.")}
    mix = {n.split(".")[-1]: x for n, x in tensors.items() if "proj" in n}
    head = MarkovParams(
        tensors["markov_w1.weight"],
        tensors["markov_w2.weight"],
        mix.get("weight"),
        mix.get("bias"),
    )
    hidden, base = arrays["hidden"], arrays["base_logits"]
    config = mock.Mock(markov_kind=kind, markov_rank=head.embed.shape[1], vocab=base.shape[-1])
    draft = DraftParams(None, None, None, None, (), None, None, config, markov=head)
    anchor = arrays["first_prev_token"]
    chain = dspark.decide(draft, hidden, base, anchor, vocab=base.shape[-1], every_bias=True)
    return np.stack(chain.biases, axis=1), np.asarray(chain.tokens)


def markov_biases(kind, arrays):
    """Biases [B, R, V] of a Markov head whose predecessors are given."""
    previous = arrays["teacher_prev_tokens"]
    # A large base logit forces each row's token, which is the next row's predecessor.
    base = np.zeros_like(arrays["base_logits"])
    batch, rows = np.indices(previous[:, 1:].shape)
    base[batch, rows, previous[:, 1:]] = 1e4
    forced = arrays | {"base_logits": base, "first_prev_token": previous[:, 0]}
    return markov_chain(kind, forced)[0]


def with_threshold(params, threshold):
    """The pair, keeping drafts before the first whose confidence is below `threshold`."""
    return params.replace(draft=confidence.with_threshold(params.draft, threshold))


def accept(p, q, drafts, uniforms, next_uniform):
    """Blocks p [N, R, V], q [N, R-1, V] or (ids, probabilities) -> num_accepted [N], tokens [N]."""
    own = SparseQ(np.int32(q[0]), np.float32(q[1])) if isinstance(q, tuple) else np.float32(q)
    rows = np.full(len(p), p.shape[1], np.int32)
    every = np.repeat(np.float32(next_uniform)[:, None], p.shape[1], axis=1)
    noise = Noise(np.float32(uniforms), every, every)
    count, tokens = _accept(np.float32(p), own, np.int32(drafts), rows, noise)
    return np.asarray(count), np.asarray(tokens)[np.arange(len(p)), count]


_accept = jax.jit(accept_drawn)


def sampled_generate(params, run, *, temperature, top_p, top_k):
    """Decode a recorded run whose random calls took `uniforms` one after another.

    The noise of a step is handed in where the library makes its own, and DFlash2's candidates come
    in the recorded order. DFlash draws its drafts, as it did in the recorded run.

    Returns:
      new tokens, how many each step gave, and the first three steps' (p, q, drafts, accepted).
    """
    # Every run has all filters, those without one the widest, so that they share executables.
    top_k = int(top_k) or params.target.config.vocab
    request = SamplingOptions(temperature=temperature, top_p=top_p, top_k=top_k, seed=0)
    mode = mode_of([request], samples_drafts=True)
    options = DecodeOptions(sampling=mode)
    prompt, uniforms = run["prompt"][0], iter(run["uniforms"])
    # The recorded DSpark loop drafts full blocks to the end, so the budget here is never near.
    is_spark = params.draft.config.kind == "dspark"
    wanted = run["output_ids"].size - len(prompt)
    budget = wanted + (params.draft.config.max_drafts + 2 if is_spark else 0)
    fixed = _plan(params, capacity=len(prompt) + budget + 8)
    first = np.float32(next(uniforms))
    state = _fresh_state(budget, (), None, fixed).replace(
        sampling=sampling_state(mode, [request], batch=1, vocab=fixed.logits.shape[1])
    )
    with mock.patch(
        "dflash_jax.distribution.uniforms", lambda keys, at, _: jnp.full(at.shape, first)
    ):
        carriers = _prefill(params, prompt, state, fixed, options)
    counts, records = [], []
    while _only(carriers[0].status) == Status.ACTIVE and sum(counts) + 1 < wanted:
        rows = _only(loop.rows_to_run(carriers[0], fixed))
        noise = {purpose: np.zeros((1, fixed.verify_rows), np.float32) for purpose in Purpose}
        for purpose in (Purpose.DRAFT, Purpose.ACCEPT):
            noise[purpose][0, : rows - 1] = [next(uniforms) for _ in range(rows - 1)]
        noise[Purpose.RESIDUAL][:] = noise[Purpose.TARGET][:] = next(uniforms)
        out, p, *carriers = _noisy_step(params, noise, *carriers, fixed=fixed, options=options)
        counts.append(_only(out.verification.num_committed))
        records.append((np.asarray(p), jax.device_get(out)))
    tokens = np.asarray(carriers[0].tokens)[0, : len(prompt) + wanted]
    return tokens, counts, records


@partial(jax.jit, static_argnames=("fixed", "options"))
def _noisy_step(params, noise, state, buffers, scratch, *, fixed, options):
    """A step of `loop` with its noise given, and the target's distributions of its rows."""
    seen = []

    def given(keys, positions, purpose):
        del keys
        return noise[purpose][:, : positions.shape[1]]

    def recorded(p, *args):
        seen.append(p)
        return accept_drawn(p, *args)

    top16 = pk.top16

    def in_recorded_order(logits, *, k, **how):
        values, ids = top16(logits, k=k, **how)
        wanted = jax.ShapeDtypeStruct((logits.shape[0], k), jnp.int32)
        order = jax.pure_callback(partial(_recorded_order, k=k), wanted, logits)
        values = values.at[:, :k].set(jnp.take_along_axis(logits, order, axis=1))
        return values, ids.at[:, :k].set(order)

    with (
        mock.patch("dflash_jax.sampling.uniforms", given),
        mock.patch("dflash_jax.verify.uniforms", given),
        mock.patch("dflash_jax.verify.accept_drawn", recorded),
        mock.patch.object(pk, "top16", in_recorded_order),
    ):
        out, *carriers = loop._step(params, state, buffers, scratch, fixed=fixed, options=options)
    return out, seen[0], *carriers


def _recorded_order(logits, *, k):
    return np.array([unsorted_top_k(row, k) for row in np.asarray(logits)], np.int32)


def spec_generate(params, prompt, max_new_tokens, stop_ids=(), *, capacity, keep=None):
    """Decode one prompt step by step, greedily.

    Args:
      prompt: [T] ids.
      capacity: tokens that the cache holds; runs with equal capacity share an executable.
      keep: drafts that may be kept a step, by default all; 0 decodes plainly.
    Returns:
      (prompt and new tokens, Status, StepRecord a step)
    """
    fixed = _plan(params, capacity=capacity)
    state = _fresh_state(max_new_tokens, stop_ids, keep, fixed)
    carriers = _prefill(params, prompt, state, fixed)
    records = []
    while _only(carriers[0].status) == Status.ACTIVE:
        before = _only(carriers[0].seq_lens), _only(carriers[0].anchor)
        out, *carriers = loop.step(params, *carriers, fixed=fixed)
        records.append(_record(*before, out, carriers[1]))
    state = carriers[0]
    length = _only(state.seq_lens) + 1
    return np.asarray(state.tokens)[0, :length], Status(_only(state.status)), records


def _fresh_state(max_new_tokens, stop_ids, keep, fixed):
    state = init_state(fixed)
    stops = np.full(state.stop_ids.shape, -1, np.int32)
    stops[0, : len(stop_ids)] = stop_ids
    return state.replace(
        remaining=jnp.array([max_new_tokens], jnp.int32),
        max_lens=jnp.array([fixed.capacity], jnp.int32),
        stop_ids=jnp.asarray(stops),
        keep=state.keep if keep is None else jnp.array([keep], jnp.int32),
    )


def _prefill(params, prompt, state, fixed, options=DecodeOptions()):  # noqa: B008 (frozen)
    """Carriers that hold the prompt and the first anchor."""
    buffers = _with_pages(init_buffers(fixed), fixed)
    carriers = [state, buffers, init_scratch(params.draft.config, fixed=fixed)]
    for at in range(0, len(prompt), PREFILL_CHUNK):
        chunk = np.zeros(PREFILL_CHUNK, np.int32)
        real = prompt[at : at + PREFILL_CHUNK]
        chunk[: len(real)] = real
        following = [*prompt[at + PREFILL_CHUNK : at + PREFILL_CHUNK + 1], -1][0]
        where = np.int32(len(real)), np.int32(0), np.int32(following)
        _, *carriers = loop.prefill(params, chunk, *where, *carriers, fixed=fixed, options=options)
    return carriers


def _record(start, anchor, out, buffers):
    """A step's records, cut to the rows that were verified."""
    verification = out.verification
    rows = _only(verification.num_rows)
    block = np.concatenate([[anchor], np.asarray(out.proposal.tokens)[0, : rows - 1]])
    return StepRecord(
        start=start,
        verify_block_ids=block,
        target_argmax=np.asarray(verification.committed)[0, :rows],
        produced=_only(verification.num_committed),
        verify_logits=np.asarray(buffers.logits)[:rows],
    )


def head_drafts(params, hidden, tokens, lengths, num_drafts):
    """What an MTP head makes of committed texts of `lengths`, one sequence each.

    Args:
      hidden: [T, E] the target's rows; tokens: [T + 1] ids; every text is a start of them.
    Returns:
      drafts [B, J], the head's outputs [B, J, E] and logits [B, J, V].
    """
    batch = len(lengths)
    fixed = _plan(params, capacity=len(tokens) + num_drafts, batch=batch, num_drafts=num_drafts)
    state = init_state(fixed).replace(
        seq_lens=jnp.asarray(lengths, jnp.int32),
        anchor=jnp.asarray(tokens[np.asarray(lengths)], jnp.int32),
        status=jnp.full((batch,), int(Status.ACTIVE), jnp.int32),
    )
    buffers = _with_pages(init_buffers(fixed), fixed)
    scratch = init_scratch(params.draft.config, fixed=fixed)
    rows = jnp.asarray(hidden, params.target.embed.dtype), jnp.asarray(tokens, jnp.int32)
    got = _head_step(params, *rows, state, buffers, scratch, fixed=fixed)
    drafts, *rest = (np.asarray(x) for x in got)
    return drafts, *(_f32(x).reshape(batch, num_drafts, -1) for x in rest)


@partial(jax.jit, static_argnames="fixed")
def _head_step(params, hidden, tokens, state, buffers, scratch, *, fixed):
    """Commit every text in one call, then propose."""
    count, drafter = hidden.shape[0], drafters.get(params.draft)
    offset = jnp.tile(jnp.arange(count, dtype=jnp.int32)[None], (fixed.batch, 1))
    slots = slots_at(buffers.meta.block_table, offset, fixed.page_size)
    slots = jnp.where(offset < state.seq_lens[:, None], slots, -1)
    committed = CommittedRows(
        tokens=tokens[offset].reshape(-1),
        next_tokens=tokens[offset + 1].reshape(-1),
        features=jnp.zeros((fixed.batch * count, 0), hidden.dtype),
        hidden=hidden[offset].reshape(-1, hidden.shape[1]),
        positions=offset.reshape(-1),
        slots=slots.reshape(-1),
        sequences=jnp.repeat(jnp.arange(fixed.batch, dtype=jnp.int32), count),
    )
    buffers, scratch = drafter.advance(params, committed, buffers, scratch, fixed=fixed)
    rows = jnp.full((fixed.batch,), fixed.verify_rows, jnp.int32)
    proposal, _, scratch = drafter.propose(params, state, rows, buffers, scratch, fixed=fixed)
    return proposal.tokens, scratch.norm_buf, scratch.logits


def _plan(params, *, capacity, batch=1, num_drafts=None):
    return plan(
        params.target.config,
        params.draft.config,
        batch=batch,
        max_context=capacity,
        num_drafts=num_drafts,
        page_size=PAGE_SIZE,
        prefill_chunk=32,
        dtype=str(params.target.embed.dtype),
    )


def _with_pages(buffers, fixed):
    """Give every sequence all its pages, the last page of the pool first."""
    pages = np.arange(fixed.num_pages, dtype=np.int32)[::-1].reshape(fixed.batch, -1)
    table = jnp.asarray(block_table(list(pages), pages.shape[1]))
    return buffers.replace(meta=buffers.meta.replace(block_table=table))


def _only(per_sequence):
    """The value of the one sequence there is."""
    return int(np.asarray(per_sequence)[0])


def _f32(x):
    return np.asarray(x, np.float32)
