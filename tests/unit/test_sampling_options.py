"""What a request may ask of sampling; every contradiction is one sentence, before any compile."""

import math

import numpy as np
import pytest

from dflash_jax.sampling import (
    GREEDY,
    SamplingMode,
    SamplingOptions,
    mode_of,
    sampling_state,
    with_seed,
)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"temperature": -0.1}, ValueError, "temperature is -0.1, wanted 0 to 10000"),
        ({"temperature": math.nan}, ValueError, "temperature is nan, wanted a finite number"),
        ({"temperature": math.inf}, ValueError, "temperature is inf, wanted a finite number"),
        ({"temperature": 1e39}, ValueError, "temperature is 1e+39, wanted 0 to 10000"),
        ({"temperature": "1"}, TypeError, "temperature is '1', wanted a number"),
        ({"temperature": True}, TypeError, "temperature is True, wanted a number"),
        ({"top_k": 0}, ValueError, "top_k is 0, wanted at least 1"),
        ({"top_k": 2.0}, TypeError, "top_k is 2.0, wanted an integer"),
        ({"top_p": 0.0}, ValueError, "top_p is 0.0, wanted above 0, up to 1"),
        ({"top_p": 1.5}, ValueError, "top_p is 1.5, wanted above 0, up to 1"),
        ({"min_p": -0.5}, ValueError, "min_p is -0.5, wanted 0 to 1"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty is 0, wanted 0.01 to 100"),
        ({"presence_penalty": math.nan}, ValueError, "presence_penalty is nan"),
        ({"frequency_penalty": None}, TypeError, "frequency_penalty is None, wanted a number"),
        ({"frequency_penalty": 1e30}, ValueError, "frequency_penalty is 1e+30, wanted -100 to"),
        ({"logit_bias": {1: -2e4}}, ValueError, "logit_bias is -20000.0, wanted -10000 to 10000"),
        ({"seed": -1}, ValueError, "seed is -1, wanted 0 to"),
        ({"seed": 2**64}, ValueError, "seed is 18446744073709551616, wanted 0 to"),
        ({"seed": 1.0}, TypeError, "seed is 1.0, wanted an integer"),
        ({"logit_bias": {1.5: 2.0}}, TypeError, "logit_bias is 1.5, wanted an integer"),
        ({"logit_bias": {1: math.inf}}, ValueError, "logit_bias is inf, wanted a finite number"),
        ({"logit_bias": 3}, TypeError, "logit_bias is 3, wanted"),
        ({"logprobs": 5}, TypeError, "logprobs is 5, wanted True or False"),
        ({"stop": ["a", ""]}, ValueError, "stop has an empty text"),
        ({"stop": [1]}, TypeError, "stop is [1], wanted texts"),
        ({"temperature": 0, "top_k": 5}, ValueError, "top_k is 5, but temperature 0"),
        ({"temperature": 0, "top_p": 0.9}, ValueError, "top_p is 0.9, but temperature 0"),
        ({"temperature": 0, "min_p": 0.1}, ValueError, "min_p is 0.1, but temperature 0"),
        ({"temperature": 1e-6, "seed": 1}, ValueError, "seed is 1, but temperature 1e-06"),
        ({"temperature": 9e-6, "top_k": 1}, ValueError, "wanted a temperature from 1e-05"),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_one_sentence(asked, error, words):
    with pytest.raises(error) as found:
        SamplingOptions(**asked)
    assert str(found.value).startswith("sampling: ") and words in str(found.value)
    assert "\n" not in str(found.value)


def test_numbers_of_numpy_and_one_stop_string_are_taken():
    one = SamplingOptions(temperature=np.float32(0.5), top_k=np.int64(3), stop="end")
    assert one.stop == ("end",) and one.is_random
    assert SamplingOptions(logit_bias={7: 1, 3: -2}).logit_bias == ((3, -2.0), (7, 1.0))


def test_the_mode_has_what_some_request_needs_and_no_more():
    assert mode_of([GREEDY, SamplingOptions(temperature=0, stop="x")], samples_drafts=True) is None
    penal = SamplingOptions(temperature=0, presence_penalty=0.5)
    assert mode_of([GREEDY, penal], samples_drafts=True) == SamplingMode(penalties=True)
    mixed = [GREEDY, SamplingOptions(top_k=3), SamplingOptions(min_p=0.1, logprobs=True)]
    assert mode_of(mixed, samples_drafts=True) == SamplingMode(
        is_random=True, top_k=True, min_p=True, logprobs=True, samples_drafts=True
    )


def test_a_request_that_draws_gets_a_seed_of_its_own_and_keeps_one_it_has():
    first, second = (with_seed(SamplingOptions()).seed for _ in range(2))
    assert first != second and 0 <= first < 2**53
    assert with_seed(SamplingOptions(seed=5)).seed == 5
    assert with_seed(GREEDY).seed is None


def test_a_top_k_above_every_vocabulary_keeps_all():
    requests = [SamplingOptions(top_k=2**40, seed=1), SamplingOptions(top_k=3, seed=1)]
    mode = mode_of(requests, samples_drafts=False)
    assert mode is not None
    assert sampling_state(mode, requests, batch=3, vocab=10).top_k.tolist() == [10, 3, 10]


def test_a_mode_that_draws_drafts_alone_is_refused():
    with pytest.raises(ValueError, match="samples_drafts and without is_random, wanted both"):
        SamplingMode(samples_drafts=True)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_mode_with_a_filter_and_nothing_to_filter_contradicts_itself(name):
    with pytest.raises(ValueError, match=f"contradictory options, a mode with {name} and without"):
        SamplingMode(**{name: True}, penalties=True)
    assert getattr(SamplingMode(**{name: True}, is_random=True), name)
