"""What the drafter is given: positions, lengths, and the keys of committed tokens alone.

About 75 CPU seconds.
"""

import jax
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import loop
from tests import kit

pytestmark = pytest.mark.usefixtures("strict_dtypes")

ROWS = 8


def first_step(params, fixed, requests, **how):
    firsts, at = kit.start(params, fixed, requests, **how)
    return firsts, next(kit.cycles(params, fixed, at))


def texts(requests, firsts):
    """Prompt and anchor of each sequence."""
    return [[*one.prompt, int(f.token)] for one, f in zip(requests, firsts, strict=True)]


@pytest.mark.parametrize("lengths", [(1, 5, 100), (1000, 8, 9)], ids=str)
@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_a_block_after_any_prompt_equals_the_reference(kind, lengths):
    """Known fault A13: context at 0..n-1, the anchor at n, at every depth."""
    pair = kit.pair(kind=kind)
    fixed = kit.standard(pair.params, max(kit.CONTEXT, lengths[0] + 40))
    requests = [kit.Request(kit.prompt(n), 20) for n in lengths]
    firsts, cycle = first_step(pair.params, fixed, requests)
    scratch = cycle.after[2]
    positions = np.asarray(scratch.position_ids).reshape(3, ROWS)
    logits = np.asarray(scratch.logits).reshape(3, ROWS - 1, -1)
    for row, (n, text) in enumerate(zip(lengths, texts(requests, firsts), strict=True)):
        want = kit.reference_block(pair, text, ROWS)
        assert positions[row].tolist() == list(range(n, n + ROWS))
        assert scratch.option_b_indirect_args_dev[row].tolist() == [n + ROWS, n, n]
        kit.assert_close(logits[row], want.logits, f"logits after {n} tokens")
        assert cycle.out.proposal.tokens[row].tolist() == want.drafts


def with_inner(params, tokens, poison):
    """A forced drafter that runs the real one first, context and all."""
    draft = dj.oracle_drafter(
        np.asarray(tokens, np.int32), num_drafts=ROWS - 1, poison_at=poison, inner=params.draft
    )
    return params.replace(draft=draft)


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_the_drafter_is_told_what_is_committed_and_never_what_was_proposed(kind):
    """Known fault A39, for every number of accepted drafts."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    requests = [kit.Request(kit.prompt(n), 26) for n in (6, 17, 30)]
    unknown = np.zeros((3, fixed.capacity + 1), np.int32)
    forced = with_inner(params, unknown, 0)
    want = kit.by_steps(forced, fixed, *kit.start(forced, fixed, requests, keep=0))
    for k in range(ROWS):
        poison = (k + np.arange(3)) % ROWS
        forced = with_inner(params, kit.history(want), poison)
        firsts, at = kit.start(forced, fixed, requests)
        emitted = np.array([1, 1, 1])
        for cycle in kit.cycles(forced, fixed, at):
            committed = np.array([len(one.prompt) for one in requests]) + emitted - 1
            rows = cycle.out.verification.num_rows
            active = rows > 0
            scratch = cycle.after[2]
            positions = np.asarray(scratch.position_ids).reshape(3, ROWS)
            told = np.asarray(scratch.option_b_indirect_args_dev)[active]
            assert (positions == committed[:, None] + np.arange(ROWS))[active].all()
            wanted = np.stack([committed + rows, committed, committed], axis=1)
            np.testing.assert_array_equal(told, wanted[active])
            emitted += cycle.out.verification.num_committed
            at = cycle.after
        assert emitted.tolist() == [26] * 3
        for row in range(3):  # and its context is what one token at a time would have left
            caches = kit.committed_kv(at, row), kit.committed_kv(want.carriers, row)
            for a, b in zip(*caches, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_rejected_drafts_leave_no_trace_in_the_context(kind):
    """Known fault B06: other rejected drafts, the same accepted prefix, the same context."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    requests = [kit.Request(kit.prompt(n), 26) for n in (6, 17, 30)]
    unknown = np.zeros((3, fixed.capacity + 1), np.int32)
    plain = with_inner(params, unknown, 0)
    want = kit.by_steps(plain, fixed, *kit.start(plain, fixed, requests, keep=0))
    outcomes = []
    for seed in (1, 2):
        known = kit.history(want).copy()
        rng = np.random.default_rng(seed)
        for row, one in enumerate(requests):  # two right drafts, then a wrong one, then noise
            after = len(one.prompt) + 3
            known[row, after:] = rng.integers(0, 300, fixed.capacity + 1 - after)
            known[row, after] = (kit.history(want)[row, after] + seed) % 300
        forced = with_inner(params, known, None)
        _, at = kit.start(forced, fixed, requests)
        cycle = next(kit.cycles(forced, fixed, at))
        assert cycle.out.verification.num_accepted.tolist() == [2, 2, 2]
        after = cycle.after
        caches = [kit.committed_kv(after, row) for row in range(3)]
        following = next(kit.cycles(forced, fixed, after))
        outcomes.append((caches, np.asarray(following.after[2].logits)))
    (caches, logits), (other_caches, other_logits) = outcomes
    for a, b in zip(jax.tree.leaves(caches), jax.tree.leaves(other_caches), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(logits, other_logits)


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_the_context_holds_target_features_of_committed_tokens_alone(kind):
    """Keys and values of each drafter layer against the reference, after steps that reject."""
    pair = kit.pair(kind=kind)
    fixed = kit.standard(pair.params)
    requests = [kit.Request(kit.prompt(n), 9) for n in (1, 12, 31)]
    done = kit.by_steps(pair.params, fixed, *kit.start(pair.params, fixed, requests))
    num_layers = pair.drafter.config.num_layers
    for row, one in enumerate(requests):
        text = [*one.prompt, *done.tokens[row]]
        want = kit.reference_block(pair, text, ROWS)
        for i, (k, v) in enumerate(kit.draft_kv(done.carriers, row, num_layers)):
            assert len(k) == len(text) - 1
            kit.assert_close(k, want.trace[f"layer{i}.k_cache"][: len(k)], f"layer {i} keys")
            kit.assert_close(v, want.trace[f"layer{i}.v_cache"][: len(v)], f"layer {i} values")


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_a_prompt_in_chunks_leaves_the_context_of_the_whole_prompt(kind):
    """Known fault B08. Rounding may differ, as a product's bits change with its rows."""
    params = kit.pair(kind=kind).params
    fixed = kit.standard(params)
    requests = [kit.Request(kit.prompt(n), 12) for n in (40, 33, 7)]
    runs = {}
    for real, bucket in ((64, 64), (16, 16), (7, 8), (1, 1)):
        at = kit.carriers(params, fixed, requests)
        firsts, at = kit.prefill(params, fixed, requests, at, bucket=bucket, real=real)
        caches = [kit.committed_kv(at, row) for row in range(3)]
        cycle = next(kit.cycles(params, fixed, at))
        tokens = [int(first.token) for first in firsts]
        runs[real] = caches, tokens, cycle.out.proposal.tokens.tolist()
    whole = runs.pop(64)
    for caches, *chosen in runs.values():
        assert chosen == list(whole[1:])
        for a, b in zip(jax.tree.leaves(caches), jax.tree.leaves(whole[0]), strict=True):
            kit.assert_close(a, b, "cache")


@pytest.mark.parametrize("kind", kit.DRAFTERS)
def test_a_sliding_layer_reads_nothing_older_than_its_window(kind):
    """Known fault A16: NaN beyond the window would reach the logits if the window were ignored."""
    pair = kit.pair(kind=kind)
    config = pair.params.draft.config
    assert [layer.window for layer in config.attention] == [kit.WINDOW, None]
    fixed = kit.standard(pair.params)
    requests = [kit.Request(kit.prompt(n), 12) for n in (40, 100, 9)]
    firsts, (state, buffers, scratch) = kit.start(pair.params, fixed, requests)
    table, lengths = np.asarray(buffers.meta.block_table), np.asarray(state.seq_lens)
    sliding = len(pair.params.target.layers)  # the drafter's first layer
    old = np.zeros((fixed.num_pages, fixed.page_size), bool)
    for row, length in enumerate(lengths):
        positions = np.arange(max(length - kit.WINDOW + 1, 0))  # the anchor's row reaches furthest
        old[table[row, positions // fixed.page_size], positions % fixed.page_size] = True
    assert old.sum() == 33 + 93 + 2

    def spoil(pools):
        pool = np.asarray(pools[sliding]).copy()
        pool[np.nonzero(old)[0], :, np.nonzero(old)[1]] = np.nan
        return *pools[:sliding], jax.numpy.asarray(pool), *pools[sliding + 1 :]

    buffers = buffers.replace(k_pools=spoil(buffers.k_pools), v_pools=spoil(buffers.v_pools))
    out, _, _, scratch = loop.step(
        pair.params, state, buffers, scratch, fixed=fixed, options=kit.OPTIONS
    )
    logits = np.asarray(scratch.logits).reshape(3, ROWS - 1, -1)
    for row, text in enumerate(texts(requests, firsts)):
        want = kit.reference_block(pair, text, ROWS)
        kit.assert_close(logits[row], want.logits, f"logits of row {row}")
        assert out.proposal.tokens[row].tolist() == want.drafts
