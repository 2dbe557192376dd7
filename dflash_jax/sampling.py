"""What a request asks of sampling, what of it is compiled in, and the noise of every draw.

`SamplingOptions` is a request's wish (host), `SamplingMode` what a batch's executable can do
(static), `SamplingState` each sequence's numbers (device, in `DecodeState`; None decodes greedily).

Noise is a function of (seed, absolute position, purpose) alone, so an answer does not depend on
the batch around it. Purposes never share noise. A draw of the target has the same noise whether
drafts were kept or not: where every draft is a point mass, a drafted and a plain decode of one seed
give the same tokens. How a drafter draws:

    u = draft_uniforms(state.sampling, state.seq_lens, fixed.num_drafts)  # f32[B, num_drafts]
    q = distribution.draft_distribution(logits, state.sampling.temperature, vocab=...)  # of draft j
    token = distribution.draw(q, u[:, j])

and it returns the q that it drew from in `Proposal.q`; None says that drafts were not drawn.
"""

from __future__ import annotations

import enum
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dflash_jax.shapes import check_integers
from dflash_jax.words import counted

GREEDY_BELOW = 1e-5  # a temperature below it takes the best token (spec/verify.md §8)
SEED_BITS = 64

MaybeArray = jax.Array | None


class Purpose(enum.IntEnum):
    """What a uniform is for; folded into its key."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    TARGET = 3  # the target's own draw: bonus token, first token, each row under point masses


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How one request picks its tokens.

    Order: logit bias, repetition penalty, presence and frequency penalties, temperature, top-k,
    top-p, min-p. Filters and penalties change the target's distribution, which the answer follows.

    temperature: 0, like all below 1e-5, takes the best token; top_k, top_p, min_p and seed then
      have no meaning and are refused.
    top_k: keep the k most likely tokens.
    top_p: keep the most likely tokens until their probabilities reach it; at least one.
    min_p: keep tokens at least this times as likely as the most likely one.
    repetition_penalty: divides positive logits, multiplies others, of tokens in prompt or answer.
    presence_penalty, frequency_penalty: taken from logits of tokens in the answer, once and per
      occurrence.
    logit_bias: {token id: added to its logit}.
    seed: 0 to 2^64 - 1; equal seeds give equal answers. Without one, each request draws its own.
    logprobs: report each token's log-probability under the model itself, before all of the above.
    stop: texts that end the answer; needs a tokenizer.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: bool = False
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._settle("logit_bias", _bias_pairs(self.logit_bias))
        self._settle("stop", _stop_strings(self.stop))
        _check_numbers(self)
        _check_integers(self)
        if not isinstance(self.logprobs, bool):
            raise TypeError(f"sampling: logprobs is {self.logprobs!r}, wanted True or False")
        if self.is_random:
            return
        for name in ("top_k", "top_p", "min_p", "seed"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"sampling: {name} is {getattr(self, name)}, but temperature "
                    f"{self.temperature} always takes the best token; wanted a temperature from "
                    f"{GREEDY_BELOW}"
                )

    def _settle(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn at all."""
        return self.temperature >= GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before counts."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def with_seed(request: SamplingOptions) -> SamplingOptions:
    """The request with a seed of its own, if it draws and has none."""
    if not request.is_random or request.seed is not None:
        return request
    return replace(request, seed=secrets.randbits(53))  # what readers of JSON keep of an integer


def _bias_pairs(given: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(given).items()
    except (TypeError, ValueError):
        raise TypeError(f"sampling: logit_bias is {given!r}, wanted {{token id: number}}") from None
    for index, value in pairs:
        check_integers("sampling", logit_bias=index)
        _check_number("logit_bias", value)
    return tuple(sorted((int(index), float(value)) for index, value in pairs))


def _stop_strings(given: Any) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"sampling: stop is {given!r}, wanted texts")
    if "" in texts:
        raise ValueError("sampling: stop has an empty text, which would end every answer at once")
    return tuple(texts)


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real | np.number):
        raise TypeError(f"sampling: {name} is {value!r}, wanted a number")
    if not isinstance(value, int) and not math.isfinite(value):  # an int may pass every float
        raise ValueError(f"sampling: {name} is {value}, wanted a finite number")
    is_fit, wanted = _RANGES[name]
    if not is_fit(value):
        raise ValueError(f"sampling: {name} is {value}, wanted {wanted}")


# Logits stay finite in f32 at every value that is allowed.
_RANGES = {
    "temperature": (lambda x: 0 <= x <= 1e4, "0 to 10000"),
    "top_p": (lambda x: 0 < x <= 1, "above 0, up to 1"),
    "min_p": (lambda x: 0 <= x <= 1, "0 to 1"),
    "repetition_penalty": (lambda x: 0.01 <= x <= 100, "0.01 to 100"),
    "presence_penalty": (lambda x: abs(x) <= 100, "-100 to 100"),
    "frequency_penalty": (lambda x: abs(x) <= 100, "-100 to 100"),
    "logit_bias": (lambda x: abs(x) <= 1e4, "-10000 to 10000"),
}


def _check_numbers(options: SamplingOptions) -> None:
    for name in (name for name in _RANGES if name != "logit_bias"):
        value = getattr(options, name)
        if value is None and name in ("top_p", "min_p"):
            continue
        _check_number(name, value)


def _check_integers(options: SamplingOptions) -> None:
    check_integers("sampling", top_k=options.top_k, seed=options.seed)
    if options.top_k is not None and options.top_k < 1:
        raise ValueError(f"sampling: top_k is {options.top_k}, wanted at least 1")
    if options.seed is not None and not 0 <= options.seed < 2**SEED_BITS:
        raise ValueError(f"sampling: seed is {options.seed}, wanted 0 to 2^{SEED_BITS} - 1")


GREEDY = SamplingOptions(temperature=0.0)


@dataclass(frozen=True, slots=True)
class SamplingMode:
    """What a compiled step can do beyond taking the best token; what is off costs nothing.

    is_random: draw tokens of sequences whose temperature is above 0. samples_drafts: the drafter
    draws its drafts and says from which distribution; else each draft is a point mass.
    """

    is_random: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    bias: bool = False
    logprobs: bool = False
    samples_drafts: bool = False

    def __post_init__(self) -> None:
        if self.samples_drafts and not self.is_random:
            raise ValueError(
                "sampling: a mode with samples_drafts and without is_random, wanted both: drafts "
                "are drawn where tokens are"
            )
        filters = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name)]
        if filters and not self.is_random:
            raise ValueError(
                f"sampling: contradictory options, a mode with {', '.join(filters)} and without "
                "is_random, which always takes the best token; wanted both or neither"
            )


def mode_of(requests: Sequence[SamplingOptions], *, samples_drafts: bool) -> SamplingMode | None:
    """What a step needs for all of the requests; None if each takes the best token and no more."""
    is_random = any(one.is_random for one in requests)
    mode = SamplingMode(
        is_random=is_random,
        top_k=any(one.top_k is not None for one in requests),
        top_p=any(one.top_p is not None for one in requests),
        min_p=any(one.min_p is not None for one in requests),
        penalties=any(one.has_penalties for one in requests),
        bias=any(one.logit_bias for one in requests),
        logprobs=any(one.logprobs for one in requests),
        samples_drafts=samples_drafts and is_random,
    )
    return None if mode == SamplingMode() else mode


class SamplingState(struct.PyTreeNode):
    """Each sequence's numbers; None where the mode has no use for them."""

    keys: MaybeArray = None  # u32[B, 2] of the seeds
    temperature: MaybeArray = None  # f32[B]; below GREEDY_BELOW the best token is taken
    top_k: MaybeArray = None  # i32[B]; V and more keep all
    top_p: MaybeArray = None  # f32[B]; 1 keeps all
    min_p: MaybeArray = None  # f32[B]; 0 keeps all
    repetition: MaybeArray = None  # f32[B]
    presence: MaybeArray = None  # f32[B]
    frequency: MaybeArray = None  # f32[B]
    bias: MaybeArray = None  # f32[B, V]
    counts: MaybeArray = None  # i32[B, V] of the answer so far, the anchor included
    in_prompt: MaybeArray = None  # bool[B, V]

    def after(self, tokens: jax.Array, is_new: jax.Array) -> SamplingState:
        """Count tokens i32[B, X] that joined the answers, those where bool[B, X] `is_new`."""
        if self.counts is None:
            return self
        sequence = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        return self.replace(counts=self.counts.at[sequence, tokens].add(is_new.astype(jnp.int32)))

    def after_prompt(
        self, sequence: jax.Array, tokens: jax.Array, is_real: jax.Array
    ) -> SamplingState:
        """Note tokens i32[T] of one sequence's prompt, those where bool[T] `is_real`."""
        if self.in_prompt is None:
            return self
        column = jnp.where(is_real, tokens, self.in_prompt.shape[1])
        return self.replace(in_prompt=self.in_prompt.at[sequence, column].set(True, mode="drop"))

    def of(self, sequence: jax.Array) -> SamplingState:
        """One sequence's numbers, as a batch of one."""
        return jax.tree.map(lambda x: x[sequence][None], self)

    def rows(self, count: int) -> SamplingState:
        """The numbers of a filter for `count` rows a sequence, [B] to [B * count]."""
        filters = ("temperature", "top_k", "top_p", "min_p")
        given = {name: getattr(self, name) for name in filters}
        return SamplingState(
            **{n: None if x is None else jnp.repeat(x, count) for n, x in given.items()}
        )


def sampling_state(
    mode: SamplingMode, requests: Sequence[SamplingOptions] = (), *, batch: int, vocab: int
) -> SamplingState:
    """State of a batch before its prompts are run; rows without a request take the best token.

    Raises:
      ValueError: more requests than rows, or a random one without a seed.
    """
    if len(requests) > batch:
        raise ValueError(f"sampling: {counted(len(requests), 'request')} for a batch of {batch}")
    every = [*requests, *[GREEDY] * (batch - len(requests))]

    def column(name: str, off: float, dtype: Any) -> jax.Array:
        values = (getattr(one, name) for one in every)
        return jnp.asarray(np.array([off if x is None else x for x in values], dtype))

    def at_most_all(k: int | None) -> int:
        return vocab if k is None else min(k, vocab)  # before it becomes an i32

    fields: dict[str, jax.Array] = {}
    if mode.is_random:
        fields["keys"] = jnp.asarray(np.stack([_key(one) for one in every]))
        fields["temperature"] = column("temperature", 0.0, np.float32)
    if mode.top_k:
        fields["top_k"] = jnp.asarray([at_most_all(one.top_k) for one in every], jnp.int32)
    for name, off in (("top_p", 1.0), ("min_p", 0.0)):
        if getattr(mode, name):
            fields[name] = column(name, off, np.float32)
    if mode.bias:
        bias = np.zeros((batch, vocab), np.float32)
        for row, one in enumerate(every):
            for index, value in dict(one.logit_bias).items():
                bias[row, index] = value
        fields["bias"] = jnp.asarray(bias)
    if mode.penalties:
        for name in ("repetition", "presence", "frequency"):
            fields[name] = column(f"{name}_penalty", 0.0, np.float32)
        fields["counts"] = jnp.zeros((batch, vocab), jnp.int32)
        fields["in_prompt"] = jnp.zeros((batch, vocab), bool)
    return SamplingState(**fields)


def _key(request: SamplingOptions) -> np.ndarray:
    """u32[2]: the words of the seed, as `jax.random.key` takes them for threefry."""
    if request.seed is None:
        if request.is_random:
            raise ValueError("sampling: a request at a temperature above 0 has no seed yet")
        return np.zeros(2, np.uint32)
    return np.array([request.seed >> 32, request.seed & 0xFFFFFFFF], np.uint32)


def uniforms(keys: jax.Array, positions: jax.Array, purpose: Purpose) -> jax.Array:
    """Noise f32[B, X] in [0, 1), multiples of 2^-24, of the tokens at absolute positions i32[B, X].

    The hash by which threefry folds a number into a key is itself random bits, of which the first
    24 are taken: the form of `jax.random.bits` depends on settings of the user's, this does not.
    """

    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        key = jax.random.fold_in(jax.random.fold_in(key, position), int(purpose))
        return jax.random.key_data(key)[0]

    words = jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, positions)
    return (words >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)


def positions_behind(seq_lens: jax.Array, rows: int) -> jax.Array:
    """i32[B, rows]: where the token behind each row of a block stands; the anchor is row 0."""
    return seq_lens[:, None] + 1 + jnp.arange(rows, dtype=jnp.int32)[None]


def draft_uniforms(sampling: SamplingState, seq_lens: jax.Array, num_drafts: int) -> jax.Array:
    """Noise f32[B, num_drafts] to draw the drafts of a step with, draft j behind block row j."""
    assert sampling.keys is not None  # a mode that samples drafts is random
    return uniforms(sampling.keys, positions_behind(seq_lens, num_drafts), Purpose.DRAFT)
