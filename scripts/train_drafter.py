"""Train drafters of any kind for a target, on text that the target writes itself.

    python scripts/train_drafter.py --target smollm2 --minutes 7 --out run

Needs the extra `train` (optax). --out gets `log.jsonl`, a folder a drafter (int8, z-lab names) and
`results.json`; --work gets the corpus and the checkpoint, from which the same command with --resume
goes on. Progress goes to stderr; the last line of stdout is one JSON object.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.prompts import UsageError
from dflash_jax.train.arguments import Parser, answer, at_least, ids_of, names_of
from dflash_jax.train.eval_sets import EVAL_SETS

KINDS = ("dflash", "dflash2", "dspark", "mtp")


def build_parser() -> Parser:
    parser = Parser("train_drafter.py", __doc__)
    add = parser.add_argument
    add("--target", required=True, help="smollm2, a checkpoint folder, or a GGUF file")
    add("--out", type=Path, required=True, help="folder for the log and the drafters")
    add("--work", type=Path, help="folder for corpus and checkpoint; default: --out")
    add("--drafters", type=names_of(KINDS), default="dflash,dflash2", help="trained together")
    add("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the target")
    add("--attention", default="auto", choices=("auto", "xla", "cudnn"), help="of the target")
    add("--seed", type=at_least(0), default=0, help="of text, weights and batches")
    add("--resume", action="store_true", help="go on from the corpus and checkpoint in --work")
    corpus = parser.add_argument_group("corpus").add_argument
    corpus("--generate-tokens", type=at_least(1, float), default=25e6, help="stop after these")
    corpus("--generate-minutes", type=at_least(0, float), default=4.0, help="or after these")
    corpus("--rows", type=at_least(1), default=4096, help="conversations written together")
    corpus("--length", type=at_least(32), default=512, help="tokens of a conversation")
    corpus("--held-out", type=at_least(1), default=192, help="rows kept for measuring")
    corpus(
        "--eval-sets", type=names_of(EVAL_SETS, may_be_empty=True), default=",".join(EVAL_SETS),
        help="measured at the end, never trained on; '' for none",
    )  # fmt: skip
    shape = parser.add_argument_group("drafter").add_argument
    shape("--taps", type=ids_of, default="4,10,16,22,28", help="target layers read, from 0")
    shape("--mask-token", default="<reponame>", help="a vocabulary entry that never occurs")
    shape("--mask-id", type=at_least(0), help="its id, if it has no spelling")
    shape(
        "--block-rows",
        type=at_least(2),
        default=8,
        help="rows of a verification; drafts and one more",
    )
    shape("--layers", type=at_least(1), default=3, help="of the drafter")
    shape("--ffn", type=at_least(1), default=704, help="width of its feed-forward layers")
    shape("--selector-rank", type=at_least(1), default=16, help="of DFlash2's codebooks")
    # 24: with it DSpark's file and an MTP head of 960 columns are 14 MB together.
    shape("--markov-rank", type=at_least(0), default=24, help="of DSpark's Markov head; 0 for none")
    shape("--mtp-ffn", type=at_least(1), default=960, help="width of an MTP head's feed-forward")
    train = parser.add_argument_group("training (either --minutes or --steps)").add_argument
    train("--minutes", type=at_least(0, float), default=0.0, help="of training alone")
    train("--steps", type=at_least(0), default=0, help="in all, those before --resume too")
    train("--batch", type=at_least(1), default=64, help="conversations a step")
    train("--anchors", type=at_least(1), default=64, help="blocks a conversation a step")
    train("--learning-rate", type=at_least(0, float), default=1.5e-3, help="at its highest")
    train("--log-every", type=at_least(1), default=20, help="steps")
    train("--measure-seconds", type=at_least(0, float), default=30.0, help="between two, at least")
    train(
        "--checkpoint-seconds", type=at_least(0, float), default=90.0,
        help="between two, at least",
    )  # fmt: skip
    return parser


def check(args: argparse.Namespace) -> None:
    """Settle what depends on two arguments; what contradicts itself is refused."""
    args.work = args.work or args.out
    if bool(args.minutes) == bool(args.steps):
        came = "neither" if not args.steps else "both"
        raise UsageError(f"--minutes and --steps: {came} came, wanted one of them above 0")
    if args.length % 64 and args.length != 32:
        raise UsageError(f"--length {args.length}, wanted 32 or a multiple of 64")
    if args.anchors > args.length:
        raise UsageError(f"--anchors {args.anchors}, wanted at most --length {args.length}")
    if args.resume:
        missing = [
            name
            for name in ("corpus.npz", "tests.npz", "corpus.json")
            if not (args.work / name).is_file()
        ]
        if missing:
            raise UsageError(
                f"--resume: no {missing[0]} in {args.work}, wanted a folder where a run has "
                "written its corpus; leave --resume away to write one"
            )


def work(args: argparse.Namespace) -> int:
    try:
        from dflash_jax.train.run import run
    except ModuleNotFoundError as error:
        raise RuntimeError(f"{error}; training needs the extra: pip install '.[train]'") from None
    result = run(args)
    print(json.dumps(result))
    for name, why in result["errors"].items():
        print(f"train_drafter.py: {name} was not written: {why.splitlines()[-1]}", file=sys.stderr)
    return 1 if result["errors"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    return answer(build_parser(), argv, check, work)


if __name__ == "__main__":
    sys.exit(main())
