"""Time the prefill of a prompt at published shapes with random weights, against the matrix units.

    python scripts/bench_prefill.py --shapes qwen3.8-27b --out prefill.json
    python scripts/bench_prefill.py --shapes qwen3-8b --tokens 4096 --chunks 512,2048

A prompt runs in chunks through `dflash_jax.loop.prefill`, as it does behind the command line: the
target's layers, the head for the last row, the drafter's context. Work is counted in the matrix
products of the layers and in attention, two operations a multiply-add; the peak is what a large
bf16 product reached on an H200. Of a hybrid target the delta rule is also timed alone, one layer
over the whole prompt. The last line of stdout is one JSON object.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run from a checkout without installing

from dflash_jax.prompts import UsageError
from dflash_jax.train.arguments import Parser, answer, at_least, finish, ids_of
from scripts.random_pair import DRAFTERS, SHAPES

PEAK = 790e12  # operations a second of an 8192 x 8192 x 8192 bf16 product


def build_parser() -> Parser:
    parser = Parser("bench_prefill.py", __doc__)
    add = parser.add_argument
    add("--shapes", choices=SHAPES, default="qwen3-8b", help="of the target")
    add("--drafter", choices=DRAFTERS, default="dflash2", help="whose context is made beside it")
    add("--tokens", type=at_least(16), default=4096, help="of the prompt")
    add("--chunks", type=ids_of, default="512,1024,4096", help="tokens a call, divided by commas")
    add("--page-size", type=at_least(1), default=64, help="tokens a KV page, 2^n")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights")
    add("--impl", choices=("auto", "xla", "pallas"), default="auto", help="of the kernels")
    add("--repeats", type=at_least(1), default=10, help="prompts timed")
    add("--out", type=Path, help="also write the JSON object there")
    return parser


def check(args: argparse.Namespace) -> None:
    """Chunks are buckets of powers of two that the prompt is a multiple of."""
    for chunk in args.chunks:
        if chunk & (chunk - 1) or args.tokens % chunk:
            raise UsageError(
                f"--chunks {chunk}, wanted powers of two that divide --tokens {args.tokens}"
            )


def measure(args: argparse.Namespace) -> int:
    import jax

    from scripts.random_pair import pair_configs, random_params

    target, draft = pair_configs(args.shapes, args.drafter)
    params = random_params(target, draft, dtype=args.dtype, impl=args.impl)
    work = operations(params, args.tokens)
    rows = []
    for chunk in args.chunks:
        times = prompt_times(params, chunk, args)
        rows.append({"chunk": chunk, **figures(times, work), "tokens": args.tokens})
        rows[-1]["tokens_per_s"] = args.tokens / rows[-1]["seconds"]
        say("{chunk} tokens a call: {seconds:.4f} s, {share_of_peak:.1%} of peak", rows[-1])
    report = {
        "shapes": args.shapes,
        "drafter": args.drafter,
        "operations": work,
        "prefill": rows,
        "delta_rule": delta_rule(target, args) if target.gdn is not None else None,
        "impl": args.impl,
        "dtype": args.dtype,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    return finish(report, args.out)


def say(text: str, values: dict[str, Any]) -> None:
    print("bench_prefill: " + text.format(**values), file=sys.stderr, flush=True)


def figures(times: list[float], work: float) -> dict[str, float]:
    """Seconds, and the rate of so many operations against the peak."""
    seconds = statistics.median(times)
    return {
        "seconds": seconds,
        "fastest": min(times),
        "slowest": max(times),
        "tflops": work / seconds / 1e12,
        "share_of_peak": work / seconds / PEAK,
    }


def operations(params: Any, tokens: int) -> float:
    """Of a prompt: products of the layers and of the drafter's context, attention, the rule."""
    import jax

    config, draft = params.target.config, params.draft
    matrices = [x.size for x in jax.tree.leaves(params.target.layers) if x.ndim == 2]
    context = [getattr(draft, name, None) for name in ("fc", "fused_kv", "kv")]
    matrices += [x.size for x in jax.tree.leaves(context)]
    pairs = tokens * (tokens + 1) / 2  # of a row and a key that it sees
    attending = sum(layer.qkv is not None for layer in params.target.layers)
    seen = attending * 4 * config.num_heads * config.head_dim * pairs
    rule = (config.num_layers - attending) * rule_operations(config.gdn, tokens)
    return 2.0 * tokens * sum(matrices) + seen + rule


def rule_operations(gdn: Any, tokens: int) -> float:
    """Of one layer's rule in XLA's chunks: products whole, where half would do, and the solve.

    A row of a chunk of C = 64: k k^T and q k^T, the solve of Dv + Dk columns, two products with
    the state, one with the chunk's errors, one into the state. Tiles of 16 rows need fewer.
    """
    if gdn is None:
        return 0.0
    from pallas_kernels.delta_rule_tiles import CHUNK

    k, v = gdn.key_dim, gdn.value_dim
    a_row = 2 * (2 * CHUNK * k + CHUNK * (k + v) / 2 + 2 * k * v + CHUNK * v + k * v)
    return float(tokens * gdn.num_value_heads * a_row)


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """Seconds of each call, after one that compiles and one that warms up."""
    import jax

    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return times[2:]


def prompt_times(params: Any, chunk: int, args: argparse.Namespace) -> list[float]:
    """Seconds of a whole prompt, its chunks launched one after another."""
    import jax.numpy as jnp
    import numpy as np

    from dflash_jax import loop
    from dflash_jax.fixed import plan
    from dflash_jax.options import DecodeOptions
    from dflash_jax.scratch import init_scratch
    from dflash_jax.state import init_buffers, init_state

    fixed = plan(
        params.target.config,
        params.draft.config,
        batch=1,
        max_context=args.tokens + 64,
        page_size=args.page_size,
        prefill_chunk=chunk,
        dtype=args.dtype,
    )
    buffers: Any = init_buffers(fixed)
    table = jnp.arange(fixed.num_pages, dtype=jnp.int32).reshape(1, -1)
    buffers = buffers.replace(meta=buffers.meta.replace(block_table=table))
    if buffers.verify_wy_tables is not None:
        buffers = buffers.replace(verify_wy_tables=jnp.zeros(1, jnp.int32))
    carried = [buffers, init_scratch(params.draft.config, fixed=fixed)]
    ids = np.random.default_rng(0).integers(0, params.target.config.vocab, args.tokens)
    ids = ids.astype(np.int32)
    options = DecodeOptions(impl=args.impl)

    def prompt() -> Any:
        state, first = _at_the_start(init_state(fixed), fixed), None
        for start in range(0, args.tokens, chunk):
            end = start + chunk
            following = np.int32(ids[end] if end < args.tokens else -1)
            first, state, *carried[:] = loop.prefill(
                params, ids[start:end], np.int32(chunk), np.int32(0), following, state, *carried,
                fixed=fixed, options=options,
            )  # fmt: skip
        return first

    return timed(prompt, args.repeats)


def _at_the_start(state: Any, fixed: Any) -> Any:
    """A state whose sequence waits for its prompt."""
    import jax.numpy as jnp

    every = jnp.full_like(state.seq_lens, 1)
    return state.replace(remaining=every * (1 << 20), max_lens=every * fixed.capacity)


def delta_rule(target: Any, args: argparse.Namespace) -> dict[str, float]:
    """The rule of one layer over the whole prompt."""
    import jax
    import jax.numpy as jnp

    import pallas_kernels as pk

    gdn, tokens = target.gdn, args.tokens
    heads, keys = gdn.num_value_heads, jax.random.split(jax.random.key(0), 3)
    qkv = jax.random.normal(keys[0], (1, tokens, gdn.conv_width), args.dtype)
    g, beta = (jax.nn.sigmoid(jax.random.normal(x, (1, tokens, heads))) for x in keys[1:])
    state = jnp.zeros((1, heads, gdn.key_dim, gdn.value_dim))
    rule = jax.jit(partial(pk.delta_rule_tiles, num_key_heads=gdn.num_key_heads, impl=args.impl))
    given = qkv, -g, beta, jnp.full((1,), tokens, jnp.int32), state
    found = figures(timed(lambda: rule(*given), args.repeats), rule_operations(gdn, tokens))
    say("the delta rule of a layer: {seconds:.5f} s, {share_of_peak:.1%} of peak", found)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    return answer(build_parser(), argv, check, measure)


if __name__ == "__main__":
    sys.exit(main())
