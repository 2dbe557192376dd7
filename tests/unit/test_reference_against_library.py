"""The library against the NumPy reference on tiny random pairs, where no golden vectors are.

Both compute the same thing from the same files in two ways: every intermediate of a draft step, and
whole decodes step by step, with budgets, stop tokens and context limits anywhere in a block.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import RuleConfig
from dflash_jax.params import RuleParams
from scripts.make_tiny import write_tiny_pair
from tests.golden import adapter
from tests.reference import dflash2, loop, prompt_lookup
from tests.reference.dense_target import DenseTarget

KINDS = {"qwen3-dflash2": ("qwen3", "dflash2"), "llama-dflash": ("llama", "dflash")}
CAPACITY = 48
# f32 against f64 through two layers of width 64, on numbers up to about 10.
F32_ATOL = 1e-4


class Pair:
    """One tiny pair, loaded by the library in f32 and by the reference in f64."""

    def __init__(self, folder, kind):
        target, drafter = KINDS[kind]
        paths = write_tiny_pair(folder, target=target, drafter=drafter, seed=3)
        self.paths = paths
        self.params = adapter.load_pair(paths.target, paths.drafter)
        self.target = DenseTarget.load(paths.target)
        self.drafter = dflash2.load_drafter(paths.drafter, self.target)
        self.taps = self.drafter.config.target_layer_ids
        self._outputs = {}

    def forward(self, ids):
        """The reference's target, remembering what it has computed."""
        key = tuple(int(token) for token in ids)
        if key not in self._outputs:
            self._outputs[key] = self.target.forward(key)
        return self._outputs[key]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return {kind: Pair(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def pair(request, pairs):
    return pairs[request.param]


def test_the_reference_runs_in_f32_as_well(pair):
    target = DenseTarget.load(pair.paths.target, np.float32)
    drafter = dflash2.load_drafter(pair.paths.drafter, target, np.float32)
    ids = np.random.default_rng(6).integers(0, 300, 20)
    narrow, wide = target.forward(ids), pair.forward(ids)
    assert narrow.logits.dtype == np.float32
    np.testing.assert_allclose(narrow.logits, wide.logits, rtol=0, atol=F32_ATOL)
    features = narrow.features(pair.taps)
    got = draft_arrays(drafter, ids, features, 0, 19)
    want = draft_arrays(pair.drafter, ids, wide.features(pair.taps), 0, 19)
    assert got["logits"].dtype == np.float32
    np.testing.assert_allclose(got["logits"], want["logits"], rtol=0, atol=F32_ATOL)
    assert got["draft_ids"] == want["draft_ids"]


def draft_arrays(drafter, ids, features, fed, start):
    got = {}
    fc_out, context = drafter.fuse(features[:start])
    block = drafter.block_ids(ids[start], drafter.config.block_rows)
    got["final_hidden"] = drafter.forward(block, context, got)
    got |= {"fc_out": fc_out[fed:], "ctx": context[fed:]}
    got["logits"] = drafter.logits(got["final_hidden"][1:])
    got["draft_ids"] = drafter.choose(got["final_hidden"][1:], ids[start])
    return got


def test_every_intermediate_of_a_draft_step_equals_the_reference(pair):
    """From the first block on, which has one context row, past the window of a sliding layer."""
    ids = np.random.default_rng(4).integers(0, 300, 60)
    features = pair.forward(ids).features(pair.taps)
    schedule, fed = [1, 5, 13, 14, 45], 0
    steps = adapter.draft_steps(pair.params, ids, features, schedule)
    for start, got in zip(schedule, steps, strict=True):
        for name, want in draft_arrays(pair.drafter, ids, features, fed, start).items():
            want = np.swapaxes(want, 0, 1) if name.endswith("_cache") else np.asarray(want)
            if want.dtype.kind == "i":
                np.testing.assert_array_equal(got[name], want, err_msg=f"{name} at {start}")
            else:
                np.testing.assert_allclose(
                    got[name], want, rtol=0, atol=F32_ATOL, err_msg=f"{name} at {start}"
                )
        fed = start


def same_decode(pair, params, propose, prompt, budget, stop_ids=(), keep=7):
    """Decode in both; every step must have the same rows and the same outcome."""
    got, status, steps = adapter.spec_generate(
        params, np.asarray(prompt, np.int32), budget, stop_ids, capacity=CAPACITY, keep=keep
    )
    want = loop.generate(
        pair.forward,
        prompt,
        budget,
        propose=propose,
        num_drafts=keep,
        tap_ids=pair.taps,
        stop_ids=stop_ids,
        max_len=CAPACITY,
    )
    assert got.tolist() == want.output_ids
    assert status.name.lower() == want.finish_reason
    for ours, theirs in zip(steps, want.steps, strict=True):
        assert (ours.start, ours.produced) == (theirs.start, theirs.produced)
        assert ours.verify_block_ids.tolist() == theirs.verify_block_ids
        assert ours.target_argmax.tolist() == theirs.target_argmax
    return want


def requests(text):
    """Budgets, stops and keeps for a text of which the target's continuation is known."""
    prompt = text[:9]
    yield from (dict(prompt=prompt, budget=budget) for budget in (1, 2, 8, 9))
    yield from (dict(prompt=prompt, budget=16, stop_ids=[stop]) for stop in text[9:18:2])
    yield from (dict(prompt=prompt, budget=12, keep=keep) for keep in (0, 1, 4))
    yield from (dict(prompt=text[:length], budget=60) for length in (1, 17, 40, CAPACITY))


def continued(pair, length):
    """Random text, then what the target says: [9 + length]."""
    prompt = np.random.default_rng(5).integers(0, 300, 9).tolist()
    return loop.generate(pair.forward, prompt, length).output_ids


def test_decoding_with_the_drafter_equals_the_reference_step_by_step(pair):
    for request in requests(continued(pair, 45)):
        same_decode(pair, pair.params, pair.drafter.propose, **request)


@pytest.mark.parametrize("k", [0, 3, 7])
def test_decoding_with_forced_acceptance_equals_the_reference(pairs, k):
    pair = pairs["qwen3-dflash2"]
    text = continued(pair, 60)
    vocab = pair.target.config["vocab_size"]
    tokens, config = jnp.asarray([text], jnp.int32), RuleConfig("oracle", max_drafts=7)
    params = pair.params.replace(draft=RuleParams(tokens, jnp.array([k]), None, config))

    def propose(known, features, num_drafts):
        drafts = text[len(known) : len(known) + num_drafts]
        return [(d + 1) % vocab if j == k else d for j, d in enumerate(drafts)]

    accepted = set()
    for request in requests(text):
        if len(request["prompt"]) >= 9:  # what follows a shorter one is another text
            want = same_decode(pair, params, propose, **request)
            accepted |= {step.num_accepted for step in want.steps}
    assert max(accepted) == k


def test_decoding_with_prompt_lookup_equals_the_reference(pairs):
    pair = pairs["llama-dflash"]
    config = RuleConfig("prompt_lookup", max_drafts=7, ngram=3)
    params = pair.params.replace(draft=RuleParams(None, None, None, config))
    text = continued(pair, 24)
    accepted = 0
    for prompt in (text[9:] * 2, text + text[:12], text[:3] * 4, text[:2]):
        want = same_decode(
            pair, params, lambda tokens, _, n: prompt_lookup.propose(tokens, n), prompt, 20
        )
        accepted += sum(step.num_accepted for step in want.steps)
    assert accepted
