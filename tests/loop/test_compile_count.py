"""One executable a bucket, whatever the prompts.

About 30 CPU seconds alone, 2 where other tests of the loop have compiled the same.
"""

import jax
import numpy as np
import pytest

from dflash_jax import loop
from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_twenty_prompts_of_a_bucket_share_their_executables(kind):
    """Known fault A38: lengths, budgets, stop tokens, pages and kept drafts are data."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    rng = np.random.default_rng(0)
    worn, compiled = None, None
    for number, length in enumerate(np.linspace(1, 120, 20).astype(int)):
        budgets = rng.integers(2, 40, 2)
        stops = tuple(rng.integers(0, 4, rng.integers(0, 3)).tolist())
        requests = [
            kit.Request(kit.prompt(int(length)), int(budgets[0])),
            kit.Request(kit.prompt(int(rng.integers(1, 50))), int(budgets[1]), stop_ids=stops),
        ][: 1 + number % 2]
        keep = int(rng.integers(0, fixed.num_drafts + 1))
        done = kit.run(params, fixed, requests, keep=keep, worn=worn)
        worn = done.carriers[1:]
        if compiled is None:  # the first prompt may have found both in the cache
            compiled = loop.decode._cache_size(), loop.prefill._cache_size()
    assert (loop.decode._cache_size(), loop.prefill._cache_size()) == compiled


def test_every_kept_number_and_every_poison_share_one_executable():
    params = kit.pair().params
    fixed = kit.standard(kit.oracle(params, kit.UNKNOWN))
    requests = [kit.Request(kit.prompt(n), 9) for n in (3, 4, 5)]
    before = loop.decode._cache_size()
    for poison in range(8):
        for keep in (0, 3, 7):
            kit.run(kit.oracle(params, kit.UNKNOWN, poison), fixed, requests, keep=keep)
    assert loop.decode._cache_size() - before <= 1  # none where another test has compiled it


def test_plain_decoding_is_the_executable_of_speculative_decoding():
    params = kit.pair().params
    fixed = kit.standard(params)
    requests = [kit.Request(kit.prompt(n), 9) for n in (3, 4, 5)]
    want = kit.plain(params, fixed, requests)
    before = loop.decode._cache_size()
    got = kit.run(params, fixed, requests, decode=loop.decode_autoregressive)
    assert got.tokens == want.tokens and got.hashes == want.hashes
    assert loop.decode._cache_size() == before


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_every_carried_array_of_a_chunk_is_donated_to_an_output(kind):
    """That a GPU's compiler then copies no pool is for tests/aot."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    at = kit.carriers(params, fixed, [])
    lowered = loop.decode.lower(params, *at, fixed=fixed, options=kit.OPTIONS)
    text = lowered.as_text()
    donated = text.count("tf.aliasing_output") + text.count("jax.buffer_donor")
    assert donated == len(jax.tree.leaves(at))
