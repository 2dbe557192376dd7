"""Distributions, draws and noise against the reference's sorting and running sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import distribution
from dflash_jax.sampling import Purpose, SamplingState, uniforms
from tests.reference import sampling as reference

pytestmark = pytest.mark.usefixtures("strict_dtypes")

ROWS = 48
# f32 probabilities against f64: a few roundings of numbers up to 1.
ATOL = 3e-7


def drawn_rows(vocab):
    """Logits with and without ties, and a setting of every kind for each row."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(size=(ROWS, vocab)).astype(np.float32) * 3
    logits[::3] = np.round(logits[::3])  # many equal ones, also at the threshold
    return logits, {
        "temperature": rng.choice([0.0, 0.5, 1.0, 2.0], ROWS).astype(np.float32),
        "top_k": rng.choice([1, 2, 5, vocab], ROWS).astype(np.int32),
        "top_p": rng.choice([0.05, 0.5, 0.9, 1.0], ROWS).astype(np.float32),
        "min_p": rng.choice([0.0, 0.01, 0.2], ROWS).astype(np.float32),
    }


distributions = jax.jit(distribution.distribution, static_argnames="vocab")


@pytest.mark.parametrize("vocab", [8, 307, 1500])
def test_filters_keep_what_sorting_keeps_with_ties_to_the_lowest_id(vocab):
    logits, settings = drawn_rows(vocab)
    got = np.asarray(distributions(logits, SamplingState(**settings), vocab=vocab))
    for row in range(ROWS):
        own = {name: values[row] for name, values in settings.items()}
        want = reference.distribution(logits[row], own.pop("temperature"), **own)
        np.testing.assert_array_equal(got[row] > 0, want > 0, err_msg=f"row {row}: {own}")
        np.testing.assert_allclose(got[row], want, atol=ATOL)


def test_each_filter_is_left_out_where_no_request_has_it():
    logits, settings = drawn_rows(30)
    for name in ("top_k", "top_p", "min_p"):
        own = {"temperature": settings["temperature"], name: settings[name]}
        got = np.asarray(distributions(logits, SamplingState(**own), vocab=30))
        for row in range(ROWS):
            want = reference.distribution(
                logits[row], settings["temperature"][row], **{name: settings[name][row]}
            )
            np.testing.assert_allclose(got[row], want, atol=ATOL, err_msg=name)


def test_padding_of_the_vocabulary_is_never_likely():
    logits, settings = drawn_rows(40)
    padded = np.pad(logits, ((0, 0), (0, 9)), constant_values=50.0)
    state = SamplingState(**settings)
    got = np.asarray(distributions(padded, state, vocab=40))
    assert not got[:, 40:].any()
    want = distributions(logits, state, vocab=40)
    np.testing.assert_allclose(got[:, :40], want, atol=ATOL)


@pytest.mark.parametrize("vocab", [1, 8, 128, 129, 20000])
def test_a_draw_is_the_first_index_whose_running_sum_exceeds_the_noise(vocab):
    rng = np.random.default_rng(vocab)
    weights = rng.exponential(size=(200, vocab)).astype(np.float32)
    weights[rng.random(weights.shape) < 0.5] = 0
    weights[:, rng.integers(vocab)] = 1
    sums = np.cumsum(weights.astype(np.float64), axis=1)
    # Noise in the middle of a token's share, where rounding does not decide, and at both ends.
    token = [reference.draw(row, u) for row, u in zip(weights, rng.random(200), strict=True)]
    token = np.array(token)
    rows = np.arange(200)
    u = ((sums[rows, token] - weights[rows, token] / 2) / sums[:, -1]).astype(np.float32)
    draw = jax.jit(distribution.draw)
    np.testing.assert_array_equal(draw(weights, u), token)
    first = np.asarray(draw(weights, np.zeros(200, np.float32)))
    np.testing.assert_array_equal(first, (weights > 0).argmax(axis=1))
    last = np.asarray(draw(weights, np.full(200, 1 - 2.0**-24, np.float32)))
    assert (weights[rows, last] > 0).all()


def test_penalties_count_the_answer_and_drafts_before_a_row_also_one_that_repeats():
    """Known fault B26: a token twice in one block is penalised the second time for the first."""
    rng = np.random.default_rng(0)
    vocab, prompts = 12, [[1, 2, 2, 5], [7]]
    answers, drafts = [[3, 3, 4], [7]], np.array([[4, 4, 9, 4], [0, 7, 0, 0]], np.int32)
    logits = rng.normal(size=(2, 5, vocab)).astype(np.float32) * 2
    factors = {
        "repetition": np.array([1.5, 0.7], np.float32),
        "presence": np.array([0.4, -0.3], np.float32),
        "frequency": np.array([0.25, 0.5], np.float32),
    }
    bias = np.zeros((2, vocab), np.float32)
    bias[1, 7] = 2.5
    state = SamplingState(
        **factors,
        bias=bias,
        counts=np.stack([np.bincount(x, minlength=vocab) for x in answers]).astype(np.int32),
        in_prompt=np.stack([np.bincount(x, minlength=vocab) > 0 for x in prompts]),
    )
    got = jax.jit(distribution.processed_logits)(logits.reshape(10, vocab), drafts, state)
    for b in range(2):
        own = {name: float(values[b]) for name, values in factors.items()}
        for row in range(5):
            want = reference.penalised(
                logits[b, row],
                prompts[b],
                [*answers[b], *drafts[b, :row]],
                bias=list(enumerate(bias[b])),
                **own,
            )
            np.testing.assert_allclose(got[5 * b + row], want, rtol=1e-6, atol=1e-6)


def test_without_bias_and_penalties_logits_are_not_touched():
    logits = jnp.ones((4, 3))
    state = SamplingState(temperature=jnp.ones((2,)))
    assert distribution.processed_logits(logits, jnp.zeros((2, 1), jnp.int32), state) is logits


def test_noise_depends_on_seed_position_and_purpose_and_on_nothing_else():
    keys = np.array([[0, 1], [0, 2], [1, 1]], np.uint32)
    positions = np.arange(400, dtype=np.int32)[None].repeat(3, axis=0)
    noise = jax.jit(uniforms, static_argnums=2)
    every = np.stack([noise(keys, positions, purpose) for purpose in Purpose])
    assert every.min() >= 0 and every.max() < 1
    assert np.unique(every).size > 0.999 * every.size  # 24 bits: a collision in a few thousand
    alone = noise(keys[1:2], positions[:1, 17:18], Purpose.RESIDUAL)
    assert alone[0, 0] == every[Purpose.RESIDUAL, 1, 17]
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        np.testing.assert_array_equal(
            jax.jit(uniforms, static_argnums=2)(keys, positions, 0), every[0]
        )
    mean, spread = every.mean(), every.var()
    assert abs(mean - 0.5) < 0.02 and abs(spread - 1 / 12) < 0.005
    flat = every.reshape(len(Purpose) * 3, -1)
    correlation = np.corrcoef(flat) - np.eye(len(flat))
    assert np.abs(correlation).max() < 0.2  # 4 sigma of 400 pairs
