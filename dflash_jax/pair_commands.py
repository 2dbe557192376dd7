"""`dflash doctor` and `dflash convert`: a pair explained, a drafter rewritten.

Nothing is compiled. The last line of stdout is one JSON object.
"""

import argparse
import json
import sys
from typing import Any

from dflash_jax import convert, doctor, models
from dflash_jax.prompts import UsageError
from dflash_jax.weights import DEFAULT_TARGET


def run(args: argparse.Namespace) -> int:
    """Run the command that `cli` parsed and return its exit code."""
    try:
        return {"doctor": _doctor, "convert": _convert}[args.command](args)
    except (UsageError, BrokenPipeError):  # the second: an OSError that `cli` ends
        raise
    except (OSError, RuntimeError, ValueError, NotImplementedError) as error:
        print(f"dflash: {str(error).strip() or type(error).__name__}", file=sys.stderr)
        return 1


def _doctor(args: argparse.Namespace) -> int:
    """Print findings; code 1 where one is red."""
    from dflash_jax.reports import findings as report

    if args.drafter is None and args.target != DEFAULT_TARGET:
        raise UsageError(f"doctor: the target is {args.target}; name the drafter too")
    choice = models.choose_drafter(args.drafter, args.target, args.num_drafts)
    if not choice.has_weights:
        raise UsageError(f"doctor: --drafter {choice.name} has no weights to look at")
    gibibytes = args.device_memory
    sizes = doctor.Sizes(
        batch=args.batch,
        max_context=args.max_context,
        num_drafts=args.num_drafts,
        dtype=args.dtype,
        device_bytes=None if gibibytes is None else gibibytes << 30,
    )
    found = doctor.examine(args.target, choice.path, sizes)
    worst = doctor.verdict(found)
    report.show(found, title=f"{args.target} with {choice.name}: {worst}")
    facts: dict[str, Any] = {"target": args.target, "drafter": choice.name, "verdict": worst}
    print(json.dumps({**facts, "findings": [one._asdict() for one in found]}))
    return 1 if worst == doctor.RED else 0


def _convert(args: argparse.Namespace) -> int:
    """Write the drafter and say what it is now."""
    params = convert.convert_drafter(
        args.source, args.destination, form=args.form, target=args.target, dtype=args.dtype
    )
    kind, dtype = params.config.kind, params.fc.dtype.name
    print(f"{args.destination}: {kind} in {args.form} form, {dtype}")
    facts = {"destination": args.destination, "form": args.form, "kind": kind, "dtype": dtype}
    print(json.dumps(facts))
    return 0
