"""The target writes conversations, many rows in lockstep: a user turn sampled, the answer greedy.

Every row is a small state machine. Its prompt is forced; then the target plays the user (sampled)
until it ends the turn, the chat template's words are forced, and it answers greedily as it will at
inference. After an answer a second user turn may follow. One token a row a step, no prefill: the
forced tokens are a tenth of the text. The cache grows in phases, so that early steps read little.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax.layers import rms_norm, rope_angles
from dflash_jax.params import TargetParams
from dflash_jax.train.dense import target_qkv, target_tail

PROMPT, USER, ANSWER, END = 0, 1, 2, 3  # roles of tokens; END pads
_FORCED, _USER, _TURN, _ANSWER, _NEXT, _DONE = range(6)  # modes of a row
_GROUP = 128  # vocabulary columns a group when sampling


@dataclass(frozen=True, slots=True)
class ChatRules:
    """Ids that steer a conversation, and how the user's part is sampled.

    `turn` ends a user turn and opens an answer; its first token is the one that ends a turn.
    `next_turn` opens another user turn. `banned` ids are never sampled.
    """

    turn: tuple[int, ...]
    next_turn: tuple[int, ...]
    stops: tuple[int, ...]
    banned: tuple[int, ...]
    min_p: float = 0.05
    second_turn_chance: float = 0.6
    second_turn_room: int = 128
    second_turn_limit: int = 48

    @property
    def end_of_turn(self) -> int:
        return self.turn[0]


class Openings(NamedTuple):
    """How each row begins; host arrays."""

    prompts: np.ndarray  # i32[B, T]
    lengths: np.ndarray  # i32[B] tokens of the prompt, at least 1
    answers_next: np.ndarray  # bool[B] the prompt ends where the answer begins
    user_limits: np.ndarray  # i32[B] most tokens that the user may add
    quote_limits: np.ndarray  # i32[B] the turn ends at this many docstring quotes; 0: never


@struct.dataclass
class Rows:
    """Carry of the generator."""

    tokens: jax.Array  # i32[B, T]
    roles: jax.Array  # i8[B, T]
    mode: jax.Array  # i32[B] how the next token is made
    count: jax.Array  # i32[B] tokens made in this mode
    quotes: jax.Array  # i32[B] docstring quotes in this user turn
    limit: jax.Array  # i32[B] length of this user turn at most


def start_rows(openings: Openings) -> Rows:
    """Rows that hold the first token of their prompt."""
    prompts = jnp.asarray(openings.prompts, jnp.int32)
    lengths = jnp.asarray(openings.lengths, jnp.int32)
    after = jnp.where(jnp.asarray(openings.answers_next), _ANSWER, _USER)
    zeros = jnp.zeros(lengths.shape, jnp.int32)
    return Rows(
        tokens=jnp.zeros_like(prompts).at[:, 0].set(prompts[:, 0]),
        roles=jnp.zeros(prompts.shape, jnp.int8),
        mode=jnp.where(lengths > 1, _FORCED, after),
        count=jnp.where(lengths > 1, 1, 0),
        quotes=zeros,
        limit=jnp.asarray(openings.user_limits, jnp.int32),
    )


def next_logits(
    params: TargetParams,
    tokens: jax.Array,
    t: jax.Array,
    caches: tuple[tuple[jax.Array, jax.Array], ...],
) -> tuple[jax.Array, tuple[tuple[jax.Array, jax.Array], ...]]:
    """f32[B, V] logits after tokens[B] at position t, and the caches with that token written.

    Args:
      caches: keys and values [B, K, S, D] a layer; positions up to t are read.
    """
    config = params.config
    batch, size = tokens.shape[0], caches[0][0].shape[2]
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    position = jnp.broadcast_to(t, (batch,))
    cos, sin = rope_angles(position, config.rope, dim, config.max_context)
    past = jnp.arange(size) <= t
    x = params.embed[tokens]
    written = []
    for layer, (k_cache, v_cache) in zip(params.layers, caches, strict=True):
        q, k, v = target_qkv(layer, x, cos, sin, config)
        k_cache = jax.lax.dynamic_update_slice_in_dim(k_cache, k[:, :, None], t, axis=2)
        v_cache = jax.lax.dynamic_update_slice_in_dim(v_cache, v[:, :, None], t, axis=2)
        q = q.reshape(batch, kv_heads, heads // kv_heads, dim)
        scores = jnp.einsum("bkgd,bksd->bkgs", q, k_cache, preferred_element_type=jnp.float32)
        probs = jax.nn.softmax(jnp.where(past, scores * dim**-0.5, -jnp.inf), axis=-1)
        attended = jnp.einsum(
            "bkgs,bksd->bkgd", probs.astype(x.dtype), v_cache, preferred_element_type=x.dtype
        )
        x = target_tail(layer, x, attended.reshape(batch, -1), config)
        written.append((k_cache, v_cache))
    hidden = rms_norm(x, params.norm, config.rms_eps)
    logits = jnp.einsum("be,ve->bv", hidden, params.lm_head, preferred_element_type=jnp.float32)
    if config.real_vocab < config.vocab:  # rows that pad the head are never emitted
        logits = jnp.where(jnp.arange(config.vocab) < config.real_vocab, logits, -jnp.inf)
    return logits, tuple(written)


def sample(logits: jax.Array, uniform: jax.Array, min_p: float) -> jax.Array:
    """Ids i32[B] from softmax(f32[B, V]) cut below `min_p` times its largest probability.

    The inverse of the distribution function in two levels, a group of columns and a column in it:
    one draw u in [0, 1) a row, and no random number or sort over the vocabulary.
    """
    rows, vocab = logits.shape
    top = logits.max(-1, keepdims=True)
    mass = jnp.where(logits >= top + jnp.log(min_p), jnp.exp(logits - top), 0.0)
    mass = jnp.pad(mass, ((0, 0), (0, -vocab % _GROUP))).reshape(rows, -1, _GROUP)
    by_group = jnp.cumsum(mass.sum(-1), axis=-1)
    point = uniform * by_group[:, -1]
    group = jnp.sum(by_group <= point[:, None], axis=-1)
    group = jnp.minimum(group, by_group.shape[1] - 1)
    inner = jnp.take_along_axis(mass, group[:, None, None], axis=1)[:, 0]  # [B, 128]
    before = jnp.take_along_axis(by_group, group[:, None], axis=1)[:, 0] - inner.sum(-1)
    column = jnp.sum(jnp.cumsum(inner, axis=-1) <= (point - before)[:, None], axis=-1)
    last = inner.shape[-1] - 1 - jnp.argmax(inner[:, ::-1] > 0, axis=-1)  # rounding may overshoot
    return (group * _GROUP + jnp.minimum(column, last)).astype(jnp.int32)


def _user_token(logits: jax.Array, rows: Rows, uniform: jax.Array, rules: ChatRules) -> jax.Array:
    """A sampled token for the user's turn, which does not end before it began."""
    columns = jnp.arange(logits.shape[1])
    banned = jnp.isin(columns, jnp.asarray(rules.banned, jnp.int32))
    ends = (columns == rules.end_of_turn) & (rows.count == 0)[:, None]
    return sample(jnp.where(banned | ends, -jnp.inf, logits), uniform, rules.min_p)


def advance(
    rows: Rows,
    logits: jax.Array,
    t: jax.Array,
    uniform: jax.Array,
    openings: Openings,
    rules: ChatRules,
    quotes_in: jax.Array,
) -> Rows:
    """Choose the token at t + 1 of every row and move its state machine.

    Args:
      logits: f32[B, V] after the token at t.
      uniform: f32[2, B] draws for sampling and for second turns.
      quotes_in: i32[V] docstring quotes in each vocabulary entry.
    """
    length = rows.tokens.shape[1]
    mode, count = rows.mode, rows.count
    prompt_token = jax.lax.dynamic_index_in_dim(openings.prompts, t + 1, 1, keepdims=False)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    sampled = jax.lax.cond(
        jnp.any(mode == _USER),
        lambda: _user_token(logits, rows, uniform[0], rules),
        lambda: greedy,
    )
    turn, opening = jnp.asarray(rules.turn, jnp.int32), jnp.asarray(rules.next_turn, jnp.int32)
    by_mode = (
        prompt_token,
        sampled,
        turn[jnp.minimum(count, len(rules.turn) - 1)],
        greedy,
        opening[jnp.minimum(count, len(rules.next_turn) - 1)],
        jnp.full_like(greedy, rules.end_of_turn),
    )
    token = jnp.select([mode == m for m in range(6)], by_mode)
    role_of = jnp.asarray([PROMPT, USER, PROMPT, ANSWER, PROMPT, END], jnp.int8)
    count = count + 1
    quotes = jnp.where(mode == _USER, rows.quotes + quotes_in[token], 0)

    prompt_over = (mode == _FORCED) & (t + 2 >= openings.lengths)
    after_prompt = jnp.where(openings.answers_next, _ANSWER, _USER)
    ended = token == rules.end_of_turn
    quoted = (openings.quote_limits > 0) & (quotes >= openings.quote_limits)
    user_over = (mode == _USER) & (ended | quoted | (count >= rows.limit))
    turn_over = (mode == _TURN) & (count >= len(rules.turn))
    answer_over = (mode == _ANSWER) & jnp.isin(token, jnp.asarray(rules.stops, jnp.int32))
    goes_on = ended & (uniform[1] < rules.second_turn_chance)
    goes_on &= (t + 2 + rules.second_turn_room < length) & ~openings.answers_next
    next_over = (mode == _NEXT) & (count >= len(rules.next_turn))

    new_mode = jnp.select(
        [prompt_over, user_over, turn_over, answer_over, next_over],
        [
            after_prompt,
            jnp.full_like(mode, _TURN),
            jnp.full_like(mode, _ANSWER),
            jnp.where(goes_on, _NEXT, _DONE),
            jnp.full_like(mode, _USER),
        ],
        mode,
    )
    skips_end = user_over & ended  # the end of the turn is there already
    count = jnp.where(new_mode == mode, count, jnp.where(skips_end, 1, 0))
    return Rows(
        tokens=jax.lax.dynamic_update_index_in_dim(rows.tokens, token, t + 1, 1),
        roles=jax.lax.dynamic_update_index_in_dim(rows.roles, role_of[mode], t + 1, 1),
        mode=new_mode,
        count=count,
        quotes=quotes,
        limit=jnp.where(mode == _NEXT, rules.second_turn_limit, rows.limit),
    )


@partial(jax.jit, static_argnames=("rules",), donate_argnames=("rows", "caches"))
def run_phase(
    params: TargetParams,
    openings: Openings,
    quotes_in: jax.Array,
    key: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    rows: Rows,
    caches: tuple[tuple[jax.Array, jax.Array], ...],
    *,
    rules: ChatRules,
) -> tuple[Rows, tuple[tuple[jax.Array, jax.Array], ...]]:
    """Steps t = start..stop-1: the token at t is read, the one at t + 1 is chosen."""

    def step(t, carry):
        rows, caches = carry
        current = jax.lax.dynamic_index_in_dim(rows.tokens, t, 1, keepdims=False)
        logits, caches = next_logits(params, current, t, caches)
        uniform = jax.random.uniform(jax.random.fold_in(key, t), (2, current.shape[0]), jnp.float32)
        return advance(rows, logits, t, uniform, openings, rules, quotes_in), caches

    return jax.lax.fori_loop(start, stop, step, (rows, caches))


def generate(
    params: TargetParams,
    openings: Openings,
    quotes_in: jax.Array,
    key: jax.Array,
    rules: ChatRules,
    phases: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Write every row to its end: (tokens i32[B, T], roles i8[B, T]) on the device.

    Args:
      phases: ascending cache sizes; the last is T.
    """
    config = params.config
    batch, length = openings.prompts.shape
    if phases[-1] != length or list(phases) != sorted(set(phases)):
        raise ValueError(f"generate: phases {phases}, wanted ascending sizes that end at {length}")
    on_device: Openings = jax.tree.map(jnp.asarray, openings)
    rows = start_rows(openings)
    dtype = params.embed.dtype
    caches, start = (), 0
    for size in phases:
        if not caches:
            shape = batch, config.num_kv_heads, size, config.head_dim
            caches = tuple(
                (jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in params.layers
            )
        else:
            grow = [(0, 0), (0, 0), (0, size - start), (0, 0)]
            caches = jax.tree.map(lambda x: jnp.pad(x, grow), caches)  # noqa: B023
        stop = min(size, length - 1)
        rows, caches = run_phase(
            params,
            on_device,
            quotes_in,
            key,
            jnp.int32(start),
            jnp.int32(stop),
            rows,
            caches,
            rules=rules,
        )
        start = size
    return rows.tokens, rows.roles
