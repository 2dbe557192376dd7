"""Measure acceptance of drafters on GSM8K, HumanEval and MT-bench, through the real loop.

    python scripts/eval_acceptance.py --target smollm2 --temperatures 0,1 --out acceptance.jsonl

A drafter is `none`, `prompt_lookup`, one of ours for smollm2 (`dflash2`; by default all that there
are), a checkpoint folder of any kind, or NAME=FOLDER. Each (drafter, set, temperature) is appended
to --out as it is done; progress goes to stderr, and stdout ends with one JSON line of all.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dflash_jax.packaged import our_drafters, packaged_drafters
from dflash_jax.prompts import UsageError
from dflash_jax.train.arguments import Parser, answer, at_least, names_of
from dflash_jax.train.eval_sets import EVAL_SETS, eval_prompts

RULES = ("none", "prompt_lookup")
OURS = {kind: f"smollm2-{kind}" for kind in our_drafters("smollm2")}


class Choice(NamedTuple):
    """One entry of --drafters: the name to print, and a rule or where the weights are."""

    name: str
    where: str

    @staticmethod
    def of(text: str) -> "Choice":
        name, _, where = text.strip().rpartition("=")
        packaged = OURS.get(where, where)
        is_known = where in RULES or packaged in packaged_drafters()
        if not is_known and not (where and Path(where).is_dir()):
            raise UsageError(
                f"--drafters: {where!r} is no folder, wanted one, or one of "
                f"{', '.join((*RULES, *OURS))}"
            )
        return Choice(name or where, packaged)


def build_parser() -> Parser:
    parser = Parser("eval_acceptance.py", __doc__)
    add = parser.add_argument
    add("--target", default="smollm2", help="smollm2, a checkpoint folder, or a GGUF file")
    add("--drafters", default=",".join((*RULES, *OURS)), help="divided by commas")
    add("--sets", type=names_of(EVAL_SETS), default=",".join(EVAL_SETS), help="divided by commas")
    add("--temperatures", type=temperatures_of, default="0", help="0 is greedy; divided by commas")
    add("--seed", type=at_least(0), default=0, help="of every prompt, above temperature 0")
    add(
        "--draft-sampling", action=argparse.BooleanOptionalAction,
        help="draw the drafts too above temperature 0, or take the drafters' best tokens; default: "
        "what suits each",
    )  # fmt: skip
    add("--limit", type=at_least(0), default=0, help="prompts of each set; 0 for all")
    add("--max-new-tokens", type=at_least(1), default=128, help="of each answer")
    add("--batch", type=at_least(1), default=32, help="sequences decoded together")
    add("--page-size", type=at_least(1), default=64, help="tokens a KV page, 2^n")
    add(
        "--max-context", type=at_least(2), default=1024,
        help="one for all, so that shapes stay the same; longer prompts are left out",
    )  # fmt: skip
    add(
        "--dtype", choices=("bfloat16", "float32"),
        help="of the weights; default: bfloat16 on a GPU, float32 elsewhere",
    )  # fmt: skip
    add("--check-text", action="store_true", help="compare all drafters' tokens with the first's")
    add("--out", type=Path, help="JSONL, a line a drafter and set")
    return parser


def temperatures_of(text: str) -> list[float]:
    """Numbers from 0 on divided by commas, each there once, for argparse's `type`."""
    found = [at_least(0, float)(part) for part in text.split(",")]
    if len(set(found)) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r}, wanted each temperature once")
    return found


def check(args: argparse.Namespace) -> None:
    """Refuse what can be seen to be wrong without a model."""
    args.drafters = [Choice.of(text) for text in args.drafters.split(",")]
    names = [choice.name for choice in args.drafters]
    if len(set(names)) != len(names):
        raise UsageError(f"--drafters: {', '.join(names)}, wanted each name once")
    if args.page_size & (args.page_size - 1):
        raise UsageError(f"--page-size {args.page_size}, wanted a power of two")
    if args.max_new_tokens >= args.max_context:
        raise UsageError(
            f"--max-new-tokens {args.max_new_tokens}, wanted less than --max-context "
            f"{args.max_context}"
        )
    if args.check_text and not (0 in args.temperatures and len(names) > 1):
        raise UsageError(
            "--check-text compares what drafters say at temperature 0, wanted two in --drafters "
            "and 0 in --temperatures"
        )
    ruled = [choice.name for choice in args.drafters if choice.where in RULES]
    if args.draft_sampling is not None and (ruled or not any(args.temperatures)):
        raise UsageError(
            "--draft-sampling: wanted drafters with weights and a temperature above 0, but came "
            + (", ".join(ruled) or "0 alone")
        )
    if args.out is not None and not args.out.parent.is_dir():
        raise UsageError(f"--out {args.out}: no folder {args.out.parent}")


def evaluate(args: argparse.Namespace) -> int:
    """Decode every set with every drafter."""
    import jax

    from dflash_jax.config import TargetConfig
    from dflash_jax.models import default_dtype
    from dflash_jax.tokenizer import Tokenizer, eos_ids
    from dflash_jax.weights import (
        check_pair,
        load_target,
        read_configs,
        read_draft_config,
        resolve_target,
    )

    path = resolve_target(args.target)
    tokenizer = Tokenizer.load(path)
    hf, generation = read_configs(path)
    config = TargetConfig.from_hf(hf)
    for choice in args.drafters:
        if choice.where not in RULES:
            draft = read_draft_config(choice.where, num_target_layers=config.num_layers)
            check_pair(config, draft, who=choice.name)
    prompts = {name: encoded(tokenizer, name, args) for name in args.sets}
    target = load_target(path, dtype=args.dtype or default_dtype(), real_vocab=tokenizer.vocab_size)
    options = {
        "tokenizer": tokenizer, "eos_ids": eos_ids(hf, generation, tokenizer),
        "max_new_tokens": args.max_new_tokens, "batch": args.batch, "page_size": args.page_size,
        "max_context": args.max_context,
    }  # fmt: skip
    records = measure(args, target, prompts, options)
    print_table(records)
    report = {
        "tau": {f"{r['drafter']}/{column(r)}": r["tau"] for r in records},
        "records": records,
        "max_new_tokens": args.max_new_tokens,
        "batch": args.batch,
        "draft_sampling": args.draft_sampling,  # None: what suits each
        "seed": args.seed if any(args.temperatures) else None,
        "dtype": str(target.embed.dtype),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    print(json.dumps(report))
    return 0


def encoded(tokenizer: Any, name: str, args: argparse.Namespace) -> list[list[int]]:
    """One set's prompts as chats, those that fit."""
    from dflash_jax.train.data import chat_ids

    rows = eval_prompts(name)[: args.limit or None]
    ids = [chat_ids(tokenizer, row["prompt"]) for row in rows]
    fitting = [one for one in ids if len(one) + args.max_new_tokens <= args.max_context]
    if not fitting:
        raise UsageError(
            f"--max-context {args.max_context}: no prompt of {name} leaves room for "
            f"{args.max_new_tokens} tokens; the shortest has {min(map(len, ids))}"
        )
    return fitting


def measure(
    args: argparse.Namespace, target: Any, prompts: dict[str, list[list[int]]], options: Any
) -> list[dict[str, Any]]:
    """One record a drafter, set and temperature."""
    from dflash_jax.drafters import no_drafter, prompt_lookup_drafter
    from dflash_jax.engine import Generation, generate, summary
    from dflash_jax.params import Params
    from dflash_jax.sampling import SamplingOptions
    from dflash_jax.weight_layout import laid_out
    from dflash_jax.weights import load_drafter

    rules = {"none": no_drafter, "prompt_lookup": prompt_lookup_drafter}
    first: dict[str, list[Generation]] = {}
    records: list[dict[str, Any]] = []
    runs = [(name, float(heat)) for name in prompts for heat in args.temperatures]
    target = laid_out(target, "auto")
    for name, where in args.drafters:
        draft = rules[where]() if where in rules else load_drafter(where, target)
        draft = laid_out(draft, "auto")
        for set_name, heat in runs:
            ids, start = prompts[set_name], time.perf_counter()
            asked = SamplingOptions(temperature=heat, seed=args.seed) if heat else None
            drawn = args.draft_sampling if heat else None
            pair = Params(target=target, draft=draft)
            made = generate(pair, ids, sampling=asked, draft_sampling=drawn, **options)
            stats = summary(made)
            record = {
                "drafter": name,
                "set": set_name,
                "temperature": heat,
                "prompts": len(ids),
                "tau": round(stats.tau, 4),
                "cycles": stats.num_cycles,
                "tokens": sum(stats.num_tokens),
                "tokens_per_second": round(stats.tokens_per_second, 1),
                "seconds": round(time.perf_counter() - start, 1),
            }
            if args.check_text and not heat:  # drawn drafts give other draws of one distribution
                plain = first.setdefault(set_name, made)
                same = sum(a.ids == b.ids for a, b in zip(made, plain, strict=True))
                record["equal_answers"] = round(same / len(made), 4)
            records.append(record)
            print(json.dumps(record), file=sys.stderr, flush=True)
            if args.out is not None:
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    return records


def column(record: dict[str, Any]) -> str:
    """A set, and the temperature where it is not 0."""
    heat = record["temperature"]
    return f"{record['set']} T={heat:g}" if heat else record["set"]


def print_table(records: list[dict[str, Any]]) -> None:
    """τ a drafter and set, for people."""
    from rich.console import Console
    from rich.table import Table

    sets = list(dict.fromkeys(map(column, records)))
    table = Table("drafter", *sets, title="tokens a cycle, bonus token included (τ)")
    for drafter in dict.fromkeys(r["drafter"] for r in records):
        cells = {column(r): f"{r['tau']:.2f}" for r in records if r["drafter"] == drafter}
        table.add_row(drafter, *(cells.get(name, "") for name in sets))
    Console(width=100).print(table)


def main(argv: Sequence[str] | None = None) -> int:
    return answer(build_parser(), argv, check, evaluate)


if __name__ == "__main__":
    sys.exit(main())
