"""Steps and chunks of steps: one computation, however it is driven. About 60 CPU seconds."""

import jax
import numpy as np
import pytest

from dflash_jax import loop
from dflash_jax.state import Status
from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")

BATCH = [
    kit.Request(kit.prompt(11), 30),
    kit.Request(kit.prompt(4), 17, stop_ids=(3,)),
    kit.Request(kit.prompt(26), 40),
]


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_the_compiled_chunk_is_its_step_driven_by_a_python_loop(kind):
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    got = kit.run(params, fixed, BATCH)
    want = kit.by_steps(params, fixed, *kit.start(params, fixed, BATCH))
    assert got.tokens == want.tokens
    assert got.accepted == want.accepted and got.committed == want.committed
    assert got.status == want.status
    assert got.num_steps == want.num_steps
    for name, ours in vars(got.carriers[0]).items():
        np.testing.assert_array_equal(ours, getattr(want.carriers[0], name), err_msg=name)
    for row in range(3):
        both = zip(*(kit.committed_kv(r.carriers, row) for r in (got, want)), strict=True)
        for a, b in both:
            # Two executables: the same sums, perhaps in another order.
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_a_right_drafter_commits_whole_blocks_and_a_wrong_one_a_token_a_step():
    params = kit.pair().params
    fixed = kit.standard(kit.oracle(params, kit.UNKNOWN))
    requests = [kit.Request(one.prompt, 1 + 24) for one in BATCH]
    want = kit.plain(kit.oracle(params, kit.UNKNOWN), fixed, requests)
    assert want.num_steps == 24
    always_right = kit.run(kit.oracle(params, kit.history(want)), fixed, requests)
    assert always_right.committed == [[8, 8, 8]] * 3 and always_right.num_steps == 3
    always_wrong = kit.run(kit.oracle(params, kit.history(want), 0), fixed, requests)
    assert always_wrong.committed == [[1] * 24] * 3 and always_wrong.num_steps == 24
    assert always_right.tokens == always_wrong.tokens == want.tokens


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 15])
def test_whole_blocks_take_as_few_steps_as_they_can_and_lose_no_token(num_drafts):
    """Known fault A09: the bonus token of a fully accepted block, five blocks and a bit of them."""
    params = kit.pair(alphabet=kit.ANY_ID).params
    oracle = kit.oracle(params, kit.UNKNOWN, num_drafts=num_drafts)
    fixed = kit.standard(oracle)
    rows = num_drafts + 1
    requests = [kit.Request(kit.prompt(n), 1 + 5 * rows + extra) for n, extra in enumerate(
        (0, 1, num_drafts), start=5
    )]  # fmt: skip
    want = kit.plain(oracle, fixed, requests)
    oracle = kit.oracle(params, kit.history(want), num_drafts=num_drafts)
    got = kit.run(oracle, fixed, requests)
    assert got.tokens == want.tokens and got.hashes == want.hashes
    steps = [-(-(one.budget - 1) // rows) for one in requests]
    assert [len(counts) for counts in got.committed] == steps
    assert got.num_steps == max(steps)


def test_the_records_of_a_chunk_outlive_the_carriers_it_returned():
    params = kit.pair().params
    fixed = kit.standard(params)
    _, at = kit.start(params, fixed, BATCH)
    first, *at = loop.decode(params, *at, fixed=fixed, options=kit.OPTIONS)
    second, *at = loop.decode(params, *at, fixed=fixed, options=kit.OPTIONS)
    jax.block_until_ready(second)
    assert (np.asarray(first.status) == Status.ACTIVE).any()
    assert first.tokens.shape == (8, 3, 8) and int(first.num_cycles) == 8


def test_a_chunk_over_finished_sequences_runs_no_cycle():
    params = kit.pair().params
    fixed = kit.standard(params)
    done = kit.run(params, fixed, BATCH)
    before = jax.device_get(done.carriers[0])
    out, state, *_ = loop.decode(params, *done.carriers, fixed=fixed, options=kit.OPTIONS)
    assert int(out.num_cycles) == 0
    assert not np.asarray(out.num_committed).any()
    for name, value in vars(before).items():
        np.testing.assert_array_equal(value, getattr(state, name), err_msg=name)


@pytest.mark.parametrize("cycles", [1, 2, 3, 4, 5])
def test_no_token_is_lost_where_a_chunk_ends_at_any_phase(cycles):
    """Known fault B32. Blocks of every length straddle the chunks' edges."""
    params = kit.pair().params
    fixed = kit.standard(kit.oracle(params, kit.UNKNOWN))
    requests = [kit.Request(one.prompt, 101) for one in BATCH]
    want = kit.plain(kit.oracle(params, kit.UNKNOWN), fixed, requests)
    options = loop.DecodeOptions(cycles=cycles, certify=True)
    size = loop.decode._cache_size()
    for poison in ([7, 7, 7], [0, 3, 6], [1, 4, 5]):
        oracle = kit.oracle(params, kit.history(want), np.array(poison))
        got = kit.run(oracle, fixed, requests, options=options)
        assert got.tokens == want.tokens
        assert got.status == want.status
    assert loop.decode._cache_size() - size == 1
