"""One training run: corpus, fit, checkpoints, acceptance, export. `scripts/train_drafter.py` is it.

What can be wrong with a request is said before weights are read, and before anything compiles.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.export import drafter_tensors, write_drafter
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.params import TargetParams
from dflash_jax.prompts import UsageError
from dflash_jax.tokenizer import Tokenizer, eos_ids
from dflash_jax.train import data, loop
from dflash_jax.train.arrays import write_text
from dflash_jax.train.corpus import CorpusOptions, Written, peak_gib, write_corpus
from dflash_jax.train.dense import best_attention, causal_attention, target_forward
from dflash_jax.train.evaluate import measure
from dflash_jax.train.generate import ChatRules
from dflash_jax.train.initial import drafter_config, head_config, initial_tensors
from dflash_jax.train.kinds import Trainable, taps_of
from dflash_jax.train.seeds import STYLES
from dflash_jax.weights import load_drafter, load_target, read_configs, resolve_target

ANCHORS_AT_ONCE = 64  # positions measured together; a row's length is a multiple
_ROWS_AT_ONCE = 32
_QUICK_ROWS = 64  # held-out rows that are measured while training goes on
_SCALE_ROWS = 16

# What --resume cannot change: the text, and what the checkpoint's weights are for.
_CORPUS_SETTINGS = (
    "target", "dtype", "seed", "generate_tokens", "generate_minutes", "rows", "length", "eval_sets"
)  # fmt: skip
_RUN_SETTINGS = ("drafters", "taps", "mask_token", "mask_id", "block_rows", "held_out")


class Journal:
    """Records to `log.jsonl` and to stderr."""

    def __init__(self, path: Path) -> None:
        self._path, self._start = path, time.perf_counter()

    def __call__(self, record: Mapping[str, Any]) -> None:
        record = {"t": round(time.perf_counter() - self._start, 1), **record}
        line = json.dumps(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, file=sys.stderr, flush=True)


class Exported(NamedTuple):
    """What became of each drafter: bytes of its file, or why there is none."""

    sizes: dict[str, int]
    errors: dict[str, str]


@dataclass
class Run:
    """What a run works with once its arguments are checked."""

    args: argparse.Namespace
    target: TargetParams
    configs: dict[str, Trainable]
    attention: str
    log: Journal
    scale: jax.Array = field(default_factory=lambda: jnp.ones(1))

    @property
    def checkpoint(self) -> Path:
        return self.args.work / "checkpoint.npz"

    @property
    def settings(self) -> dict[str, str]:
        return _settings(self.args, (*_CORPUS_SETTINGS, *_RUN_SETTINGS))

    def tau(
        self, tensors: Mapping[str, Any], rows: data.Corpus, groups: Sequence[str]
    ) -> dict[str, dict[str, float]]:
        """Acceptance of unscaled weights on the first answer of each row."""
        return measure(
            self.target, tensors, {name: self.configs[name] for name in tensors},
            rows.tokens, rows.is_answer, groups, batch=min(_ROWS_AT_ONCE, len(rows.tokens)),
            num_anchors=min(ANCHORS_AT_ONCE, self.args.length), attention=self.attention,
        )  # fmt: skip

    def folded(self, state: loop.TrainState) -> dict[str, Any]:
        return {name: loop.fold_scale(one, self.scale) for name, one in state.tensors.items()}

    def keep(self, state: loop.TrainState, progress: loop.Progress) -> Exported:
        """Write the checkpoint and, as far as it is trained, every drafter."""
        loop.save_checkpoint(self.checkpoint, state, progress, self.settings)
        done = export(self.args.out, self.configs, self.folded(state))
        self.log({"event": "checkpoint", "step": progress.step, **done._asdict()})
        return done


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Do all that `args` ask for and return the results, which are in --out as well."""
    path = resolve_target(args.target)
    tokenizer = Tokenizer.load(path)
    hf, generation = read_configs(path)
    stops = stop_ids(tokenizer, eos_ids(hf, generation, tokenizer))
    configs = drafter_configs(args, TargetConfig.from_hf(hf), tokenizer, stops)
    rules = data.chat_rules(tokenizer, stops)
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    log = Journal(args.out / "log.jsonl")
    dtype = jnp.dtype(args.dtype)
    target = load_target(path, dtype=dtype, real_vocab=tokenizer.vocab_size)
    attention = args.attention
    if attention == "auto":
        attention = best_attention(target.config, dtype)
    log({
        "event": "start", "device": jax.devices()[0].device_kind, "jax": jax.__version__,
        "attention": attention, "arguments": {k: str(v) for k, v in vars(args).items()},
    })  # fmt: skip
    written = _corpus(args, target, tokenizer, rules, log)
    return _train(Run(args, target, configs, attention, log), written)


def stop_ids(tokenizer: Tokenizer, known: Sequence[int]) -> tuple[int, ...]:
    """Ids that end an answer: the model's own, and <|endoftext|>, where base models stop."""
    end = tokenizer.token_id("<|endoftext|>")
    return tuple(sorted({*known, *(() if end is None else (end,))}))


def drafter_configs(
    args: argparse.Namespace, target: TargetConfig, tokenizer: Tokenizer, stops: Sequence[int]
) -> dict[str, Trainable]:
    """The drafters asked for.

    Raises:
      UsageError: taps, mask or sizes that do not go with the target.
    """
    mask = args.mask_id
    if mask is None:
        mask = tokenizer.token_id(args.mask_token)
        if mask is None:
            raise UsageError(
                f"--mask-token {args.mask_token!r} is not in the vocabulary of {args.target}, "
                "wanted an entry that never occurs in text, or its --mask-id"
            )
    if mask in stops:
        raise UsageError(f"the mask token, id {mask}, ends an answer; wanted one that never occurs")
    if args.length > target.max_context:
        raise UsageError(
            f"--length {args.length}, and the target's context is {target.max_context}"
        )
    try:
        configs = {kind: _drafter_config(kind, args, target, mask) for kind in args.drafters}
        taps_of(list(configs.values()))
    except (ValueError, NotImplementedError) as error:
        raise UsageError(str(error)) from None
    return configs


def _drafter_config(
    kind: str, args: argparse.Namespace, target: TargetConfig, mask: int
) -> Trainable:
    if kind == "mtp":
        hf = head_config(target, num_drafts=args.block_rows - 1, ffn=args.mtp_ffn)
        return MtpConfig.from_hf(hf)
    hf = drafter_config(
        kind, target, taps=args.taps, mask_id=mask, block_rows=args.block_rows,
        num_layers=args.layers, ffn=args.ffn, selector_rank=args.selector_rank,
        markov_rank=args.markov_rank,
    )  # fmt: skip
    return DraftConfig.from_hf(hf)


def _settings(args: argparse.Namespace, names: Sequence[str]) -> dict[str, str]:
    shown = {name: str(getattr(args, name)) for name in names}
    return shown | {"target": Path(args.target).name}


def _corpus(
    args: argparse.Namespace,
    target: TargetParams,
    tokenizer: Tokenizer,
    rules: ChatRules,
    log: Journal,
) -> Written:
    """The corpus in --work, read back or written now."""
    files = [args.work / name for name in ("corpus.npz", "tests.npz", "corpus.json")]
    settings = _settings(args, _CORPUS_SETTINGS)
    if args.resume:
        about = json.loads(files[2].read_text(encoding="utf-8"))
        loop.refuse_changes(files[2], about["settings"], settings)
        corpus, tests = (data.Corpus.load(file) for file in files[:2])
        return Written(corpus, tests, about["test_sets"])
    options = CorpusOptions(
        seed=args.seed, rows=args.rows, length=args.length, tokens=args.generate_tokens,
        minutes=args.generate_minutes, eval_sets=tuple(args.eval_sets),
    )  # fmt: skip
    written = write_corpus(target, tokenizer, rules, options, log)
    written.corpus.save(files[0])
    written.tests.save(files[1])
    about = {"settings": settings, "test_sets": written.test_sets}
    write_text(files[2], json.dumps(about))  # last: where it is, the others are whole
    return written


def _train(run: Run, written: Written) -> dict[str, Any]:
    args, log = run.args, run.log
    held = written.corpus.rows(slice(args.held_out))
    corpus = written.corpus.rows(slice(args.held_out, None))
    options = loop.TrainOptions(
        batch=args.batch, anchors=args.anchors, learning_rate=args.learning_rate,
        attention=run.attention, seed=args.seed,
    )  # fmt: skip

    def untrained() -> loop.TrainState:
        key = jax.random.key(args.seed)
        tensors = {name: initial_tensors(c, run.target, key) for name, c in run.configs.items()}
        return loop.start_state(tensors, options)

    if args.resume and run.checkpoint.is_file():
        like = jax.eval_shape(untrained)
        state, progress = loop.load_checkpoint(run.checkpoint, like, run.settings)
    else:
        state, progress = untrained(), loop.Progress()
    run.scale = measured_scale(run.target, held.tokens[:_SCALE_ROWS], args.taps, run.attention)
    log({
        "event": "training", "rows": len(corpus.tokens), "held_out": len(held.tokens),
        "eval_rows": len(written.test_sets), "answer_tokens": int(corpus.is_answer.sum()),
        "parameters": sum(x.size for x in jax.tree.leaves(state.tensors)),
        "tap_scale": [round(float(x), 4) for x in run.scale], "from_step": progress.step,
    })  # fmt: skip
    budget = loop.Budget(progress, steps=args.steps, minutes=args.minutes)
    marks = {"measure": time.perf_counter(), "checkpoint": time.perf_counter()}
    few = held.rows(slice(_QUICK_ROWS))

    def at_log(state: loop.TrainState, progress: loop.Progress) -> None:
        now = time.perf_counter()
        if now - marks["measure"] > args.measure_seconds:
            taus = run.tau(run.folded(state), few, [STYLES[i] for i in few.styles])
            log({"event": "held_out", "step": progress.step, **taus})
            marks["measure"] = time.perf_counter()
        if now - marks["checkpoint"] > args.checkpoint_seconds:
            run.keep(state, progress)
            marks["checkpoint"] = time.perf_counter()

    state = loop.fit(
        run.target, corpus, run.scale, run.configs, state, progress, budget, options,
        log=log, every=args.log_every, at_log=at_log,
    )  # fmt: skip
    done = run.keep(state, progress)
    result = {
        "steps": progress.step, "seconds": round(progress.seconds, 1), "sizes": done.sizes,
        "errors": done.errors, "device": jax.devices()[0].device_kind, "peak_gib": peak_gib(),
    }  # fmt: skip
    for what, rows, groups in (
        ("held_out", held, [STYLES[i] for i in held.styles]),
        ("eval", written.tests, written.test_sets),
    ):
        if len(rows.tokens):
            result[f"{what}_trained"] = run.tau(run.folded(state), rows, groups)
            read = int8_rounded(args.out, tuple(done.sizes), run.target)
            result[f"{what}_int8"] = run.tau(read, rows, groups) if read else {}
    log({"event": "result", **result})
    write_text(args.out / "results.json", json.dumps(result, indent=2) + "\n")
    return result


def measured_scale(
    target: TargetParams, tokens: np.ndarray, taps: tuple[int, ...], attention: str
) -> jax.Array:
    """f32[M] one over the size of each tap's features; a sequence's first token is an outlier."""
    forward = jax.jit(lambda p, t: target_forward(p, t, taps, causal_attention(attention))[0])
    features = forward(target, jnp.asarray(tokens))[:, 1:].astype(jnp.float32)
    by_tap = features.reshape(*features.shape[:2], len(taps), -1)
    return 1.0 / jnp.sqrt(jnp.mean(by_tap**2, axis=(0, 1, 3)))


def export(
    out: Path, configs: Mapping[str, Trainable], tensors: Mapping[str, Mapping[str, jax.Array]]
) -> Exported:
    """Write every drafter as int8 under `out`; an error in one does not lose the others."""
    done = Exported({}, {})
    for name, config in configs.items():
        try:
            stored = {
                n: np.asarray(x if x.ndim == 2 else x.astype(jnp.bfloat16))
                for n, x in tensors[name].items()
            }
            write_drafter(out / name, config, stored, int8=True)
            done.sizes[name] = (out / name / "model.safetensors").stat().st_size
        except Exception:  # hours of training must not be lost to any fault of one of them
            done.errors[name] = traceback.format_exc(limit=3)
    return done


def int8_rounded(
    out: Path, names: Sequence[str], target: TargetParams
) -> dict[str, dict[str, jax.Array]]:
    """The weights as a reader of the exported files gets them, in f32 like the trained ones."""
    read = {name: drafter_tensors(load_drafter(out / name, target)) for name in names}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), read)
