"""How confidences cut a proposal: thresholds, the scheduler, temperatures fitted to a record."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.drafters import confidence
from dflash_jax.fixed import plan
from dflash_jax.params import ConfidencePolicy
from tests import kit
from tests.reference import dspark as reference


def sizes(batch, num_drafts):
    target = kit.pair(kind="dspark").params.target.config
    draft = kit.lookup(kit.pair(kind="dspark").params, num_drafts).draft.config
    return plan(target, draft, batch=batch, max_context=64)


def keep(scores, limits, *, threshold=0.0, temperatures=None, rates=None):
    scores, limits = jnp.asarray(scores, jnp.float32), jnp.asarray(limits, jnp.int32)
    wide = [None if x is None else jnp.asarray(x, jnp.float32) for x in (temperatures, rates)]
    policy = ConfidencePolicy(jnp.float32(threshold), *wide)
    return _keep(policy, scores, limits, fixed=sizes(*scores.shape)).tolist()


_keep = jax.jit(confidence.keep, static_argnames="fixed")


def logit(chance):
    return float(np.log(chance / (1 - chance)))


def test_a_threshold_is_of_the_chance_and_of_each_draft_alone():
    """Known fault B22: logits are mapped by a sigmoid, and not multiplied up for a threshold."""
    rows = [
        [logit(p) for p in (0.9, 0.8, 0.4, 0.99)],  # the third is the first below a half
        [logit(p) for p in (0.51, 0.51, 0.51, 0.51)],  # together far below it
        [logit(p) for p in (0.3, 0.9, 0.9, 0.9)],
        [logit(p) for p in (0.9, 0.9, 0.9, 0.9)],
    ]
    assert keep(rows, [4, 4, 4, 2], threshold=0.5) == [2, 4, 0, 2]
    assert keep(rows, [4, 4, 4, -1], threshold=0.0) == [4, 4, 4, -1]
    assert keep(rows, [4, 4, 4, 4], threshold=0.95) == [0, 0, 0, 0]


def test_a_scheduler_weighs_the_chance_of_a_draft_and_all_before_it():
    """Known fault B22, by hand: 0.9, 0.81, 0.729 and 0.6, 0.36, 0.216 with a row at 0.4 of a step.

    Two anchors cost 1 step a second each; joining rows multiply expected tokens by the rate.
    """
    scores = [[logit(0.9)] * 3, [logit(0.6)] * 3]
    rates = [0.0, 1.0, 1.0, 0.8, 0.66, 0.55, 0.3, 0.2, 0.1]
    # 2.0; 2.9*0.8 = 2.32; 3.71*0.66 = 2.449; 4.439*0.55 = 2.441 does not improve
    assert keep(scores, [3, 3], rates=rates) == [2, 0]
    # A step of one sequence: 1.0, 1.9 at two rows, 2.71*0.8, 3.439*0.66.
    assert keep(scores, [3, -1], rates=rates) == [3, -1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_keeps_nothing_from_there_on(bad):
    rows = [[bad, 9.0, 9.0], [9.0, bad, 9.0], [9.0, 9.0, bad]]
    for threshold in (0.0, 0.5):
        assert keep(rows, [3, 3, 2], threshold=threshold) == [0, 1, 2]
    rates = np.ones(13)
    assert keep(rows, [3, 3, 2], rates=rates) == [0, 1, 2]


def test_the_scheduler_is_the_papers_algorithm():
    rng = np.random.default_rng(0)
    for seed in range(20):
        scores = rng.normal(1.0, 2.0, (4, 5)).astype(np.float32)
        rates = np.sort(rng.uniform(0.2, 1.0, 25))[::-1].astype(np.float32)
        temperatures = rng.uniform(0.5, 2.0, 5).astype(np.float32)
        limits = rng.integers(-1, 6, 4)
        want = reference.schedule(reference.survival(scores, temperatures), rates, limits)
        got = keep(scores, limits, temperatures=temperatures, rates=rates)
        assert got == np.where(limits < 0, limits, want).tolist(), seed


def test_no_row_is_judged_by_what_follows_it():
    """The confidence of draft j + 1 depends on draft j, so it must not bear on that one's fate."""
    rng = np.random.default_rng(1)
    rates = np.sort(rng.uniform(0.2, 1.0, 25))[::-1]
    for _ in range(10):
        scores = rng.normal(1.0, 2.0, (4, 5))
        before = keep(scores, [5] * 4, rates=rates)
        for j in range(5):
            changed = scores.copy()
            changed[2, j:] = rng.normal(1.0, 4.0, 5 - j)
            after = keep(changed, [5] * 4, rates=rates)
            assert min(before[2], j) == min(after[2], j)


def test_a_policy_for_other_sizes_is_refused():
    with pytest.raises(ValueError, match="steps_per_second has 3 entries, wanted 13 for 3"):
        keep(np.zeros((3, 3)), [3] * 3, rates=np.ones(3))
    with pytest.raises(ValueError, match="temperatures has 2 entries, wanted 3"):
        keep(np.zeros((3, 3)), [3] * 3, temperatures=np.ones(2), rates=np.ones(13))


def test_a_drafter_without_the_head_and_numbers_that_mean_nothing_are_refused():
    with_head = kit.pair(kind="dspark").params.draft
    without = kit.pair(kind="dflash").params.draft
    with pytest.raises(ValueError, match="the dflash drafter has no confidence head"):
        confidence.with_threshold(without, 0.5)
    with pytest.raises(ValueError, match="threshold is 1.5, wanted 0 to 1"):
        confidence.with_threshold(with_head, 1.5)
    with pytest.raises(ValueError, match="steps_per_second are not a list of positive numbers"):
        confidence.with_scheduler(with_head, np.array([1.0, np.nan, 0.5]))
    with pytest.raises(ValueError, match="temperatures are not a list of positive numbers"):
        confidence.with_scheduler(with_head, np.ones(9), np.zeros(7))


def test_fitted_temperatures_make_an_overconfident_head_say_what_happens():
    rng = np.random.default_rng(2)
    truth = rng.normal(1.0, 1.0, (20000, 3))
    happens = rng.uniform(size=truth.shape) < 1 / (1 + np.exp(-truth))
    num_accepted = np.cumprod(happens, axis=1).sum(axis=1)
    fitted = confidence.fit_temperatures(truth * [4.0, 2.0, 1.0], num_accepted)
    np.testing.assert_allclose(fitted, [4.0, 2.0, 1.0], rtol=0.2)
    with pytest.raises(ValueError, match=r"logits \[3, 2\] and accepted counts \[4\]"):
        confidence.fit_temperatures(np.zeros((3, 2)), np.zeros(4))
