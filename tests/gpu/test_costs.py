"""Known faults C07 and C11 on a GPU: what a batch and a drafter cost, in ratios of one run."""

from pathlib import Path

import numpy as np
import pytest

from dflash_jax import DecodeOptions, generate
from dflash_jax.config import RuleConfig
from dflash_jax.fixed import plan
from dflash_jax.params import RuleParams

pytestmark = pytest.mark.gpu

SMALL = {  # Qwen3-0.6B: 1.2 GB, so that work which grows with the batch shows behind the weights
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
CONTEXT = 256  # the keys of eight are a fraction of the weights


@pytest.fixture
def pairs(monkeypatch):
    """The module of random pairs, with the small one."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    import random_pair

    monkeypatch.setitem(random_pair._TARGETS, "small", SMALL)
    return random_pair


def random_params(pairs, shapes, drafter):
    return pairs.random_params(*pairs.pair_configs(shapes, drafter))


def stages(params, batch):
    """ms of propose, verify and commit apart."""
    from decode_runner import Runner

    fixed = plan(
        params.target.config,
        params.draft.config,
        batch=batch,
        max_context=CONTEXT + 128,
        prefill_chunk=16,
        dtype=params.target.embed.dtype.name,
    )
    run = Runner(params, CONTEXT, fixed, DecodeOptions())
    times = run.stages(20)
    run.free()
    return times


@pytest.mark.parametrize(
    ("shapes", "drafter"), [("small", "dflash"), ("small", "dflash2"), ("qwen3.5-4b", "dflash2")]
)
def test_eight_sequences_draft_and_verify_in_less_than_twice_the_time_of_one(
    pairs, shapes, drafter
):
    params = random_params(pairs, shapes, drafter)
    one, eight = stages(params, 1), stages(params, 8)
    for stage in ("propose_ms", "verify_ms"):
        assert eight[stage] < 2 * one[stage], (stage, one, eight)


def first_token_seconds(params):
    """The quickest of several prefills of 1k tokens, each a request of its own."""
    prompt = np.random.default_rng(0).integers(0, 10_000, 1024).tolist()
    taken = [
        generate(params, [prompt], max_new_tokens=2, max_context=2048)[0].stats.ttft_seconds[0]
        for _ in range(8)
    ]
    return min(taken[1:])


@pytest.mark.parametrize("drafter", ["dflash", "dflash2"])
def test_a_drafter_delays_the_first_token_by_less_than_a_tenth(pairs, drafter):
    params = random_params(pairs, "qwen3-4b", drafter)
    plain = params.replace(draft=RuleParams(None, None, None, RuleConfig("none", 0)))
    alone, drafted = first_token_seconds(plain), first_token_seconds(params)
    assert drafted < 1.1 * alone, (drafted, alone)
