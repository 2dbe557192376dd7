"""Confidence of drafts, and how many of them it lets through (spec/drafters.md §5.2).

A confidence logit says how likely a draft is to be accepted if all before it are. It depends on
tokens before the draft alone, and so does every rule here: a rule that looked at the draft itself
would change what is sampled. Rows that are cut are masked in the one compiled width, which keeps
the law; a scheduler makes the count, though not the text, depend on the batch.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.fixed import Fixed
from dflash_jax.params import ConfidenceParams, ConfidencePolicy, DrafterParams, DraftParams
from dflash_jax.words import counted


def logits(head: ConfidenceParams, rows: jax.Array, latents: jax.Array | None) -> jax.Array:
    """Confidence logits f32[B, J] of final-norm rows [B, J, E] and latents [B, J, rank]."""
    read = rows.astype(jnp.float32)
    if latents is not None and head.weight.shape[1] > rows.shape[-1]:
        read = jnp.concatenate([read, latents.astype(jnp.float32)], axis=-1)
    weight = head.weight.astype(jnp.float32)[0]
    return jnp.sum(read * weight[None, None], axis=-1) + head.bias.astype(jnp.float32)[None]


def keep(
    policy: ConfidencePolicy, scores: jax.Array, limits: jax.Array, *, fixed: Fixed
) -> jax.Array:
    """Drafts to verify i32[B] of confidence logits f32[B, J] and i32[B] drafts that may be.

    A logit that is not finite lets nothing through from there on. A limit of -1, a sequence that
    takes no step, comes back as it is.

    Raises:
      ValueError: numbers of a policy that was made for fewer drafts or rows.
    """
    _check(policy, fixed)
    offset = jnp.arange(scores.shape[1], dtype=jnp.int32)[None]
    is_real = jnp.isfinite(scores) & (offset < limits[:, None])
    if policy.temperatures is not None:
        scores = scores / policy.temperatures[None, : scores.shape[1]]
    chance = jax.nn.sigmoid(scores)
    if policy.steps_per_second is not None:
        survival = jnp.cumprod(jnp.where(is_real, chance, 0.0), axis=1)
        kept = schedule(survival, is_real, policy.steps_per_second, limits >= 0)
    else:
        is_kept = is_real & ((policy.threshold <= 0) | (chance >= policy.threshold))
        kept = jnp.sum(jnp.cumprod(is_kept.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return jnp.where(limits < 0, limits, kept)


def schedule(
    survival: jax.Array, is_real: jax.Array, steps_per_second: jax.Array, is_active: jax.Array
) -> jax.Array:
    """The paper's Algorithm 1 with its early stop: i32[B] rows admitted of each sequence.

    Rows join in order of survival, equal ones by sequence and row, while each one raises
    (expected tokens) * steps_per_second[rows]; the first that does not ends it. Survival never
    rises along a sequence, so what joins is a prefix, and no row is judged by what follows it.

    Args:
      survival: f32[B, J] chance that a draft and all before it are accepted.
      is_real: bool[B, J]; the others never join.
      steps_per_second: f32[rows + 1] by rows verified.
      is_active: bool[B] sequences that verify their anchor.
    """
    batch, drafts = survival.shape
    order = jnp.argsort(-jnp.where(is_real, survival, -1.0).reshape(-1), stable=True)
    start = jnp.sum(is_active, dtype=jnp.int32)
    gained = jnp.cumsum(jnp.where(is_real, survival, 0.0).reshape(-1)[order])
    tokens = start.astype(jnp.float32) + jnp.concatenate([jnp.zeros(1, jnp.float32), gained])
    rows = start + jnp.arange(batch * drafts + 1, dtype=jnp.int32)
    rate = tokens * steps_per_second[jnp.minimum(rows, steps_per_second.shape[0] - 1)]
    joins = (rate[1:] > rate[:-1]) & is_real.reshape(-1)[order]
    joins = jnp.cumprod(joins.astype(jnp.int32))
    return jnp.zeros((batch,), jnp.int32).at[order // drafts].add(joins)


def _check(policy: ConfidencePolicy, fixed: Fixed) -> None:
    for name, x, least in (
        ("temperatures", policy.temperatures, fixed.num_drafts),
        ("steps_per_second", policy.steps_per_second, fixed.num_rows + 1),
    ):
        if x is not None and x.shape[0] < least:
            raise ValueError(
                f"confidence policy: {name} has {counted(x.shape[0], 'entry', 'entries')}, wanted "
                f"{least} for {counted(fixed.batch, 'sequence')} of "
                f"{counted(fixed.num_drafts, 'draft')}"
            )


def with_threshold(draft: DrafterParams | None, threshold: float) -> DraftParams:
    """The drafter, verifying drafts before the first whose confidence is below `threshold`.

    0 verifies all. Another threshold compiles nothing anew.

    Raises:
      ValueError: a drafter without a confidence head, or a threshold outside 0 to 1.
    """
    draft = _require_head(draft)
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"confidence: threshold is {threshold}, wanted 0 to 1")
    return draft.replace(policy=ConfidencePolicy(jnp.float32(threshold)))


def with_scheduler(
    draft: DrafterParams | None,
    steps_per_second: np.ndarray,
    temperatures: np.ndarray | None = None,
) -> DraftParams:
    """The drafter, sharing the rows of each step among the sequences by expected tokens a second.

    Args:
      steps_per_second: [rows + 1] steps a second by rows verified, of all sequences together; a
        measured or planned table. Entry 0 is not read.
      temperatures: [num_drafts] from `fit_temperatures`; None takes confidences as they are.

    Raises:
      ValueError: a drafter without a confidence head, or numbers that are not positive and finite.
    """
    draft = _require_head(draft)
    rates = np.asarray(steps_per_second, np.float32)
    scales = np.ones(draft.config.max_drafts) if temperatures is None else temperatures
    scales = np.asarray(scales, np.float32)
    for name, x in (("steps_per_second", rates[1:]), ("temperatures", scales)):
        if x.ndim != 1 or not x.size or not (np.isfinite(x) & (x > 0)).all():
            raise ValueError(f"confidence: {name} are not a list of positive numbers")
    policy = ConfidencePolicy(jnp.float32(0.0), jnp.asarray(scales), jnp.asarray(rates))
    return draft.replace(policy=policy)


def _require_head(draft: DrafterParams | None) -> DraftParams:
    if not isinstance(draft, DraftParams) or draft.confidence is None:
        kind = "oracle" if draft is None else draft.config.kind
        raise ValueError(
            f"confidence: the {kind} drafter has no confidence head, wanted a DSpark "
            "drafter that has one"
        )
    return draft


_LOG_SCALES = np.linspace(np.log(1 / 8), np.log(8), 193)


def fit_temperatures(scores: np.ndarray, num_accepted: np.ndarray) -> np.ndarray:
    """Sequential temperature scaling: f32[J], fitted left to right from recorded steps.

    Each position's temperature is the one at which the product of confidences up to it comes
    closest to how often that many drafts were accepted, position by position, by expected
    calibration error over ten bins of equal width. What earlier positions chose stays.

    Args:
      scores: [S, J] confidence logits (`scratch.conf_out`) of S steps that verified every draft.
      num_accepted: [S] drafts accepted in each.

    Raises:
      ValueError: arrays that do not belong together, or no step.
    """
    scores, num_accepted = np.asarray(scores, np.float64), np.asarray(num_accepted)
    if scores.ndim != 2 or not scores.size or num_accepted.shape != scores.shape[:1]:
        raise ValueError(
            f"fit_temperatures: logits {list(scores.shape)} and accepted counts "
            f"{list(num_accepted.shape)}, wanted [S, J] and [S]"
        )
    before, fitted = np.ones(len(scores)), []
    for j in range(scores.shape[1]):
        was_accepted = num_accepted > j
        chances = before / (1 + np.exp(-scores[:, j] / np.exp(_LOG_SCALES)[:, None]))
        errors = [_calibration_error(chance, was_accepted) for chance in chances]
        # Of equal errors the mildest change: a sparse record says little.
        best = min(range(len(errors)), key=lambda i: (errors[i], abs(_LOG_SCALES[i])))
        fitted.append(np.exp(_LOG_SCALES[best]))
        before = chances[best]
    return np.asarray(fitted, np.float32)


def _calibration_error(chance: np.ndarray, happened: np.ndarray, bins: int = 10) -> float:
    """Mean distance of chance and frequency a bin, weighted by how many fall into it."""
    which = np.minimum((chance * bins).astype(int), bins - 1)
    surplus = np.bincount(which, chance - happened, bins)
    return float(np.abs(surplus).sum() / len(chance))
