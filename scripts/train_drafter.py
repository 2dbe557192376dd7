"""Train DFlash and DFlash2 drafters for a target, on text that the target writes.

    python scripts/train_drafter.py --target FILE.gguf --generate-tokens 25e6 --minutes 6 --out DIR

Writes under --out: `log.jsonl`, one folder a drafter (int8, z-lab names) and `results.json`; under
--work (default --out) the corpus and the checkpoint, from which --resume goes on. Progress goes to
stderr; the last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import DraftConfig
from dflash_jax.export import drafter_tensors, write_drafter
from dflash_jax.params import TargetParams
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train import data, loop
from dflash_jax.train.dense import best_attention, causal_attention, target_forward
from dflash_jax.train.evaluate import measure
from dflash_jax.train.generate import ANSWER, END, Openings, generate
from dflash_jax.train.initial import drafter_config, initial_tensors
from dflash_jax.train.seeds import STYLES
from dflash_jax.weights import load_drafter, load_target


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--target", required=True, help="a .gguf file, a checkpoint folder, or smollm2")
    add("--out", type=Path, required=True)
    add("--work", type=Path, help="corpus and checkpoint; default --out")
    add("--drafters", default="dflash,dflash2")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    add("--attention", default="auto", choices=("auto", "xla", "cudnn"), help="of the target")
    add("--seed", type=int, default=0)
    add("--resume", action="store_true", help="go on from the corpus and checkpoint in --work")
    corpus = parser.add_argument_group("corpus").add_argument
    corpus("--generate-tokens", type=float, default=25e6)
    corpus("--generate-minutes", type=float, default=4.0, help="stop generating after this long")
    corpus("--rows", type=int, default=4096, help="conversations generated together")
    corpus("--length", type=int, default=512, help="tokens of a conversation")
    corpus("--held-out", type=int, default=192, help="rows kept for measuring")
    corpus("--eval-sets", default=",".join(data.EVAL_SETS), help="'' for none")
    shape = parser.add_argument_group("drafter").add_argument
    shape("--taps", default="4,10,16,22,28", help="target layers read, by layer-output id")
    shape("--mask-token", default="<reponame>", help="a vocabulary entry that never occurs")
    shape("--block-rows", type=int, default=8)
    shape("--layers", type=int, default=3)
    shape("--ffn", type=int, default=704)
    shape("--selector-rank", type=int, default=16)
    train = parser.add_argument_group("training").add_argument
    train("--minutes", type=float, default=0.0)
    train("--steps", type=int, default=0)
    train("--batch", type=int, default=64)
    train("--anchors", type=int, default=64)
    train("--learning-rate", type=float, default=1.5e-3)
    train("--log-every", type=int, default=20)
    train("--measure-seconds", type=float, default=30.0)
    train("--checkpoint-seconds", type=float, default=90.0)
    return parser.parse_args()


class Journal:
    """Records to `log.jsonl` and, shortened, to stderr."""

    def __init__(self, path: Path) -> None:
        self._path, self._start = path, time.perf_counter()

    def __call__(self, record: Mapping[str, Any]) -> None:
        record = {"t": round(time.perf_counter() - self._start, 1), **record}
        line = json.dumps(record)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, file=sys.stderr, flush=True)


def peak_gib() -> float | None:
    stats = jax.local_devices()[0].memory_stats()
    return round(stats["peak_bytes_in_use"] / 2**30, 2) if stats else None


def write_corpus(
    target: TargetParams, tokenizer: Tokenizer, args: argparse.Namespace, log: Journal
) -> tuple[data.Corpus, data.Corpus, list[str]]:
    """(training rows, evaluation rows, the set of each evaluation row)."""
    sets = [name for name in args.eval_sets.split(",") if name]
    stops = (*tokenizer.eos_ids, tokenizer.token_id("<|endoftext|>") or 0)
    control = min(i for i in range(target.config.vocab) if not is_control(tokenizer, i))
    rules = data.chat_rules(tokenizer, stops, control)
    quotes = jnp.asarray(data.quotes_in_vocab(tokenizer, target.config.vocab))
    hashes = data.eval_hashes(tokenizer)
    rng = np.random.default_rng(args.seed)
    phases = (args.length // 2, args.length)
    kept, tests, names = [], None, []
    total, began = 0, time.perf_counter()
    pool = ThreadPoolExecutor(2)  # the host's part runs while the device writes

    def draw() -> tuple[Openings, np.ndarray]:
        return data.random_openings(tokenizer, rng, args.rows, args.length)

    coming = pool.submit(draw)
    for number in range(1_000_000):
        openings, styles = coming.result()
        coming = pool.submit(draw)
        if not number:
            names = data.put_eval_rows(openings, tokenizer, sets, args.length // 4)
        start = time.perf_counter()
        key = jax.random.fold_in(jax.random.key(args.seed), number)
        tokens, roles = map(np.asarray, generate(target, openings, quotes, key, rules, phases))
        seconds = time.perf_counter() - start
        first = 0 if number else len(names)
        if not number:
            tests = data.Corpus(tokens[:first], roles[:first] == ANSWER, styles[:first])
        kept.append(
            pool.submit(data.keep_rows, tokens[first:], roles[first:], styles[first:], hashes)
        )
        total += int((roles[first:] != END).sum())
        spent = time.perf_counter() - began
        log({
            "event": "generated", "batch": number, "seconds": round(seconds, 2),
            "tokens_a_second": int(tokens.size / seconds), "tokens": total,
            "answer_share": round(float((roles[first:] == ANSWER).mean()), 3),
            "peak_gib": peak_gib(),
        })  # fmt: skip
        if not number:
            log_samples(tokenizer, tokens[first:], roles[first:], styles[first:], log)
        if total >= args.generate_tokens or spent + seconds > 60 * args.generate_minutes:
            break
    pool.shutdown()
    parts, shared = zip(*(future.result() for future in kept), strict=True)
    log({"event": "corpus", "rows_shared_with_eval": sum(shared)})
    assert tests is not None
    return data.Corpus.join(parts), tests, names


def log_samples(
    tokenizer: Tokenizer, tokens: np.ndarray, roles: np.ndarray, styles: np.ndarray, log: Journal
) -> None:
    """Log how some conversations begin, so that a wrong template is seen at once."""
    for row in range(min(12, len(tokens))):
        end = min(int((roles[row] != END).sum()), 160)
        text = tokenizer.decode(tokens[row, :end], skip_special_tokens=False)
        log({"event": "sample", "style": STYLES[styles[row]], "text": text})


def is_control(tokenizer: Tokenizer, index: int) -> bool:
    added = tokenizer.backend.get_added_tokens_decoder()
    return index in added and added[index].special


def measured_scale(
    target: TargetParams, tokens: np.ndarray, taps: tuple[int, ...], attention: str
) -> jax.Array:
    """f32[M] one over the size of each tap's features; a sequence's first token is an outlier."""
    forward = jax.jit(lambda p, t: target_forward(p, t, taps, causal_attention(attention))[0])
    features = forward(target, jnp.asarray(tokens))[:, 1:].astype(jnp.float32)
    by_tap = features.reshape(*features.shape[:2], len(taps), -1)
    return 1.0 / jnp.sqrt(jnp.mean(by_tap**2, axis=(0, 1, 3)))


def export(
    out: Path, configs: Mapping[str, DraftConfig], state: loop.TrainState, scale: jax.Array
) -> dict[str, str]:
    """Write every drafter as int8; an error in one does not keep the others. {name: what}."""
    results = {}
    for name, config in configs.items():
        try:
            tensors = loop.fold_scale(state.tensors[name], scale)
            stored = {
                n: np.asarray(x if x.ndim == 2 else x.astype(jnp.bfloat16))
                for n, x in tensors.items()
            }
            write_drafter(out / name, config, stored, int8=True)
            results[name] = f"{(out / name / 'model.safetensors').stat().st_size} bytes"
        except Exception:
            results[name] = traceback.format_exc(limit=3)
    return results


def int8_rounded(
    out: Path, configs: Mapping[str, DraftConfig], target: TargetParams
) -> dict[str, dict[str, jax.Array]]:
    """The weights as a reader of the exported files gets them, in f32 like the trained ones."""
    read = {name: drafter_tensors(load_drafter(out / name, target)) for name in configs}
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), read)


def main() -> int:
    args = arguments()
    work = args.work or args.out
    for folder in (args.out, work):
        folder.mkdir(parents=True, exist_ok=True)
    log = Journal(args.out / "log.jsonl")
    dtype = jnp.dtype(args.dtype)
    tokenizer = Tokenizer.load(args.target)
    target = load_target(args.target, dtype=dtype)
    attention = args.attention
    if attention == "auto":
        attention = best_attention(target.config, dtype)
    log({
        "event": "start", "device": str(jax.devices()[0].device_kind), "jax": jax.__version__,
        "attention": attention, "arguments": {k: str(v) for k, v in vars(args).items()},
    })  # fmt: skip

    corpus_file, tests_file = work / "corpus.npz", work / "tests.npz"
    if args.resume and tests_file.is_file():
        corpus, tests = data.Corpus.load(corpus_file), data.Corpus.load(tests_file)
        names = json.loads((work / "tests.json").read_text(encoding="utf-8"))
    else:
        corpus, tests, names = write_corpus(target, tokenizer, args, log)
        corpus.save(corpus_file)
        (work / "tests.json").write_text(json.dumps(names), encoding="utf-8")
        tests.save(tests_file)
    held, corpus = corpus.rows(slice(args.held_out)), corpus.rows(slice(args.held_out, None))

    mask = tokenizer.token_id(args.mask_token)
    if mask is None:
        raise ValueError(f"--mask-token {args.mask_token!r} is not in the target's vocabulary")
    taps = tuple(int(i) for i in args.taps.split(","))
    configs = {
        kind: DraftConfig.from_hf(
            drafter_config(
                kind, target.config, taps=taps, mask_id=mask, block_rows=args.block_rows,
                num_layers=args.layers, ffn=args.ffn, selector_rank=args.selector_rank,
            )
        )
        for kind in args.drafters.split(",")
    }  # fmt: skip
    options = loop.TrainOptions(
        batch=args.batch, anchors=args.anchors, learning_rate=args.learning_rate,
        attention=attention, seed=args.seed,
    )  # fmt: skip
    scale = measured_scale(target, held.tokens[:16], taps, attention)
    state = loop.start_state(
        {
            name: initial_tensors(config, target, jax.random.key(args.seed))
            for name, config in configs.items()
        },
        options,
    )
    progress = loop.Progress()
    checkpoint = work / "checkpoint.npz"
    if args.resume and checkpoint.is_file():
        state, progress = loop.load_checkpoint(checkpoint, state)
    budget = loop.Budget(progress, steps=args.steps, minutes=args.minutes)
    count = sum(x.size for x in jax.tree.leaves(state.tensors))
    log({
        "event": "training", "rows": len(corpus.tokens), "held_out": len(held.tokens),
        "eval_rows": len(names), "answer_tokens": int(corpus.is_answer.sum()),
        "parameters": count, "tap_scale": [round(float(x), 4) for x in scale],
        "from_step": progress.step,
    })  # fmt: skip

    def tau(tensors: Mapping[str, Any], rows: data.Corpus, groups: list[str]) -> dict[str, Any]:
        return measure(
            target, tensors, configs, rows.tokens, rows.is_answer, groups,
            batch=min(32, len(rows.tokens)), num_anchors=min(64, args.length),
            attention=attention,
        )  # fmt: skip

    def folded(state: loop.TrainState) -> dict[str, Any]:
        return {name: loop.fold_scale(one, scale) for name, one in state.tensors.items()}

    marks = {"measure": time.perf_counter(), "checkpoint": time.perf_counter()}
    few = held.rows(slice(64))

    def at_log(state: loop.TrainState, progress: loop.Progress) -> None:
        now = time.perf_counter()
        if now - marks["measure"] > args.measure_seconds:
            groups = [STYLES[i] for i in few.styles]
            log({"event": "held_out", "step": progress.step, **tau(folded(state), few, groups)})
            marks["measure"] = time.perf_counter()
        if now - marks["checkpoint"] > args.checkpoint_seconds:
            loop.save_checkpoint(checkpoint, state, progress)
            sizes = export(args.out, configs, state, scale)
            log({"event": "checkpoint", "step": progress.step, "files": sizes})
            marks["checkpoint"] = time.perf_counter()

    state = loop.fit(
        target, corpus, scale, configs, state, progress, budget, options,
        log=log, every=args.log_every, at_log=at_log,
    )  # fmt: skip
    files = export(args.out, configs, state, scale)
    log({"event": "exported", "step": progress.step, "files": files, "peak_gib": peak_gib()})
    loop.save_checkpoint(checkpoint, state, progress)

    result: dict[str, Any] = {
        "steps": progress.step,
        "seconds": round(progress.seconds, 1),
        "files": files,
        "device": jax.devices()[0].device_kind,
    }
    for what, rows, groups in (
        ("held_out", held, [STYLES[i] for i in held.styles]), ("eval", tests, names)
    ):  # fmt: skip
        if not len(rows.tokens):
            continue
        for kind, get in (
            ("trained", lambda: folded(state)),
            ("int8", lambda: int8_rounded(args.out, configs, target)),
        ):
            try:
                result[f"{what}_{kind}"] = tau(get(), rows, groups)
            except Exception:
                result[f"{what}_{kind}"] = traceback.format_exc(limit=3)
            log({"event": "result", **result})
    (args.out / "results.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
