"""Requests read from a JSON Lines file: one object a line, checked before anything is loaded.

A line holds "prompt" (text) or "messages" (a chat), and may hold "max_new_tokens" and "id".
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_KEYS = ("prompt", "messages", "max_new_tokens", "id")


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


def read_jsonl(path: str | Path, *, allow_messages: bool = True) -> list[Request]:
    """Read every line of a file of prompts; blank lines are skipped.

    Raises:
      UsageError: naming file and line, for anything that is not one of the forms above.
      OSError: the file cannot be read.
    """
    requests = []
    with open(path, encoding="utf-8") as file:
        try:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}, line {number}"
                    requests.append(_request(_object(line, where), where, allow_messages))
        except UnicodeDecodeError as error:
            raise UsageError(f"{path}: not UTF-8 text ({error.reason})") from error
    if not requests:
        raise UsageError(f"{path}: no prompts in it, wanted one JSON object a line")
    return requests


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
    if not isinstance(found, dict):
        raise UsageError(f"{where}: a JSON {type(found).__name__}, wanted an object")
    return found


def _request(found: dict[str, Any], where: str, allow_messages: bool) -> Request:
    unknown = [key for key in found if key not in _KEYS]
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
    messages = _messages(found["messages"], where) if "messages" in found else None
    return Request(text=text, messages=messages, max_new_tokens=budget, id=name)


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
    return tuple(found)
