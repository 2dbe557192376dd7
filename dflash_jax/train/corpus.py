"""Write the training text in batches; the host filters one while the device makes the next."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.params import TargetParams
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train import data
from dflash_jax.train.generate import ANSWER, END, ChatRules, Openings, generate
from dflash_jax.train.seeds import STYLES

Log = Callable[[Mapping[str, Any]], None]

_SAMPLES, _SAMPLE_TOKENS = 12, 160


@dataclass(frozen=True, slots=True)
class CorpusOptions:
    """How much to write and how."""

    seed: int
    rows: int  # conversations written together
    length: int  # tokens of a conversation
    tokens: float  # stop after this many
    minutes: float  # or after this long
    eval_sets: tuple[str, ...]  # sets whose prompts are answered in the first batch


class Written(NamedTuple):
    """Text to train on, evaluation prompts with their answers, and the set of each of those."""

    corpus: data.Corpus
    tests: data.Corpus
    test_sets: list[str]


def write_corpus(
    target: TargetParams, tokenizer: Tokenizer, rules: ChatRules, options: CorpusOptions, log: Log
) -> Written:
    """Let the target write conversations until there are enough, and keep the fit ones."""
    quotes = jnp.asarray(data.quotes_in_vocab(tokenizer, target.config.vocab))
    hashes = data.eval_hashes(tokenizer)
    rng = np.random.default_rng(options.seed)
    phases = (options.length // 2, options.length)
    kept: list[Future[tuple[data.Corpus, int]]] = []
    tests, names = data.Corpus.empty(options.length), []
    total, began = 0, time.perf_counter()

    def draw() -> tuple[Openings, np.ndarray]:
        return data.random_openings(tokenizer, rng, options.rows, options.length)

    with ThreadPoolExecutor(2) as pool:  # the host's part runs while the device writes
        coming = pool.submit(draw)
        for number in itertools.count():
            openings, styles = coming.result()
            coming = pool.submit(draw)
            if not number:
                room = options.length // 4
                names = data.put_eval_rows(openings, tokenizer, options.eval_sets, room)
            start = time.perf_counter()
            key = jax.random.fold_in(jax.random.key(options.seed), number)
            tokens, roles = map(np.asarray, generate(target, openings, quotes, key, rules, phases))
            seconds = time.perf_counter() - start
            if not number:
                test = slice(len(names))
                tests = data.Corpus(tokens[test], roles[test] == ANSWER, styles[test])
                tokens, roles, styles = (x[len(names) :] for x in (tokens, roles, styles))
                _log_samples(tokenizer, tokens, roles, styles, log)
            kept.append(pool.submit(data.keep_rows, tokens, roles, styles, hashes))
            total += int((roles != END).sum())
            log({
                "event": "generated", "batch": number, "seconds": round(seconds, 2),
                "tokens_a_second": int(openings.prompts.size / seconds), "tokens": total,
                "answer_share": round(float((roles == ANSWER).sum()) / max(roles.size, 1), 3),
                "peak_gib": peak_gib(),
            })  # fmt: skip
            spent = time.perf_counter() - began
            if total >= options.tokens or spent + seconds > 60 * options.minutes:
                break
        parts, shared = zip(*(future.result() for future in kept), strict=True)
    log({"event": "corpus", "rows_shared_with_eval": sum(shared)})
    return Written(data.Corpus.join(parts), tests, names)


def _log_samples(
    tokenizer: Tokenizer, tokens: np.ndarray, roles: np.ndarray, styles: np.ndarray, log: Log
) -> None:
    """Log how some conversations begin, so that a wrong template is seen at once."""
    for row in range(min(_SAMPLES, len(tokens))):
        end = min(int((roles[row] != END).sum()), _SAMPLE_TOKENS)
        text = tokenizer.decode(tokens[row, :end], skip_special_tokens=False)
        log({"event": "sample", "style": STYLES[styles[row]], "text": text})


def peak_gib() -> float | None:
    """Most device memory in use so far, where the backend counts it."""
    stats = jax.local_devices()[0].memory_stats()
    return round(stats["peak_bytes_in_use"] / 2**30, 2) if stats else None
