"""The generator's lockstep state machine against one row written slowly, and against decoding."""

import dataclasses
from collections.abc import Iterator
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.train.generate import (
    ANSWER,
    END,
    PROMPT,
    USER,
    ChatRules,
    Openings,
    generate,
    next_logits,
    sample,
)
from tests.kit import pair
from tests.reference import loop as reference

VOCAB, LENGTH = 307, 64
STOP, TURN, NEXT, BANNED, QUOTED = 1, (2, 200, 201), (210, 211), (3, 5), 4
# The kit's models emit ids below 12 here: an answer or a turn ends within a dozen tokens.
RULES = ChatRules(
    turn=TURN, next_turn=NEXT, stops=(STOP, TURN[0]), banned=BANNED, second_turn_room=20,
    second_turn_limit=6,
)  # fmt: skip


def openings() -> Openings:
    """Rows that take every way through the machine: some by design, the others at random."""
    rng = np.random.default_rng(0)
    lengths = [1, 9, 5, 12, 3, 60, 2, 7, 64, 4, 1, 6, *rng.integers(1, 20, 20)]
    answers_next = [0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0, *([0] * 20)]
    limits = [9, 1, 30, 1, 40, 9, 2, 5, 5, 40, 5, 40, *rng.integers(3, 40, 20)]
    quote_limits = [0, 0, 1, 1, 0, 0, 0, 0, 0, 2, 0, 0, *rng.integers(0, 3, 20)]
    prompts = rng.integers(20, 300, (len(lengths), LENGTH))
    i32 = lambda x: np.asarray(x, np.int32)
    return Openings(
        i32(prompts), i32(lengths), np.asarray(answers_next, bool), i32(limits), i32(quote_limits)
    )


def quotes_in() -> np.ndarray:
    return (np.arange(VOCAB) == QUOTED).astype(np.int32)


@pytest.fixture(scope="module")
def models():
    return pair("llama", "dflash", alphabet=12)


@pytest.fixture(scope="module")
def written(models) -> tuple[np.ndarray, np.ndarray]:
    key = jax.random.key(7)
    phases = (LENGTH // 2, LENGTH)
    found = generate(models.params.target, openings(), jnp.asarray(quotes_in()), key, RULES, phases)
    return np.asarray(found[0]), np.asarray(found[1])


def min_p_sample(logits: np.ndarray, uniform: float, forbidden: list[int]) -> int:
    """The first id at which the distribution function passes `uniform`."""
    logits = logits.copy()
    logits[forbidden] = -np.inf
    mass = np.exp(logits - logits.max())
    mass[mass < RULES.min_p] = 0.0
    return int(np.flatnonzero(np.cumsum(mass) > uniform * mass.sum())[0])


def slow_row(
    logits: np.ndarray, uniforms: np.ndarray, row: int, begin: Openings
) -> Iterator[tuple[int, int]]:
    """(token, role) from position 0 on; `logits[t]` are those after the token at t.

    Args:
      uniforms: [T, 2] draws for the token at t + 1 and for a second turn after it.
    """
    at = -1

    def put(token: int, role: int) -> tuple[int, int]:
        nonlocal at
        at += 1
        return int(token), role

    for token in begin.prompts[row, : begin.lengths[row]]:
        yield put(token, PROMPT)
    limit = begin.user_limits[row]
    while True:
        if not begin.answers_next[row]:
            count, quotes, token = 0, 0, -1
            while token != TURN[0] and count < limit:
                forbidden = [*BANNED, *([] if count else [TURN[0]])]
                token = min_p_sample(logits[at], uniforms[at, 0], forbidden)
                yield put(token, USER)
                count, quotes = count + 1, quotes + quotes_in()[token]
                if begin.quote_limits[row] and quotes >= begin.quote_limits[row]:
                    break
            for forced in TURN[1:] if token == TURN[0] else TURN:
                yield put(forced, PROMPT)
        token = -1
        while token not in RULES.stops:
            token, draw = int(logits[at].argmax()), uniforms[at, 1]
            yield put(token, ANSWER)
        has_room = at + 1 + RULES.second_turn_room < LENGTH
        if begin.answers_next[row] or token != TURN[0] or not has_room:
            break
        if draw >= RULES.second_turn_chance:
            break
        for token in NEXT:
            yield put(token, PROMPT)
        limit = RULES.second_turn_limit
    while True:
        yield put(TURN[0], END)


def test_rows_in_lockstep_equal_a_row_written_alone(models, written):
    tokens, roles = written
    key = jax.random.key(7)
    draw = lambda t: jax.random.uniform(jax.random.fold_in(key, t), (2, len(tokens)), jnp.float32)
    uniforms = np.asarray(jax.vmap(draw)(jnp.arange(LENGTH)))  # [T, 2, B]
    for row in range(len(tokens)):
        # The text is the machine's own so far, so one forward gives every step's logits.
        logits = models.target.forward(tokens[row]).logits
        want = list(islice(slow_row(logits, uniforms[:, :, row], row, openings()), LENGTH))
        assert [token for token, _ in want] == tokens[row].tolist(), row
        assert [role for _, role in want] == roles[row].tolist(), row


def test_the_rows_above_took_every_way(written):
    """Else the comparison would show less than it says."""
    tokens, roles = written
    user = roles == USER
    second = [(np.diff(np.flatnonzero(row)) > 1).any() for row in user]
    assert any(second) and not all(second)  # with a second turn and without
    lengths = user.sum(1)
    ends = [tokens[row, user[row]][-1] for row in np.flatnonzero(lengths)]
    assert TURN[0] in ends and QUOTED in ends  # a turn that the model ended, one that a quote did
    assert lengths[3] >= 1 and lengths[6] >= 2  # limits of one and two tokens
    assert (roles[8] == PROMPT).all()  # a prompt as long as the row
    assert (roles[5] != END).all() and (roles[:, -1] == END).any()  # no room; ended before
    assert not user[[1, 7, 10]].any() and (roles[10, 1:4] == ANSWER).any()
    assert not np.isin(tokens[user], BANNED).any()


def test_an_answer_is_what_plain_decoding_writes(models, written):
    tokens, roles = written
    row = 7
    prompt = openings().prompts[row, : openings().lengths[row]].tolist()
    room = LENGTH - len(prompt)
    made = reference.generate(models.target.forward, prompt, room, stop_ids=RULES.stops)
    assert tokens[row, roles[row] == ANSWER].tolist() == made.output_ids[len(prompt) :]


def test_phases_that_do_not_end_at_the_length_are_refused(models):
    for phases in ((32,), (64, 32), (32, 32, 64)):
        with pytest.raises(ValueError, match="ascending sizes that end at 64"):
            generate(
                models.params.target, openings(), jnp.zeros(VOCAB, jnp.int32), jax.random.key(0),
                RULES, phases,
            )  # fmt: skip


drawn = jax.jit(lambda logits, uniform: sample(logits, uniform, RULES.min_p))


@pytest.mark.parametrize("vocab", [5, 256, 300])
def test_sampling_inverts_the_distribution_function(vocab):
    logits = np.random.default_rng(vocab).normal(size=(64, vocab)).astype(np.float32) * 2
    # Away from the steps of the function, where f32 and f64 may fall on different sides.
    uniform = (np.arange(64) + 0.37) / 64
    found = drawn(jnp.asarray(logits), jnp.asarray(uniform, jnp.float32))
    for row in range(64):
        mass = np.exp(logits[row].astype(np.float64) - logits[row].max())
        mass = np.where(mass >= 0.05, mass, 0.0)
        low = np.cumsum(mass)[found[row]] / mass.sum()
        high = low - mass[found[row]] / mass.sum()
        assert mass[found[row]] > 0  # nothing below min_p of the largest
        assert high - 1e-6 <= uniform[row] <= low + 1e-6, row


def test_the_largest_draw_stays_among_the_likely_ids():
    logits = jnp.asarray([[0.0, 5.0, -50.0, 5.0, -50.0]])
    below_one = jnp.asarray([np.nextafter(np.float32(1), np.float32(0))])
    assert drawn(logits, below_one).tolist() == [3]
    assert drawn(logits, jnp.zeros(1)).tolist() == [1]


def test_rows_that_pad_the_head_are_never_written(models):
    target = models.params.target
    shape = 1, target.config.num_kv_heads, 4, target.config.head_dim
    caches = tuple((jnp.zeros(shape), jnp.zeros(shape)) for _ in target.layers)
    best = int(models.target.forward([50]).logits[0].argmax())
    cut = target.replace(config=dataclasses.replace(target.config, real_vocab=best))
    first = jax.jit(lambda params: next_logits(params, jnp.asarray([50]), jnp.int32(0), caches)[0])
    logits = first(cut)[0]
    assert np.isneginf(logits[best:]).all() and np.isfinite(logits[:best]).all()
