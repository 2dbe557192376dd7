"""Fitting: schedule, budget, resume, checkpoints, and that a tiny pair learns."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DraftConfig
from dflash_jax.params import TargetParams
from dflash_jax.train import arrays, loop
from dflash_jax.train.data import Corpus
from dflash_jax.train.dense import context_rows
from dflash_jax.train.initial import drafter_config
from dflash_jax.train.kinds import taps_of
from tests.drawn import drawn_tensors
from tests.kit import pair

OPTIONS = loop.TrainOptions(
    batch=4, anchors=8, learning_rate=1e-2, warmup=0.1, chunk=64, seed=5
)  # fmt: skip
TAPS, STEPS = (-1, 0), 30
SETTINGS = {"target": "tiny", "seed": "5"}


def tiny_target() -> TargetParams:
    return pair("llama", "dflash", alphabet=307).params.target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Runs of ids that count up by one, each row from an offset of its own: easy to draft."""
    rng = np.random.default_rng(0)
    tokens = (rng.integers(0, 12, (16, 1)) + np.arange(32)) % 12 + 20
    is_answer = np.broadcast_to(np.arange(32) >= 6, tokens.shape).copy()
    return Corpus(tokens.astype(np.int32), is_answer, np.zeros(16, np.int8))


@pytest.fixture(scope="module")
def configs(target) -> dict[str, DraftConfig]:
    sizes = {"taps": TAPS, "mask_id": 306, "block_rows": 4, "num_layers": 1, "ffn": 32}
    return {
        kind: DraftConfig.from_hf(drafter_config(kind, target.config, selector_rank=4, **sizes))
        for kind in ("dflash", "dflash2")
    }


def start(configs) -> loop.TrainState:
    return loop.start_state(
        {name: drawn_tensors(c, tiny_target()) for name, c in configs.items()}, OPTIONS
    )


def fit(target, corpus, configs, state, progress, steps, options=OPTIONS, **how):
    log = []
    budget = loop.Budget(progress, steps=STEPS)
    if steps < STEPS:  # stops early, on the same schedule
        budget = Interrupted(budget, progress, steps)
    scale = jnp.asarray([0.5, 2.0])
    state = loop.fit(
        target, corpus, scale, configs, state, progress, budget, options, log=log.append, every=10,
        **how,
    )  # fmt: skip
    return state, log


class Interrupted:
    """A budget of a run that is stopped at `last`."""

    def __init__(self, budget, progress, last):
        self._budget, self._progress, self._last = budget, progress, last

    def __getattr__(self, name):
        return getattr(self._budget, name)

    @property
    def is_spent(self):
        return self._progress.step >= self._last


@pytest.fixture(scope="module")
def whole(target, corpus, configs):
    """(state, log, progress) of an uninterrupted run of STEPS steps."""
    progress = loop.Progress()
    state, log = fit(target, corpus, configs, start(configs), progress, STEPS)
    return state, log, progress


def test_a_run_lowers_every_loss(whole):
    _, log, progress = whole
    assert [r["step"] for r in log] == [1, 11, 21, 30]
    assert [r["event"] for r in log] == ["compiled"] + ["train"] * 3
    assert progress.step == progress.total == STEPS
    first, last = log[0], log[-1]
    for name in ("dflash/cross_entropy", "dflash2/cross_entropy"):
        assert last[name] < 0.7 * first[name], name
    assert last["dflash2/candidate_recall"] > first["dflash2/candidate_recall"] + 0.2
    json.dumps(log, allow_nan=False)


def test_a_run_that_was_interrupted_ends_with_the_same_bits(
    tmp_path, target, corpus, configs, whole
):
    progress = loop.Progress()
    state, _ = fit(target, corpus, configs, start(configs), progress, 7)
    loop.save_checkpoint(tmp_path / "checkpoint.npz", state, progress, SETTINGS)
    other = start(configs)
    back, progress = loop.load_checkpoint(tmp_path / "checkpoint.npz", other, SETTINGS)
    assert progress.step == 11
    state, _ = fit(target, corpus, configs, back, progress, STEPS)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(whole[0]), strict=True):
        np.testing.assert_array_equal(a, b)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.npz"]


def test_only_matrices_decay():
    tensors = {"matrix": jnp.full((2, 3), 4.0), "norm": jnp.ones(3), "base": jnp.ones((2, 2, 3))}
    change = loop.optimizer(OPTIONS)
    nothing = jax.tree.map(jnp.zeros_like, tensors)
    moves, _ = jax.jit(change.update)(nothing, change.init(tensors), tensors)
    np.testing.assert_allclose(moves["matrix"], 4.0 * OPTIONS.weight_decay)
    assert not moves["norm"].any() and not moves["base"].any()


def test_a_state_owns_its_weights(target):
    """It is donated, and the final norm starts as the target's own array."""
    state = loop.start_state({"dflash": {"norm.weight": target.norm}}, OPTIONS)
    own = state.tensors["dflash"]["norm.weight"]
    assert own.unsafe_buffer_pointer() != target.norm.unsafe_buffer_pointer()
    np.testing.assert_array_equal(own, target.norm)


def test_a_loss_that_is_not_finite_ends_the_run(target, corpus, configs):
    state = start(configs)
    spoilt = {
        **state.tensors["dflash"],
        "fc.weight": state.tensors["dflash"]["fc.weight"] * jnp.nan,
    }
    state = state.replace(tensors={**state.tensors, "dflash": spoilt})
    with pytest.raises(FloatingPointError, match="dflash/cross_entropy is nan at step 1"):
        fit(target, corpus, configs, state, loop.Progress(), STEPS)


def test_folded_scales_give_the_same_context_from_raw_features(configs):
    features = jax.random.normal(jax.random.key(2), (2, 12, 2 * 64))
    config, scale = configs["dflash"], jnp.asarray([0.5, 2.0])  # powers of two: exact
    tensors = {"fc.weight": jax.random.normal(jax.random.key(3), (64, 2 * 64)),
               "hidden_norm.weight": jnp.ones(64)}  # fmt: skip
    run = jax.jit(lambda tensors, features: context_rows(tensors, config, features))
    trained = run(tensors, loop.scaled(features, scale))
    np.testing.assert_allclose(run(loop.fold_scale(tensors, scale), features), trained, rtol=1e-6)
    wrong = run(tensors, features)
    assert float(jnp.abs(wrong - trained).max()) > 0.1


# Schedule and budget


def test_the_rate_warms_up_and_ends_at_a_fiftieth():
    options = loop.TrainOptions(learning_rate=2.0, warmup=0.1)
    rate = lambda fraction: loop.learning_rate(options, fraction)
    assert rate(0.0) == pytest.approx(2.0 * 0.001 / 0.101)
    assert rate(0.1) == pytest.approx(2.0)
    assert rate(0.55) == pytest.approx(2.0 * (0.02 + 0.49))
    assert rate(1.0) == pytest.approx(0.04) and rate(1.5) == pytest.approx(0.04)
    rates = [rate(i / 100) for i in range(101)]
    assert rates[:11] == sorted(rates[:11]) and rates[10:] == sorted(rates[10:], reverse=True)


def test_a_budget_of_steps_counts_those_before_a_resume():
    progress = loop.Progress(step=5)
    budget = loop.Budget(progress, steps=8)
    assert progress.total == 8 and budget.window(20) == 3 and not budget.is_spent
    assert budget.fraction() == 5 / 8 and budget.fraction(2) == 7 / 8
    progress.step = 8
    assert budget.is_spent


def test_a_budget_of_minutes_is_planned_from_the_pace():
    progress = loop.Progress()
    budget = loop.Budget(progress, minutes=1.0)
    assert budget.window(20) == 20
    progress.step, progress.seconds = 10, 15.0
    budget.plan(0.5)  # 45 s left
    assert progress.total == 100
    assert budget.fraction() == 0.25 and budget.fraction(45) == pytest.approx(0.625)
    budget.plan(1.0)  # slower now
    assert progress.total == 55
    progress.seconds = 60.5
    assert budget.is_spent and budget.fraction(3) == 1.0


@pytest.mark.parametrize("given", [{}, {"steps": 3, "minutes": 1.0}])
def test_a_budget_is_steps_or_minutes(given):
    with pytest.raises(ValueError, match="either steps or minutes"):
        loop.Budget(loop.Progress(), **given)


def test_drafters_of_one_run_share_their_taps_and_have_no_windows(configs):
    assert taps_of([*configs.values()]) == TAPS
    other = dataclasses.replace(configs["dflash"], target_layer_ids=(0,))
    with pytest.raises(ValueError, match="wanted the same layers"):
        taps_of([*configs.values(), other])
    capped = dataclasses.replace(configs["dflash"], soft_cap=30.0)
    with pytest.raises(NotImplementedError, match="training dflash: soft-cap"):
        taps_of([*configs.values(), capped])


# Checkpoints


@pytest.fixture
def saved(tmp_path, target, configs):
    path = tmp_path / "checkpoint.npz"
    state = start(configs)
    loop.save_checkpoint(path, state, loop.Progress(3, 9, 1.5), SETTINGS)
    return path, state


def test_a_checkpoint_comes_back_as_it_was(saved):
    path, state = saved
    empty = jax.tree.map(jnp.zeros_like, state)
    back, progress = loop.load_checkpoint(path, empty, SETTINGS)
    assert progress == loop.Progress(3, 9, 1.5)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b)


def test_a_checkpoint_of_other_drafters_is_refused(saved, target, configs):
    path, _ = saved
    wider = {n: dataclasses.replace(c, ffn=48) for n, c in configs.items()}
    for other in (wider, {"dflash": configs["dflash"]}):
        with pytest.raises(ValueError, match=r"checkpoint\.npz: a checkpoint of drafters of other"):
            loop.load_checkpoint(path, start(other), SETTINGS)


def test_a_checkpoint_of_another_run_is_refused(saved):
    path, state = saved
    with pytest.raises(ValueError, match="made with --seed 5, and --resume came with 6"):
        loop.load_checkpoint(path, state, SETTINGS | {"seed": "6"})


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(saved, monkeypatch):
    path, state = saved
    before = path.read_bytes()

    def full(file, **columns):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(arrays.np, "savez", full)
    with pytest.raises(OSError, match="No space left"):
        loop.save_checkpoint(path, state, loop.Progress(4), SETTINGS)
    assert [p.name for p in path.parent.iterdir()] == ["checkpoint.npz"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("size", [0, 100, -100], ids=["empty", "start", "all but the end"])
def test_a_damaged_checkpoint_is_named(saved, size):
    path, state = saved
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"checkpoint\.npz: not a whole \.npz file"):
        loop.load_checkpoint(path, state, SETTINGS)


def test_other_arrays_are_no_checkpoint(tmp_path, saved):
    _, state = saved
    arrays.write_arrays(tmp_path / "x.npz", {"tokens": np.zeros(3)})
    with pytest.raises(ValueError, match=r"x\.npz: no array about, it has tokens"):
        loop.load_checkpoint(tmp_path / "x.npz", state, SETTINGS)
    np.save(tmp_path / "y.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"y\.npy: not a whole \.npz file"):
        loop.load_checkpoint(tmp_path / "y.npy", state, SETTINGS)
