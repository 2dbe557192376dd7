"""Fit several drafters at once to one target: they share its forward, which is half of the work.

Master weights and AdamW moments are f32, products run in the target's dtype. The learning rate
follows the fraction of the run that is done, so a run that is given minutes ends its schedule in
time. A checkpoint holds everything that a step reads besides the corpus; batches and anchors are
functions of (seed, step), so a run that is resumed equals one that was not interrupted.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from dflash_jax.params import TargetParams
from dflash_jax.train.arrays import read_arrays, write_arrays
from dflash_jax.train.data import Corpus, batch_rows
from dflash_jax.train.dense import Tensors, causal_attention, target_forward
from dflash_jax.train.kinds import Seen, Trainable, losses_of, taps_of
from dflash_jax.train.losses import pick_anchors, row_targets

Named = dict[str, dict[str, jax.Array]]  # drafter name -> tensors


@dataclass(frozen=True)
class TrainOptions:
    """What a step does; hashable, a static argument."""

    batch: int = 64
    anchors: int = 64
    learning_rate: float = 2e-3
    warmup: float = 0.03
    decay: float = 4.0
    clip: float = 1.0
    weight_decay: float = 0.01
    chunk: int = 8192  # block rows whose logits are in memory at once
    attention: str = "xla"
    seed: int = 0


@struct.dataclass
class TrainState:
    """Carry of training: f32 weights and optimizer state of each drafter."""

    tensors: Named
    moments: dict[str, Any]


def optimizer(options: TrainOptions) -> optax.GradientTransformation:
    """AdamW without its learning rate; only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(options.clip),
        optax.scale_by_adam(b1=0.9, b2=0.95, eps=1e-8),
        optax.add_decayed_weights(
            options.weight_decay,
            mask=lambda tree: jax.tree.map(lambda x: x.ndim == 2, tree),
        ),
    )


def start_state(tensors: Mapping[str, Tensors], options: TrainOptions) -> TrainState:
    # Copies: the state is donated, and a weight may be shared (the final norm is the target's).
    named = {name: jax.tree.map(jnp.array, dict(one)) for name, one in tensors.items()}
    return TrainState(named, {name: optimizer(options).init(one) for name, one in named.items()})


def learning_rate(options: TrainOptions, fraction: float) -> float:
    """Linear warm-up, then a cosine to a fiftieth, over the fraction of the run that is done."""
    if fraction < options.warmup:
        return options.learning_rate * (fraction + 1e-3) / (options.warmup + 1e-3)
    turn = math.pi * min((fraction - options.warmup) / (1 - options.warmup), 1.0)
    return options.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(turn)))


def scaled(features: jax.Array, tap_scale: jax.Array) -> jax.Array:
    """features [.., M*E] times one factor a tap, f32[M].

    Training sees taps of equal size, since Adam's steps are as large for weights that must be tiny;
    `fold_scale` moves the factors into the exported `fc`.
    """
    width = features.shape[-1] // tap_scale.shape[0]
    return features * jnp.repeat(tap_scale, width).astype(features.dtype)


def fold_scale(tensors: Mapping[str, jax.Array], tap_scale: jax.Array) -> dict[str, jax.Array]:
    """Weights for features as the target gives them; an MTP head reads none."""
    if "fc.weight" not in tensors:
        return dict(tensors)
    return {**tensors, "fc.weight": scaled(tensors["fc.weight"], tap_scale)}


@partial(jax.jit, static_argnames=("configs", "options"), donate_argnames=("state",))
def train_step(
    target: TargetParams,
    tokens: jax.Array,
    is_answer: jax.Array,
    tap_scale: jax.Array,
    index: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    state: TrainState,
    *,
    configs: tuple[tuple[str, Trainable], ...],
    options: TrainOptions,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update of every drafter on rows `index` of the corpus.

    Args:
      tokens: i32[N, T]; is_answer: bool[N, T]; index: i32[B].
      tap_scale: f32[M], see `scaled`.
      rate: f32[] learning rate.

    Returns:
      The new state and figures named `drafter/figure`.
    """
    key = jax.random.fold_in(jax.random.key(options.seed), step)
    tokens, is_answer = tokens[index], is_answer[index]
    taps = taps_of([config for _, config in configs])
    attend = causal_attention(options.attention)
    features, hidden = jax.lax.stop_gradient(target_forward(target, tokens, taps, attend))
    seen = Seen(tokens, scaled(features, tap_scale) if taps else None, hidden)
    anchors = pick_anchors(key, is_answer, options.anchors)
    update = optimizer(options).update
    figures: dict[str, jax.Array] = {}
    tensors, moments = {}, {}
    for name, config in configs:
        rows = row_targets(tokens, is_answer, anchors, config.max_drafts, options.decay)

        def loss_of(master: Tensors, config=config, rows=rows):
            cast = {n: x.astype(target.embed.dtype) for n, x in master.items()}
            return losses_of(cast, config, target, seen, anchors, rows, options.chunk)

        (_, found), grads = jax.value_and_grad(loss_of, has_aux=True)(state.tensors[name])
        found["grad_norm"] = optax.tree.norm(grads)
        move, moments[name] = update(grads, state.moments[name], state.tensors[name])
        tensors[name] = jax.tree.map(lambda x, m: x - rate * m, state.tensors[name], move)
        figures |= {f"{name}/{k}": v for k, v in found.items()}
    return TrainState(tensors, moments), figures


@dataclass
class Progress:
    """Where a run is: steps done, steps planned, seconds spent in training."""

    step: int = 0
    total: int = 0
    seconds: float = 0.0


def save_checkpoint(
    path: Path, state: TrainState, progress: Progress, settings: Mapping[str, str]
) -> None:
    """Write state, progress and what the run was asked for to one file, whole or not at all."""
    leaves = {f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(state))}
    about = json.dumps({"progress": vars(progress), "settings": dict(settings)})
    write_arrays(path, {"about": np.asarray(about), **leaves})


def load_checkpoint(
    path: Path, like: TrainState, settings: Mapping[str, str]
) -> tuple[TrainState, Progress]:
    """Read what `save_checkpoint` wrote into the structure of `like`.

    Raises:
      ValueError: a damaged file, or the checkpoint of another run.
    """
    leaves, structure = jax.tree.flatten(like)
    data = read_arrays(path, ("about",))
    about = json.loads(str(data.pop("about")))
    refuse_changes(path, about["settings"], settings)
    found = [data.get(f"leaf{i}") for i in range(len(leaves))]
    shapes = [(x.shape, x.dtype) for x in leaves]
    if len(data) != len(leaves) or [x is not None and (x.shape, x.dtype) for x in found] != shapes:
        raise ValueError(f"{path}: a checkpoint of drafters of other shapes, wanted another --work")
    state = jax.tree.unflatten(structure, [jnp.asarray(x) for x in found])
    return state, Progress(**about["progress"])


def refuse_changes(path: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise ValueError unless a run goes on as it began."""
    for name, value in now.items():
        if before.get(name) != value:
            raise ValueError(
                f"{path}: made with --{name.replace('_', '-')} {before.get(name)}, and --resume "
                f"came with {value}; wanted the same, or another --work"
            )


class Budget:
    """How long a run goes: a number of steps, or minutes from which steps are planned.

    The plan is made from the pace of recent steps and made again at every log, so that a run that
    gets slower or faster still ends its schedule at the end of its time.
    """

    def __init__(self, progress: Progress, *, steps: int = 0, minutes: float = 0.0) -> None:
        if bool(steps) == bool(minutes):
            raise ValueError("training budget: wanted either steps or minutes")
        self._progress, self._steps, self._limit = progress, steps, 60.0 * minutes
        if steps:
            progress.total = steps

    @property
    def is_spent(self) -> bool:
        if self._steps:
            return self._progress.step >= self._steps
        return self._progress.seconds >= self._limit

    def fraction(self, ahead: int = 0) -> float:
        """Part of the run that is done, 0..1, at a step that is `ahead` of the last plan."""
        progress = self._progress
        if self._steps:
            return (progress.step + ahead) / self._steps
        done = min(progress.seconds / self._limit, 1.0)
        left = max(progress.total - progress.step, 1)
        return min(done + ahead * (1 - done) / left, 1.0)

    def window(self, every: int) -> int:
        """Steps until the next log."""
        return min(every, self._steps - self._progress.step) if self._steps else every

    def plan(self, seconds_a_step: float) -> None:
        """Say how many steps there will be in all."""
        if not self._steps:
            left = max(self._limit - self._progress.seconds, 0.0)
            self._progress.total = self._progress.step + int(left / seconds_a_step)


def fit(
    target: TargetParams,
    corpus: Corpus,
    tap_scale: jax.Array,
    configs: Mapping[str, Trainable],
    state: TrainState,
    progress: Progress,
    budget: Budget,
    options: TrainOptions,
    *,
    log: Callable[[dict[str, Any]], None],
    every: int = 20,
    at_log: Callable[[TrainState, Progress], None] = lambda state, progress: None,
) -> TrainState:
    """Train until the budget is spent.

    Args:
      log: takes a record of figures every `every` steps.
      at_log: called after each record, for evaluation and checkpoints; its time is not training's.

    Raises:
      FloatingPointError: a loss is not finite any more; the last checkpoint is from before.
    """
    tokens, is_answer = jnp.asarray(corpus.tokens), jnp.asarray(corpus.is_answer)
    named = tuple(configs.items())
    last, pace = time.perf_counter(), 0.0
    is_first = True
    while not budget.is_spent:
        window = 1 if is_first else budget.window(every)
        rates = [learning_rate(options, budget.fraction(i)) for i in range(window)]
        figures: dict[str, jax.Array] = {}
        for rate in rates:
            rows = batch_rows(len(corpus.tokens), options.batch, progress.step, options.seed)
            state, figures = train_step(
                target,
                tokens,
                is_answer,
                tap_scale,
                jnp.asarray(rows),
                jnp.int32(progress.step),
                jnp.float32(rate),
                state,
                configs=named,
                options=options,
            )
            progress.step += 1
        numbers = _numbers(figures)  # waits for the device
        _refuse_infinite(numbers, progress.step)
        now = time.perf_counter()
        if is_first:  # compilation is not training time
            is_first, last = False, now
            log({"event": "compiled", "step": progress.step, **numbers})
            continue
        progress.seconds += now - last
        pace = (now - last) / window
        budget.plan(pace)
        log({
            "event": "train", "step": progress.step, "of": progress.total,
            "seconds": round(progress.seconds, 2), "ms_a_step": round(1e3 * pace, 2),
            "rate": round(rates[-1], 7), **numbers,
        })  # fmt: skip
        at_log(state, progress)
        last = time.perf_counter()
    return state


def _numbers(figures: Mapping[str, jax.Array]) -> dict[str, float]:
    return {name: round(float(x), 5) for name, x in figures.items()}


def _refuse_infinite(figures: Mapping[str, float], step: int) -> None:
    for name, value in figures.items():
        if not math.isfinite(value):
            raise FloatingPointError(
                f"training: {name} is {value} at step {step}, wanted a finite number; go on from "
                "the last checkpoint with a lower --learning-rate, or look at the corpus"
            )
