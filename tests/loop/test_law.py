"""The law: greedy speculative tokens are the greedy plain tokens, and their logits the same bits.

Plain means the same executable with no draft kept (`keep` = 0). About 5 CPU minutes, nearly all of
it compiling: an executable for every drafter, target, batch and page size. Another page size places
keys elsewhere and computes rows alike. So pages of 16 are compiled as for a user, in both dtypes;
the others with little optimisation, which takes two thirds of the time, and in one dtype each, so
that each dtype meets every target with every batch. Prefill is shared, too: it is none of what is
compared.
"""

import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from dflash_jax import drafters, loop
from dflash_jax.drafters.confidence import with_scheduler, with_threshold
from tests import kit

pytestmark = [pytest.mark.usefixtures("strict_dtypes"), pytest.mark.slow]


def cases():
    """Target, batch, page size and dtype: both dtypes for pages of 16, else one of them in turn."""
    for family, batch, page_size, dtype in itertools.product(
        kit.FAMILIES, [1, 4], [4, 16, 64], ["float32", "bfloat16"]
    ):
        turn = (family == "llama") + (batch == 4) + (page_size == 64) + (dtype == "bfloat16")
        if page_size == 16 or turn % 2 == 0:
            case = family, batch, page_size, dtype
            yield pytest.param(*case, id="-".join(map(str, case)))


everywhere = pytest.mark.parametrize(("family", "batch", "page_size", "dtype"), list(cases()))


@pytest.fixture(scope="module", autouse=True)
def compiled_here():
    """Forget what other files compiled with less optimisation."""
    jax.clear_caches()


@pytest.fixture(autouse=True)
def compile_effort(request):
    """Full optimisation for pages of 16 and wherever no page size is chosen."""
    params = getattr(request.node, "callspec", None)
    page_size = params.params.get("page_size", 16) if params else 16
    jax.config.update("jax_disable_most_optimizations", page_size != 16)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def differences(got: kit.Run, want: kit.Run) -> list[str]:
    """What differs between two runs of one batch; nothing where the law holds."""
    found = []
    for row in range(len(want.tokens)):
        for what in ("tokens", "hashes"):
            a, b = getattr(got, what)[row], getattr(want, what)[row]
            if a != b:
                pairs = zip([*a, None], [*b, None], strict=False)
                at = next(i for i, (x, y) in enumerate(pairs) if x != y)
                found.append(f"row {row}: {what} differ from {at}")
        caches = kit.committed_kv(got.carriers, row), kit.committed_kv(want.carriers, row)
        if not all(np.array_equal(a, b) for a, b in zip(*caches, strict=True)):
            found.append(f"row {row}: committed keys or values differ")
    if got.status != want.status:
        found.append(f"status {got.status}, plain {want.status}")
    return found


def pair_of(family, dtype, page_size, kind="dflash"):
    """A pair with small blocks for the largest pages, so that both sizes of block are there."""
    block = 4 if page_size == 64 else 8
    return kit.pair(family, kind, dtype=dtype, layers="one", block=block).params


def draft_of(drafter, *which):
    """The pair under test, and how to run it: dflash prefills for all, to compile less."""
    first = pair_of(*which)
    if drafter == "dflash":
        return first, {}
    if drafter == "prompt_lookup":
        return kit.lookup(first, first.draft.config.max_drafts), {"prefilled_by": first}
    second = pair_of(*which, drafter)
    for name in ("fc", "hidden_norm", "fused_kv"):  # hence the same context
        assert np.array_equal(getattr(first.draft, name), getattr(second.draft, name))
    return second, {"prefilled_by": first}


@pytest.mark.parametrize("drafter", ["dflash", "dflash2", "prompt_lookup"])
@everywhere
def test_speculative_tokens_and_logits_are_those_of_plain_decoding(
    family, batch, page_size, dtype, drafter
):
    params, how = draft_of(drafter, family, dtype, page_size)
    fixed = kit.sizes(params, batch, page_size=page_size)
    requests = kit.ragged(batch)
    want = kit.plain(params, fixed, requests, **how)
    got = kit.run(params, fixed, requests, **how)
    assert not differences(got, want)
    assert all(set(counts) <= {1} for counts in want.committed)
    assert any(count > 1 for counts in got.committed for count in counts), "no draft was accepted"
    assert len(set(got.status)) == min(batch, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("drafter", "family"), [("dspark", "qwen3"), ("mtp", "llama")])
def test_chained_drafters_obey_the_law_too(drafter, family, dtype):
    """DSpark with its rows cut by confidence, and the head that drafts token by token."""
    params, how = (
        draft_of(drafter, family, dtype, 16)
        if drafter == "dspark"
        else (kit.pair(family, drafter, dtype=dtype, layers="one", block=4).params, {})
    )
    fixed = kit.sizes(params, 4, page_size=16)
    if drafter == "dspark":
        # A row may join while it is worth more than the hundredth of a step that it costs.
        rates = 1 / (1 + 0.01 * np.arange(fixed.num_rows + 1))
        cut = with_threshold(params.draft, 0.6)
        cut = cut if dtype == "float32" else with_scheduler(params.draft, rates)
        params = params.replace(draft=cut)
    requests = kit.ragged(4)
    want = kit.plain(params, fixed, requests, **how)
    got = kit.run(params, fixed, requests, **how)
    assert not differences(got, want)
    assert all(set(counts) <= {1} for counts in want.committed)
    assert any(count > 1 for counts in got.committed for count in counts), "no draft was accepted"


def oracle(params, fixed, tokens=None, poison=None):
    """An oracle for the pair's target; without tokens it knows nothing."""
    if tokens is None:
        tokens = np.zeros((fixed.batch, fixed.capacity + 1), np.int32)
    return kit.oracle(params, tokens, poison, params.draft.config.max_drafts)


@everywhere
def test_every_forced_acceptance_changes_no_token_and_no_logit(family, batch, page_size, dtype):
    params = pair_of(family, dtype, page_size)
    rule = kit.lookup(params, params.draft.config.max_drafts)
    fixed = kit.sizes(rule, batch, page_size=page_size)
    how = {"requests": kit.ragged(batch), "prefilled_by": params}
    want = kit.plain(oracle(params, fixed), fixed, **how)
    for k in range(fixed.num_drafts + 1):
        poison = (k + np.arange(batch)) % (fixed.num_drafts + 1)  # another number in each row
        got = kit.run(oracle(params, fixed, kit.history(want), poison), fixed, **how)
        assert not differences(got, want), f"poison at {poison}"
        for row, counts in enumerate(got.accepted):
            assert set(counts[:-1]) <= {poison[row]}


def test_no_drafter_is_left_out():
    """Known fault D01: a kind that joins the registry joins the law."""
    here = {*kit.KINDS, "prompt_lookup", "oracle"}
    assert set(drafters._BY_KIND) == here | {"none"}  # without drafts there is nothing to compare


# Mutations: an attention that is right to rounding and breaks the law must be seen.


def _gather(pool, table):
    """[B, K, S, D] of all pages, whatever they hold read as a number."""
    pages = jnp.nan_to_num(pool[jnp.maximum(table, 0)])  # [B, P, K, page_size, D]
    b, p, k, page_size, d = pages.shape
    return pages.transpose(0, 2, 1, 3, 4).reshape(b, k, p * page_size, d)


def _scores(q, k_pool, v_pool, table, args):
    """Scores f32[B, K, G, R, S] with the values they weigh, and which keys a row may see."""
    b, r, h, d = q.shape
    k, v = _gather(k_pool, table), _gather(v_pool, table)
    grouped = q.reshape(b, r, k.shape[1], -1, d)
    scores = jnp.einsum("brkgd,bksd->bkgrs", grouped, k, preferred_element_type=jnp.float32)
    key = jnp.arange(k.shape[2], dtype=jnp.int32)[None, None]
    row = args[:, 1].astype(jnp.int32)[:, None] + jnp.arange(r, dtype=jnp.int32)[None]
    sees = (key <= row[:, :, None]) & (key < args[:, 0].astype(jnp.int32)[:, None, None])
    return scores * d**-0.5, v, sees[:, None, None], key


def _weighted(p, v, q):
    out = jnp.einsum("bkgrs,bksd->brkgd", p, v.astype(jnp.float32))
    return out.reshape(q.shape).astype(q.dtype)


def masked_keys_count_a_little(q, k_pool, v_pool, table, args, **_):
    """A masked score is low, but not an exact zero after the exponential."""
    scores, v, sees, _ = _scores(q, k_pool, v_pool, table, args)
    p = jnp.exp(jnp.where(sees, scores, -12.0))
    return _weighted(p / jnp.sum(p, axis=-1, keepdims=True), v, q)


def split_by_length(q, k_pool, v_pool, table, args, **_):
    """Two softmaxes joined online, split at half the keys that exist."""
    scores, v, sees, key = _scores(q, k_pool, v_pool, table, args)
    is_first = (key < (args[:, 0].astype(jnp.int32) // 2)[:, None, None])[:, None, None]
    parts = []
    for part in (sees & is_first, sees & ~is_first):
        kept = jnp.where(part, scores, -1e30)
        m = jnp.max(kept, axis=-1, keepdims=True)
        p = jnp.where(part, jnp.exp(kept - m), 0.0)
        parts.append((m, jnp.sum(p, axis=-1, keepdims=True), p))
    (m1, l1, p1), (m2, l2, p2) = parts
    m = jnp.maximum(m1, m2)
    total = l1 * jnp.exp(m1 - m) + l2 * jnp.exp(m2 - m)
    return _weighted((p1 * jnp.exp(m1 - m) + p2 * jnp.exp(m2 - m)) / total, v, q)


def untouched(q, k_pool, v_pool, table, args, **_):
    """The same arithmetic without a fault, so that a red mutant is red for its fault alone."""
    scores, v, sees, _ = _scores(q, k_pool, v_pool, table, args)
    kept = jnp.where(sees, scores, -1e30)
    p = jnp.where(sees, jnp.exp(kept - jnp.max(kept, axis=-1, keepdims=True)), 0.0)
    return _weighted(p / jnp.sum(p, axis=-1, keepdims=True), v, q)


@pytest.mark.parametrize(
    ("attention", "holds"),
    [(untouched, True), (masked_keys_count_a_little, False), (split_by_length, False)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_an_attention_that_breaks_the_law_turns_this_red(attention, holds):
    # A function of its own, so that neither its trace nor the real one's comes from a cache.
    def mutant(*args, **kwargs):
        with mock.patch.object(pk, "paged_attention", attention):
            return loop.decode.__wrapped__(*args, **kwargs)

    decode = jax.jit(mutant, static_argnames=("fixed", "options"))
    params = pair_of("qwen3", "float32", 4)
    fixed = kit.sizes(kit.lookup(params), 4)
    how = {"requests": kit.ragged(4), "prefilled_by": params, "decode": decode}
    want = kit.plain(oracle(params, fixed), fixed, **how)
    got = kit.run(oracle(params, fixed, kit.history(want), np.array([7, 3, 1, 0])), fixed, **how)
    assert (not differences(got, want)) == holds
