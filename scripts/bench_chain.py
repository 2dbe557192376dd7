"""Time DSpark's chain over a block's rows at the shapes of a large model, against its memory limit.

    python scripts/bench_chain.py --out chain.json

A row reads the Markov head's [vocabulary, rank] matrix once: 77.8 MB at Qwen3-8B's vocabulary and
rank 256, more than the L2 of an H200 holds, and 7 rows of it at 4.3 TB/s are the limit. Chains run
one after another inside one dispatch, each from the last token of the one before, so that launches
from the host are not timed; a turn of that loop costs 6 to 10 us. The last line of stdout is one
JSON object.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dflash_jax.train.arguments import Parser, answer, at_least, finish

BYTES_A_US = 4.3e6  # that an H200's memory gives, as in the budget of a cycle


def build_parser() -> Parser:
    parser = Parser("bench_chain.py", __doc__)
    add = parser.add_argument
    add("--vocab", type=at_least(1), default=151936, help="columns of the logits")
    add("--width", type=at_least(1), default=4096, help="of the rows")
    add("--rank", type=at_least(1), default=256, help="of the Markov head")
    add("--drafts", type=at_least(1), default=7, help="rows of a block")
    add("--batch", type=at_least(1), default=1, help="sequences")
    add("--kind", choices=("vanilla", "gated", "rnn"), default="vanilla", help="of the head")
    add("--top-k", type=at_least(0), default=0, help="draft among so many base logits; 0: all")
    add("--impl", choices=("auto", "xla", "pallas"), default="auto", help="of the kernels")
    add("--chains", type=at_least(1), default=50, help="in one dispatch")
    add("--repeats", type=at_least(1), default=10, help="dispatches timed")
    add("--out", type=Path, help="also write the JSON object there")
    return parser


def check(args: argparse.Namespace) -> None:
    """Every combination of the arguments is one that can be timed."""


def measure(args: argparse.Namespace) -> int:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dflash_jax.drafters import dspark
    from dflash_jax.params import DraftParams, MarkovParams

    rng = np.random.default_rng(0)

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * 0.1, dtype)

    mixes = {"gated": (1, 1), "rnn": (3, 2)}
    markov = MarkovParams(normal(args.vocab, args.rank), normal(args.vocab, args.rank))
    if args.kind in mixes:
        parts, latents = mixes[args.kind]
        mix = normal(parts * args.rank, args.width + latents * args.rank)
        markov = markov.replace(mix=mix, mix_bias=normal(parts * args.rank))
    config: Any = SimpleNamespace(
        markov_kind=args.kind, markov_rank=args.rank, vocab=args.vocab, kind="dspark"
    )
    none: Any = None

    @jax.jit
    def chains(markov, rows, base, anchor):
        draft = DraftParams(none, none, none, none, (), none, none, config, markov=markov)

        def one(_, anchor):
            chain = dspark.decide(
                draft, rows, base, anchor, vocab=args.vocab, top_k=args.top_k, impl=args.impl
            )
            return chain.tokens[:, -1]

        return jax.lax.fori_loop(0, args.chains, one, anchor)

    rows = normal(args.batch, args.drafts, args.width)
    base = normal(args.batch, args.drafts, args.vocab, dtype=jnp.float32)
    given = markov, rows, base, jnp.zeros((args.batch,), jnp.int32)
    jax.block_until_ready(chains(*given))
    times = []
    for _ in range(args.repeats):
        start = time.perf_counter()
        jax.block_until_ready(chains(*given))
        times.append(1e6 * (time.perf_counter() - start) / args.chains)
    limit = args.drafts * 2 * args.vocab * args.rank / BYTES_A_US
    report = {
        "chain_us": float(np.median(times)),
        "fastest_us": min(times),
        "slowest_us": max(times),
        "limit_us": limit,
        "over_limit": float(np.median(times)) / limit,
        **{name: x for name, x in vars(args).items() if name != "out"},
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    return finish(report, args.out)


def main(argv: Sequence[str] | None = None) -> int:
    return answer(build_parser(), argv, check, measure)


if __name__ == "__main__":
    sys.exit(main())
