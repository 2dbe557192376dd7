"""Requests read from a JSON Lines file: one object a line, checked before anything is loaded.

A line holds "prompt" (text) or "messages" (a chat), and may hold "max_new_tokens", "id" and options
of sampling, which go before the command line's. Null is as good as nothing. What its numbers may be
is checked where they mean something, in `sampling`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "logprobs",
    "stop",
)
_KEYS = ("prompt", "messages", "max_new_tokens", "id", *SAMPLING)
# What a step is compiled for, or how prompts are read: flags of the command line, for all lines.
_OF_ALL = (
    "batch",
    "cycles",
    "draft_sampling",
    "eos_ids",
    "ignore_eos",
    "markov_top_k",
    "min_confidence",
    "num_drafts",
    "system",
    "verify_widths",
)
_MOST_DIGITS = 20  # of a token id


class UsageError(ValueError):
    """What was asked for cannot be done as it was asked; the command line answers with code 2."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: exactly one of text, messages and ids is set."""

    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    ids: tuple[int, ...] | None = None
    max_new_tokens: int | None = None  # None: the caller's default
    id: str | int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)  # what its line says, as it says it
    where: str = field(default="", compare=False)  # the line it comes from


def read_jsonl(path: str | Path, *, allow_messages: bool = True) -> list[Request]:
    """Read every line of a file of prompts; blank lines are skipped.

    Raises:
      UsageError: naming file and line, for anything that is not one of the forms above.
      OSError: the file cannot be read.
    """
    requests = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                requests.append(_request(_object(line, where), where, allow_messages))
    if not requests:
        raise UsageError(f"{path}: no prompts in it, wanted one JSON object a line")
    return requests


def _object(line: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:  # `json` would quietly take the last one
            raise UsageError(f"{where}: {twice!r} is given twice")
        return dict(pairs)

    try:
        found = json.loads(line.decode("utf-8"), object_pairs_hook=unique)
    except UsageError:
        raise
    except UnicodeDecodeError as error:
        raise UsageError(f"{where}: not UTF-8 text ({error.reason})") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    except (ValueError, RecursionError) as error:  # an endless number, endless brackets
        raise UsageError(f"{where}: not JSON ({str(error).split(';')[0]})") from error
    if not isinstance(found, dict):
        raise UsageError(f"{where}: a JSON {type(found).__name__}, wanted an object")
    return found


def _request(found: dict[str, Any], where: str, allow_messages: bool) -> Request:
    unknown = [key for key in found if key not in _KEYS]
    if unknown and unknown[0] in _OF_ALL:
        raise UsageError(
            f"{where}: {unknown[0]} is {repr(found[unknown[0]])[:80]}, but it is one for all "
            f"prompts: wanted --{unknown[0].replace('_', '-')}; a line may have {', '.join(_KEYS)}"
        )
    if unknown:
        raise UsageError(
            f"{where}: unknown option {unknown[0]!r}, wanted one of {', '.join(_KEYS)}"
        )
    if ("prompt" in found) == ("messages" in found):
        raise UsageError(f'{where}: wanted exactly one of "prompt" and "messages"')
    if "messages" in found and not allow_messages:
        raise UsageError(f'{where}: "messages" needs a chat template, but decoding is raw')
    budget = found.get("max_new_tokens")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise UsageError(f"{where}: max_new_tokens is {budget!r}, wanted an integer from 1")
    name = found.get("id")
    if name is not None and type(name) not in (str, int):
        raise UsageError(f"{where}: id is {name!r}, wanted a string or an integer")
    text = found.get("prompt")
    if "prompt" in found and (not isinstance(text, str) or not text):
        raise UsageError(f"{where}: prompt is {text!r}, wanted text that is not empty")
    _require_characters(text or "", where)
    messages = _messages(found["messages"], where) if "messages" in found else None
    return Request(text, messages, None, budget, name, _sampling(found, where), where)


def _sampling(found: dict[str, Any], where: str) -> dict[str, Any]:
    """A line's options of sampling, with token ids that JSON spells as texts."""
    given = {name: found[name] for name in SAMPLING if found.get(name) is not None}
    stops = given.get("stop", [])
    for text in [stops] if isinstance(stops, str) else stops if isinstance(stops, list) else []:
        if isinstance(text, str):
            _require_characters(text, where)
    if "logit_bias" in given:
        given["logit_bias"] = _biases(given["logit_bias"], where)
    return given


def _biases(found: Any, where: str) -> dict[int, Any]:
    if not isinstance(found, dict):
        came = repr(found)[:80]
        raise UsageError(f'{where}: logit_bias is {came}, wanted {{"token id": number}}')
    for key in found:
        is_number = key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS
        if not is_number or str(int(key)) != key:  # 7 and 07 would be one id
            raise UsageError(f"{where}: logit_bias has {key[:80]!r}, wanted a token id")
    return {int(key): value for key, value in found.items()}


def _messages(found: Any, where: str) -> tuple[dict[str, str], ...]:
    is_chat = isinstance(found, list) and all(
        isinstance(turn, dict)
        and set(turn) == {"role", "content"}
        and all(isinstance(value, str) for value in turn.values())
        for turn in found
    )
    if not is_chat or not found:
        raise UsageError(
            f'{where}: messages must be a list of {{"role": text, "content": text}}, at least one'
        )
    for turn in found:
        _require_characters(turn["content"], where)
    return tuple(found)


def _require_characters(text: str, where: str) -> None:
    """JSON can spell half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(text[error.start]):04X}"
        raise UsageError(f"{where}: text holds {half}, half of a surrogate pair") from error
