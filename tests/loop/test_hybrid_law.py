"""The law on hybrid targets: drafted and plain decoding agree in every token, logit and state bit.

Known faults A06 (a recurrent state that rejected drafts have touched), A09 (the bonus token behind
a wholly accepted block), A11 (a finished sequence that goes on) and A36 (a state of the call
before). Few configurations, since each costs a compile: a Gated-DeltaNet layer and an attention
layer, the two families between them dense and with experts, f32 and bf16, every drafter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax import loop
from dflash_jax.state import Status
from tests import kit
from tests.loop.test_law import differences

pytestmark = [pytest.mark.usefixtures("strict_dtypes"), pytest.mark.slow]

BATCH = 3
CASES = [("qwen3_5", "bfloat16"), ("qwen3_next", "float32")]
each_target = pytest.mark.parametrize(
    ("family", "dtype"), [pytest.param(*case, id="-".join(case)) for case in CASES]
)


@pytest.fixture(autouse=True)
def compile_effort(request):
    """Full optimisation for bf16 under forced acceptance, where a rounding could be left out."""
    params = getattr(request.node, "callspec", None)
    is_full = params is None or params.params.get("dtype") == "bfloat16"
    jax.config.update("jax_disable_most_optimizations", not is_full)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pair_of(family, dtype, kind="dflash", block=8):
    seed = 1 if kind == "mtp" else None  # a head that is right now and then
    return kit.pair(family, kind, dtype=dtype, layers="one", block=block, seed=seed).params


def requests_of():
    """Prompts of one call, less than one and two; the second is finished long before the others."""
    return [
        kit.Request(kit.prompt(20), 36),
        kit.Request(kit.prompt(7), 21),
        kit.Request(kit.prompt(33), 40, stop_ids=(203,)),
    ]


def states_of(params, fixed, done: kit.Run):
    """State and rows in front of it, a list a layer, after everything that was committed.

    One more plain step folds what the last step kept, in the run's own executable.
    """
    state, buffers, scratch = jax.tree.map(jnp.copy, done.carriers)  # a step takes them
    count = len(done.tokens)
    lengths = state.seq_lens
    state = state.replace(
        keep=jnp.zeros_like(state.keep),
        remaining=jnp.full_like(state.remaining, 5),
        max_lens=jnp.full_like(state.max_lens, fixed.capacity),
        status=jnp.where(lengths > 0, int(Status.ACTIVE), state.status),
    )
    _, _, buffers, _ = loop.step(params, state, buffers, scratch, fixed=fixed, options=kit.OPTIONS)
    taps = params.target.config.gdn.conv_taps - 1
    order = np.asarray(buffers.verify_wy_tables)[:count]
    return [
        (np.asarray(x.state)[order], np.asarray(x.conv)[order, :taps]) for x in buffers.gdn.layers
    ]


def by_steps(params, fixed, requests, **how):
    """A run by `loop.step`, whose executable also tells the states."""
    return kit.by_steps(params, fixed, *kit.start(params, fixed, requests, **how))


def assert_lawful(params, fixed, got, want, what=""):
    assert not differences(got, want), what
    pairs = zip(states_of(params, fixed, got), states_of(params, fixed, want), strict=True)
    for i, (ours, plain) in enumerate(pairs):
        for name, a, b in zip(("state", "conv"), ours, plain, strict=True):
            assert np.isfinite(a.astype(np.float32)).all(), f"{what}: {name} of layer {i}"
            assert np.array_equal(a, b), f"{what}: {name} of layer {i}"


@each_target
def test_any_forced_acceptance_leaves_the_tokens_and_states_of_plain_decoding(family, dtype):
    """A06 and A09: k swept from none to all, another k in each row; blocks of three drafts, so
    that fewer rows are kept than the convolution has taps."""
    params = pair_of(family, dtype, block=4)
    fixed = kit.sizes(kit.lookup(params, 3), BATCH)
    requests = requests_of()

    def oracle(tokens=None, poison=None):
        if tokens is None:
            tokens = np.zeros((BATCH, fixed.capacity + 1), np.int32)
        return kit.oracle(params, tokens, poison, 3)

    want = by_steps(oracle(), fixed, requests, keep=0)
    assert all(set(counts) <= {1} for counts in want.committed)
    for k in range(4):
        poison = (k + np.arange(BATCH)) % 4
        drafted = oracle(kit.history(want), poison)
        got = by_steps(drafted, fixed, requests)
        assert_lawful(drafted, fixed, got, want, f"poison at {poison}")
        for row, counts in enumerate(got.accepted):
            assert set(counts[:-1]) <= {poison[row]}


def one_row_too_many(at: kit.Carriers) -> kit.Carriers:
    """The fault itself: the first rejected row is folded into every state, as if it were text."""
    state, buffers, scratch = at
    most = buffers.gdn.layers[0].past_g.shape[1]
    kept = buffers.gdn.num_kept
    gdn = buffers.gdn.replace(num_kept=jnp.where(kept > 0, jnp.minimum(kept + 1, most), kept))
    return state, buffers.replace(gdn=gdn), scratch


def test_a_rejected_row_in_a_state_turns_this_red():
    params = pair_of("qwen3_5", "bfloat16", block=4)
    rule = kit.oracle(params, np.zeros((BATCH, 81), np.int32), None, 3)
    fixed = kit.sizes(rule, BATCH)
    requests = requests_of()
    want = by_steps(rule, fixed, requests, keep=0)
    drafted = kit.oracle(params, kit.history(want), np.array([0, 1, 2]), 3)
    firsts, at = kit.start(drafted, fixed, requests)
    got = kit.by_steps(drafted, fixed, firsts, at, between=one_row_too_many)
    assert all(any(f"row {row}: hashes" in x for x in differences(got, want)) for row in range(3))


def poison_behind_the_text(at: kit.Carriers) -> kit.Carriers:
    """NaN in all that no step may read: unused pages, rows not kept, rows before those in front."""
    state, buffers, scratch = kit.poison_unused(at)
    kept = buffers.gdn.num_kept[:, None]

    def spoil(field, first, last):
        row = jnp.arange(field.shape[1], dtype=jnp.int32)[None]
        there = ((row >= first) & (row < last)).reshape(*field.shape[:2], *(1,) * (field.ndim - 2))
        return jnp.where(there, field, jnp.full_like(field, jnp.nan))

    layers = []
    for x in buffers.gdn.layers:
        taps = x.conv.shape[1] - x.past_g.shape[1]
        past = {f: spoil(getattr(x, f), 0, kept) for f in ("past_kv", "past_g", "past_beta")}
        layers.append(x.replace(conv=spoil(x.conv, kept, kept + taps), **past))
    gdn = buffers.gdn.replace(layers=tuple(layers))
    return state, buffers.replace(gdn=gdn), scratch


def test_what_lies_behind_the_text_is_never_read():
    params = pair_of("qwen3_5", "bfloat16", block=4)
    rule = kit.oracle(params, np.zeros((BATCH, 81), np.int32), None, 3)
    fixed = kit.sizes(rule, BATCH)
    requests = requests_of()
    want = by_steps(rule, fixed, requests, keep=0)
    drafted = kit.oracle(params, kit.history(want), np.array([0, 2, 3]), 3)
    firsts, at = kit.start(drafted, fixed, requests)
    got = kit.by_steps(drafted, fixed, firsts, at, between=poison_behind_the_text)
    assert_lawful(drafted, fixed, got, want)


@pytest.mark.parametrize("kind", kit.KINDS)
def test_every_drafter_agrees_with_plain_decoding(kind):
    """Known fault D01. DFlash and DFlash2 on the dense family, the others on that with experts."""
    family, dtype = CASES[kind in ("dspark", "mtp")]
    params = pair_of(family, dtype, kind, block=4)
    # DFlash2's context is DFlash's, and so its prefill need not be compiled.
    how = {"prefilled_by": pair_of(family, dtype, block=4)} if kind == "dflash2" else {}
    fixed = kit.sizes(params, BATCH)
    requests = requests_of()
    want = kit.plain(params, fixed, requests, **how)
    got = kit.run(params, fixed, requests, **how)
    assert not differences(got, want)
    assert any(count > 1 for counts in got.committed for count in counts), "no draft was accepted"


def test_a_sequence_decodes_alone_as_among_others_and_after_others():
    """A11, A36: other members, other slots, worn buffers; its own tokens, logits and states."""
    params = pair_of("qwen3_5", "bfloat16", block=4)
    rule = kit.lookup(params, 3)
    fixed = kit.sizes(rule, BATCH)
    first, second, third = requests_of()
    together = by_steps(rule, fixed, [first, second, third])
    worn = jax.tree.map(jnp.copy, together.carriers[1:])
    alone = by_steps(rule, fixed, [second], worn=worn)
    assert alone.tokens[0] == together.tokens[1]
    assert alone.hashes[0] == together.hashes[1]
    for ours, theirs in zip(
        states_of(rule, fixed, alone), states_of(rule, fixed, together), strict=True
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert np.array_equal(a[0], b[1])
