"""The `dflash` command: arguments, their checks, exit codes. jax comes after parsing.

Text goes to stdout, progress and tables to stderr, and the last line of stdout is one JSON object.
Exit code 0: done; 1: it failed, `--check` found a difference or `doctor` a pair that cannot work;
2: the command was not right.

Example:
    dflash decode "What is the capital of France?" --max-new-tokens 64
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from dflash_jax import sampling_arguments
from dflash_jax.packaged import our_drafters
from dflash_jax.prompts import Request, UsageError, read_jsonl

IMPLS = ("auto", "xla", "pallas", "interpret")
DTYPES = ("float32", "bfloat16")
CHECK_PROMPT = "Once upon a time"


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but not `None`, `False` and `()`, which say nothing."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, ()):
            return action.help
        return super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message, or the help
        return int(stop.code or 0)
    try:
        return _run(args)
    except UsageError as error:
        return _say(error, 2)
    except KeyboardInterrupt:
        return _say("interrupted", 1)
    except BrokenPipeError:  # whoever read our output has gone; there is nobody to tell
        sys.stdout = None
        return 1


def _run(args: argparse.Namespace) -> int:
    if args.command == "cache":
        return _cache(args)
    if args.command in ("convert", "doctor"):
        from dflash_jax import pair_commands

        return pair_commands.run(args)
    if args.command == "decode":
        args.requests = _requests(args)
    if args.command == "check":
        _prepare_check(args)
    from dflash_jax import commands

    return commands.run(args)


def _cache(args: argparse.Namespace) -> int:
    from dflash_jax import executable_cache

    try:
        executable_cache.report(clears=args.clear)
    except BrokenPipeError:  # an OSError, and for `main`
        raise
    except OSError as error:
        return _say(f"cache: {error.filename}: {error.strerror}", 1)
    return 0


def _say(message: object, code: int) -> int:
    print(f"dflash: {message}", file=sys.stderr)
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dflash",
        description="Block-diffusion speculative decoding in JAX, lossless and on the device.",
        epilog='example: dflash decode "What is the capital of France?"',
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    decode = _command(
        commands, "decode", "decode a prompt or a file of prompts", "text streams as it is accepted"
    )
    _add_prompts(decode)
    _add_models(decode)
    _add_decoding(decode)
    sampling_arguments.add(decode)
    check = _command(
        commands,
        "check",
        "check that sampled answers follow the target's distribution",
        "a few hundred answers of three tokens, over a vocabulary cut down to a few",
    )
    _add_check(check)
    _add_models(check)
    plan = _command(
        commands, "plan", "print sizes and memory of a decode", "nothing is allocated or compiled"
    )
    _add_models(plan)
    _add_doctor(
        _command(
            commands, "doctor", "explain a target and a drafter", "nothing is allocated or compiled"
        )
    )
    _add_convert(
        _command(commands, "convert", "write a drafter in another form", "all of it, or nothing")
    )
    cache = _command(
        commands, "cache", "show what compiling left on disk", "downloaded models are not counted"
    )
    cache.add_argument("--clear", action="store_true", help="remove it; models stay")
    return parser


def _command(commands, name: str, summary: str, more: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}; {more}.",
        formatter_class=_Help,
    )


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts (one of the first three)")
    group.add_argument("prompt", nargs="?", help="text of one prompt")
    group.add_argument(
        "--prompt-ids",
        type=_ids,
        metavar="1,2,3",
        help="one prompt as token ids, taken as they are",
    )
    group.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='one object a line: "prompt" or "messages", and perhaps "id", "max_new_tokens" and '
        'sampling of its own ("temperature", "top_p", "stop" ...); results are JSON lines',
    )
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "--chat",
        dest="mode",
        action="store_const",
        const="chat",
        help="apply the chat template (the default if the tokenizer has one)",
    )
    mode.add_argument(
        "--raw", dest="mode", action="store_const", const="raw", help="take prompts as plain text"
    )
    group.add_argument("--system", metavar="TEXT", help="system prompt, put before each chat")


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", help=f"text to go on from; default: {CHECK_PROMPT!r}")
    parser.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="the prompt as token ids")
    parser.add_argument(
        "--sampling", action="store_true", required=True, help="what to check; there is no other"
    )
    # At 1 most models say too few sequences for 400 answers to tell anything.
    parser.add_argument("--temperature", type=float, default=3.0, metavar="T", help="from 1e-5")
    parser.add_argument("--samples", type=_at_least(1), default=400, metavar="N", help="answers")
    parser.add_argument(
        "--vocabulary",
        type=_at_least(2),
        default=4,
        metavar="K",
        help="tokens that are left, up to 32",
    )
    parser.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="of the first")
    parser.add_argument(
        "--draft-sampling", action=argparse.BooleanOptionalAction, help="as for decode"
    )


def _prepare_check(args: argparse.Namespace) -> None:
    """Give a check what loading a pair asks of a decode."""
    ids, text = args.prompt_ids, args.prompt
    if ids is not None and text is not None:
        raise UsageError("check: wanted one of a prompt and --prompt-ids, got both")
    text = CHECK_PROMPT if text is None else text
    args.requests = [Request(ids=ids) if ids is not None else Request(text=text)]
    args.mode, args.system, args.eos_ids, args.ignore_eos = "raw", None, None, True
    args.min_confidence = None


def _add_models(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models and sizes")
    group.add_argument(
        "--target",
        default="smollm2",
        metavar="NAME|DIR|FILE.gguf",
        help="smollm2 (fetched once), a checkpoint folder, or a GGUF file",
    )
    group.add_argument(
        "--drafter",
        metavar="KIND|DIR|none",
        help=f"{', '.join(our_drafters('smollm2'))} (ours, for smollm2), prompt_lookup, oracle, "
        "poison[:K] (K drafts accepted), a checkpoint folder, or none; default: dflash2 for "
        "smollm2, prompt_lookup for other targets",
    )
    group.add_argument(
        "--num-drafts", type=_at_least(1), metavar="N", help="drafts a cycle; default: a full block"
    )
    group.add_argument(
        "--batch", type=_at_least(1), default=1, metavar="B", help="most sequences decoded together"
    )
    group.add_argument(
        "--page-size", type=_page_size, default=64, metavar="N", help="tokens a KV page, 2^n"
    )
    group.add_argument(
        "--max-context",
        type=_at_least(2),
        metavar="S",
        help="tokens of the longest sequence; default: what the prompts need, rounded up",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of weights and KV; default: float32 on CPU, bfloat16 on GPU",
    )
    group.add_argument("--impl", choices=IMPLS, default="auto", help="which form of each kernel")


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", nargs="?", default="smollm2", metavar="TARGET", help="as --target of decode"
    )
    parser.add_argument(
        "drafter",
        nargs="?",
        metavar="DRAFTER",
        help="one of ours for smollm2, as --drafter of decode, or a checkpoint folder; default: "
        "dflash2 for smollm2",
    )
    group = parser.add_argument_group("what memory is reckoned for")
    group.add_argument("--batch", type=_at_least(1), default=1, metavar="B", help="sequences")
    group.add_argument(
        "--max-context", type=_at_least(2), metavar="S", help="tokens of each; default: up to 4096"
    )
    group.add_argument("--num-drafts", type=_at_least(1), metavar="N", help="drafts a cycle")
    group.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of weights and KV")
    group.add_argument(
        "--device-memory", type=_at_least(1), metavar="GIB", help="what the device has"
    )


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a drafter's folder, or the name of ours")
    parser.add_argument("destination", metavar="DST", help="a new folder")
    parser.add_argument(
        "--form", required=True, choices=("zlab", "deepspec", "speculators"), help="whose form"
    )
    parser.add_argument(
        "--target",
        metavar="NAME|DIR|FILE.gguf",
        help="the drafter's target: copies of its embedding and head are recognised in SRC, and "
        "written where the form keeps them",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: the source's")


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding and output")
    group.add_argument(
        "--max-new-tokens", type=_at_least(1), default=128, metavar="N", help="budget of a prompt"
    )
    group.add_argument(
        "--cycles",
        type=_at_least(1),
        default=8,
        metavar="K",
        help="cycles a dispatch to the device",
    )
    group.add_argument(
        "--min-confidence",
        type=float,
        metavar="P",
        help="verify DSpark's drafts before the first that it is less sure of; 0 to 1",
    )
    group.add_argument(
        "--markov-top-k",
        type=_at_least(0),
        default=0,
        metavar="K",
        help="let DSpark draft among K base logits, approximate in drafting; 0 for all",
    )
    group.add_argument(
        "--verify-widths",
        type=_rows,
        default=(),
        metavar="1,2,4",
        help="compile the target for so many rows a sequence too, and run each cycle in the "
        "narrowest that holds its drafts; outside the bitwise law, for drafters that cut drafts",
    )
    group.add_argument(
        "--eos-ids", type=_ids, metavar="1,2", help="stop at these, not at the model's"
    )
    group.add_argument("--ignore-eos", action="store_true", help="decode until the budget is used")
    group.add_argument(
        "--check",
        action="store_true",
        help="also decode plainly with the same executable; compare tokens and hashes of logits",
    )
    group.add_argument(
        "--json", action="store_true", help="print the last line alone, with all answers in it"
    )
    group.add_argument(
        "--stats",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print the table of statistics to stderr",
    )


def _requests(args: argparse.Namespace) -> list[Request]:
    """The prompts named on the command line, with what contradicts them refused."""
    sources = {
        "a prompt": args.prompt,
        "--prompt-ids": args.prompt_ids,
        "--prompts": args.prompts,
    }
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise UsageError(f"decode: wanted one of a prompt, --prompt-ids and --prompts, got {found}")
    if args.ignore_eos and args.eos_ids:
        raise UsageError("decode: --ignore-eos and --eos-ids contradict each other")
    if args.system is not None and args.mode == "raw":
        raise UsageError("decode: --system needs the chat template, but --raw is given")
    if args.prompt_ids is not None:
        if args.mode is not None or args.system is not None:
            raise UsageError(
                "decode: --prompt-ids are taken as they are, without --chat, --raw or --system"
            )
        return [Request(ids=args.prompt_ids)]
    if args.prompt is not None:
        if not args.prompt:
            raise UsageError("decode: the prompt is empty")
        return [Request(text=args.prompt)]
    try:
        return read_jsonl(args.prompts, allow_messages=args.mode != "raw")
    except OSError as error:
        raise UsageError(f"--prompts {args.prompts}: {error.strerror}") from error


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = _integer(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return parse


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None


def _page_size(text: str) -> int:
    value = _integer(text)
    if value < 4 or value & (value - 1):
        raise argparse.ArgumentTypeError(f"{value} is not a power of two from 4")
    return value


def _rows(text: str) -> tuple[int, ...]:
    rows = tuple(map(_integer, text.split(",")))
    if min(rows) < 1:
        raise argparse.ArgumentTypeError(f"{min(rows)} is below 1")
    return rows


def _ids(text: str) -> tuple[int, ...]:
    if not text.strip(" ,"):
        raise argparse.ArgumentTypeError("no token ids in it, wanted integers with commas")
    ids = tuple(map(_integer, text.split(",")))
    if min(ids) < 0:
        raise argparse.ArgumentTypeError(f"token id {min(ids)} is below 0")
    return ids
