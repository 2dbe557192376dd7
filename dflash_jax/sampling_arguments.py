"""Sampling on the command line; numbers are checked in `sampling`, where they mean something."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dflash_jax.prompts import SAMPLING, UsageError

if TYPE_CHECKING:
    from dflash_jax.sampling import SamplingOptions

_FILTERS = {
    "top_k": (int, "K", "keep the K most likely tokens"),
    "top_p": (float, "P", "keep the most likely tokens until their probabilities reach P"),
    "min_p": (float, "P", "keep tokens at least P times as likely as the most likely one"),
    "repetition_penalty": (float, "X", "for tokens in prompt or answer; 1 is none"),
    "presence_penalty": (float, "X", "for tokens in the answer; 0 is none"),
    "frequency_penalty": (float, "X", "for each time that a token is in the answer; 0 is none"),
}
_OF_DRAWS = ("top_k", "top_p", "min_p", "seed")  # have no meaning where the best token is taken


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options; what is not given stays None, or False."""
    group = parser.add_argument_group("sampling (all of it changes what the target would say)")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="draw tokens; default 0: take the best one"
    )
    for name, (kind, metavar, words) in _FILTERS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=words)
    group.add_argument(
        "--logit-bias",
        type=_bias,
        action="append",
        metavar="ID:X",
        help="add X to the logit of token ID; may be repeated",
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="equal seeds give equal answers; default: a new one"
    )
    group.add_argument(
        "--logprobs", action="store_true", help="record each token's log-probability"
    )
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer where this text would come; may be repeated",
    )
    group.add_argument(
        "--draft-sampling",
        action=argparse.BooleanOptionalAction,
        help="draw the drafts too, or draft the drafter's best tokens; default: what suits it",
    )


def options(args: argparse.Namespace) -> list[SamplingOptions]:
    """What is asked of each of `args.requests`; ValueError or TypeError names what cannot be.

    What a line of a file says goes before the command line. A line that asks for the best tokens
    takes no filter and no seed from there.
    """
    from dflash_jax.sampling import SamplingOptions  # jax comes after parsing

    given = _given(args)
    asked, unused = [], dict(given)
    for request in args.requests:
        own = request.sampling
        is_best = bool(request.where) and _takes_the_best({**given, **own})
        left_out = _OF_DRAWS if is_best else ()
        shared = {name: x for name, x in given.items() if name not in own and name not in left_out}
        for name in shared:
            unused.pop(name, None)
        try:
            asked.append(SamplingOptions(**{"temperature": 0.0, **shared, **own}))
        except (TypeError, ValueError) as error:
            if not request.where:
                raise
            raise UsageError(f"{request.where}: {error}") from error
    if unused:
        raise UsageError(
            f"--{next(iter(unused)).replace('_', '-')} is given, but no line of {args.prompts} "
            "takes it: each has its own, or draws nothing"
        )
    return asked


def _given(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line itself says."""
    biases = args.logit_bias or []
    twice = [index for index, _ in biases if [i for i, _ in biases].count(index) > 1]
    if twice:
        raise ValueError(f"--logit-bias is given twice for token {twice[0]}")
    values = {name: getattr(args, name) for name in SAMPLING}
    values |= {"logit_bias": dict(biases) or None, "logprobs": args.logprobs or None}
    return {name: value for name, value in values.items() if value is not None}


def _takes_the_best(asked: Mapping[str, Any]) -> bool:
    """Whether a line's temperature draws nothing."""
    from dflash_jax.sampling import GREEDY_BELOW

    heat = asked.get("temperature", 0.0)
    return isinstance(heat, int | float) and heat < GREEDY_BELOW


def _bias(text: str) -> tuple[int, float]:
    index, colon, value = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return int(index), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:X, an id and a number") from None
