"""Acceptance length of drafters on GSM8K, HumanEval and MT-bench, through the real loop.

    python scripts/eval_acceptance.py --target smollm2 --drafters prompt_lookup,dflash,dflash2

A drafter is `none`, `prompt_lookup`, a name that comes with the package, a folder, or NAME=FOLDER.
Each (drafter, set) is appended to --out as it is done. stdout ends with one JSON line of all.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dflash_jax.drafters import no_drafter, prompt_lookup_drafter
from dflash_jax.engine import Generation, generate, summary
from dflash_jax.params import Params, TargetParams
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.train.data import EVAL_SETS, chat_ids, eval_prompts
from dflash_jax.weights import load_drafter, load_target, resolve_target

PACKAGED = {"dflash": "smollm2-dflash", "dflash2": "smollm2-dflash2"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--target", default="smollm2")
    add("--drafters", default="none,prompt_lookup,dflash,dflash2")
    add("--sets", default=",".join(EVAL_SETS))
    add("--limit", type=int, default=0, help="prompts of each set; 0 for all")
    add("--max-new-tokens", type=int, default=128)
    add("--batch", type=int, default=32)
    add("--page-size", type=int, default=64)
    add("--max-context", type=int, default=1024, help="one for all, so that shapes stay the same")
    add("--dtype", choices=("bfloat16", "float32"))
    add("--check-text", action="store_true", help="compare all drafters' tokens with the first's")
    add("--out", type=Path, help="JSONL, a line a drafter and set")
    return parser.parse_args()


def load_pair(target: TargetParams, spec: str) -> tuple[str, Params]:
    """(name to print, the pair) of one entry of --drafters."""
    name, _, where = spec.rpartition("=")
    name = name or where
    if where == "none":
        return name, Params(target=target, draft=no_drafter())
    if where == "prompt_lookup":
        return name, Params(target=target, draft=prompt_lookup_drafter())
    return name, Params(target=target, draft=load_drafter(PACKAGED.get(where, where), target))


def same_share(made: list[Generation], plain: list[Generation]) -> float:
    """Share of answers that are equal token by token."""
    return sum(a.ids == b.ids for a, b in zip(made, plain, strict=True)) / max(len(made), 1)


def main() -> int:
    args = arguments()
    path = resolve_target(args.target)
    tokenizer = Tokenizer.load(path)
    target = load_target(path, dtype=jnp.dtype(args.dtype) if args.dtype else None)
    prompts = {}
    for name in args.sets.split(","):
        rows = eval_prompts(name)[: args.limit or None]
        ids = [chat_ids(tokenizer, row["prompt"]) for row in rows]
        prompts[name] = [p for p in ids if len(p) + args.max_new_tokens <= args.max_context]
    first: dict[str, list[Generation]] = {}
    records: list[dict[str, Any]] = []
    for spec in args.drafters.split(","):
        drafter, pair = load_pair(target, spec)
        for name, ids in prompts.items():
            start = time.perf_counter()
            made = generate(
                pair, ids, tokenizer=tokenizer, max_new_tokens=args.max_new_tokens,
                batch=args.batch, page_size=args.page_size, max_context=args.max_context,
            )  # fmt: skip
            stats = summary(made)
            record = {
                "drafter": drafter,
                "set": name,
                "prompts": len(ids),
                "tau": round(stats.tau, 4),
                "cycles": stats.num_cycles,
                "tokens": sum(stats.num_tokens),
                "tokens_per_second": round(stats.tokens_per_second, 1),
                "seconds": round(time.perf_counter() - start, 1),
            }
            if args.check_text:
                plain = first.setdefault(name, made)
                record["equal_answers"] = round(same_share(made, plain), 4)
            records.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
            if args.out:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    print_table(records)
    print(
        json.dumps(
            {
                "tau": {f"{r['drafter']}/{r['set']}": r["tau"] for r in records},
                "records": records,
                "max_new_tokens": args.max_new_tokens,
                "batch": args.batch,
                "dtype": str(target.embed.dtype),
                "device": jax.devices()[0].device_kind,
                "jax": jax.__version__,
            }
        )
    )
    return 0


def print_table(records: list[dict[str, Any]]) -> None:
    """τ a drafter and set, for people."""
    from rich.console import Console
    from rich.table import Table

    sets = list(dict.fromkeys(r["set"] for r in records))
    table = Table("drafter", *sets, title="tokens a cycle, bonus token included (τ)")
    for drafter in dict.fromkeys(r["drafter"] for r in records):
        cells = {r["set"]: f"{r['tau']:.2f}" for r in records if r["drafter"] == drafter}
        table.add_row(drafter, *(cells.get(name, "") for name in sets))
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
