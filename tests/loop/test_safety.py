"""What nobody may read, write or keep: unused slots, finished rows, earlier calls, NaN.

About 50 CPU seconds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import loop
from dflash_jax.scratch import init_scratch
from dflash_jax.state import Status, init_buffers
from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")

both_drafters = pytest.mark.parametrize("kind", kit.DRAFTERS)
BATCH = [
    kit.Request(kit.prompt(11), 30),
    kit.Request(kit.prompt(4), 17, stop_ids=(3,)),
    kit.Request(kit.prompt(26), 40),
]


@both_drafters
def test_nan_in_every_slot_without_a_committed_token_changes_nothing(kind):
    """Pages of nobody, tails of pages and rejected rows, before each step (spec/verify.md §7.6)."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    want = kit.by_steps(params, fixed, *kit.start(params, fixed, BATCH))
    assert sum(map(sum, want.accepted)) > 0

    def spoil(at):
        state, buffers, scratch = kit.poison_unused(at)
        # What a step reads of the buffers and the scratch it must have written itself.
        kept = {name: getattr(buffers, name) for name in ("meta", "k_pools", "v_pools")}
        events = scratch.draft_tokens_event
        scratch = kit.filled(scratch).replace(draft_tokens_event=events)
        return state, kit.filled(buffers).replace(**kept), scratch

    got = kit.by_steps(params, fixed, *kit.start(params, fixed, BATCH), between=spoil)
    assert got.tokens == want.tokens and got.hashes == want.hashes
    assert got.accepted == want.accepted and got.status == want.status


@both_drafters
def test_rows_that_may_not_write_leave_the_last_page_alone(kind):
    """Known fault A03: slot -1 is no index into the last page."""
    params = kit.pair(kind=kind).params
    fixed = kit.sizes(params, 3, max_context=80, num_pages=24)
    for own in ([3, 9, 0, 12, 7], [3, 9, 23, 12, 7]):
        _, at = kit.start(params, fixed, [kit.Request(kit.prompt(9), 11)], pages=[own])
        before = jax.device_get(at[1])
        cycle = next(kit.cycles(params, fixed, at))
        state, buffers, _ = cycle.after
        assert np.asarray(state.status).tolist() == [Status.ACTIVE, Status.EMPTY, Status.EMPTY]
        written = {(own[at // 4], at % 4) for at in range(9, 9 + 8)}  # block rows of the first
        pools = zip(
            (*before.k_pools, *before.v_pools), (*buffers.k_pools, *buffers.v_pools), strict=True
        )
        for was, now in pools:
            changed = ~np.isclose(was, now, rtol=0, atol=0, equal_nan=True).all(axis=(1, 3))
            slots = {(int(page), int(offset)) for page, offset in np.argwhere(changed)}
            assert slots == written


@both_drafters
def test_finished_rows_keep_still_and_disturb_nobody(kind):
    """Known fault A11: one row stops at its first token, one in the middle."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    requests = [kit.Request(kit.prompt(9), 1), kit.Request(kit.prompt(6), 51), BATCH[1]]
    firsts, at = kit.start(params, fixed, requests)
    before = jax.device_get(at)
    got = kit.finish(params, fixed, firsts, at)
    assert got.status[0] == Status.LENGTH and len(got.tokens[0]) == 1
    state = got.carriers[0]
    for name in ("tokens", "seq_lens", "anchor", "remaining", "status"):
        np.testing.assert_array_equal(getattr(state, name)[0], getattr(before[0], name)[0], name)
    own = np.asarray(before[1].meta.block_table)[0]
    own = own[own >= 0]
    for was, now in zip(before[1].k_pools, got.carriers[1].k_pools, strict=True):
        np.testing.assert_array_equal(np.asarray(was)[own], np.asarray(now)[own])
    for row in (1, 2):  # alone in the batch, in the same row of it, with the same pages
        pages = np.asarray(before[1].meta.block_table)
        pages = [ids[ids >= 0].tolist() for ids in pages]
        alone = [kit.Request(kit.prompt(1), 1)] * 3
        alone[row] = requests[row]
        solo = kit.run(params, fixed, alone, pages=pages)
        assert solo.tokens[row] == got.tokens[row]
        assert solo.hashes[row] == got.hashes[row]


@both_drafters
def test_nothing_of_an_earlier_call_is_left(kind):
    """Known fault A36: worn buffers and scratch, a shorter second prompt, and NaN everywhere."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    shorter = [kit.Request(kit.prompt(3, seed=5), 12), kit.Request(kit.prompt(2, seed=5), 30)]
    worn = init_buffers(fixed), init_scratch(params.draft.config, fixed=fixed)
    fresh = [kit.run(params, fixed, batch) for batch in (BATCH, shorter)]  # NaN everywhere
    for batch, want in ((BATCH, fresh[0]), (shorter, fresh[1]), (BATCH, fresh[0])):
        got = kit.run(params, fixed, batch, worn=worn)
        assert got.tokens == want.tokens and got.hashes == want.hashes
        worn = got.carriers[1:]


def test_three_runs_in_one_process_are_the_same_bits():
    """Known fault C05, on this backend."""
    params = kit.pair().params
    fixed = kit.standard(params)
    runs = [kit.run(params, fixed, BATCH) for _ in range(3)]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert runs[0].hashes == runs[1].hashes == runs[2].hashes


def with_embedding(params, token, value):
    embed = params.target.embed.at[token].set(value)
    return params.replace(target=params.target.replace(embed=embed))


@both_drafters
def test_logits_that_are_not_finite_end_the_sequence_and_keep_the_tokens_before(kind):
    """A token whose embedding is NaN is emitted; nothing after it is."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    requests = [one._replace(stop_ids=()) for one in BATCH]
    want = kit.plain(params, fixed, requests)
    token = 1
    spoiled = with_embedding(params, token, jnp.nan)
    for got in (kit.plain(spoiled, fixed, requests), kit.run(spoiled, fixed, requests)):
        assert got.status == [Status.NON_FINITE] * 3
        for row in range(3):
            end = want.tokens[row].index(token) + 1
            assert got.tokens[row] == want.tokens[row][:end]
            assert got.hashes[row] == want.hashes[row][:end]


@both_drafters
def test_a_draft_that_is_not_finite_is_rejected_like_any_other(kind):
    """No plain decoding would have met it: 0 * NaN must not carry it to the rows before."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    want = kit.plain(params, fixed, BATCH)
    drafts = set()
    for cycle in kit.cycles(params, fixed, kit.start(params, fixed, BATCH)[1]):
        drafts |= set(cycle.out.proposal.tokens[cycle.out.verification.num_rows > 1].flat)
    seen = {token for row in range(3) for token in (*BATCH[row].prompt, *want.tokens[row])}
    token = min(drafts - seen)
    got = kit.run(with_embedding(params, token, jnp.nan), fixed, BATCH)
    assert got.tokens == want.tokens and got.hashes == want.hashes
    assert got.status == want.status


def test_a_prompt_whose_logits_are_not_finite_is_never_active_and_spoils_no_other():
    params = kit.pair().params
    fixed = kit.standard(params)
    requests = [BATCH[0], kit.Request((1, 5, 2), 9), BATCH[2]]
    want = kit.run(params, fixed, requests)
    spoiled = with_embedding(params, 5, jnp.inf)
    firsts, at = kit.start(spoiled, fixed, requests)
    assert [int(first.status) for first in firsts] == [1, Status.NON_FINITE, 1]
    got = kit.finish(spoiled, fixed, firsts, at)
    assert len(got.tokens[1]) == 1
    for row in (0, 2):
        assert got.tokens[row] == want.tokens[row] and got.hashes[row] == want.hashes[row]


def test_the_event_counts_the_steps_and_the_host_copy_is_the_last_block():
    params = kit.pair().params
    fixed = kit.standard(params)
    _, at = kit.start(params, fixed, BATCH)
    for number, cycle in enumerate(kit.cycles(params, fixed, at), start=1):
        scratch = cycle.after[2]
        assert int(scratch.draft_tokens_event) == number
        block = np.concatenate(
            [cycle.before.anchor[:, None], cycle.out.proposal.tokens], axis=1
        ).reshape(-1)
        np.testing.assert_array_equal(scratch.draft_tokens_dev, block)
        np.testing.assert_array_equal(scratch.draft_tokens_host_pinned, block)
        if number == 3:
            break
    out, _, _, scratch = loop.decode(params, *cycle.after, fixed=fixed, options=kit.OPTIONS)
    assert int(scratch.draft_tokens_event) == 3 + int(out.num_cycles)
