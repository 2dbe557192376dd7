"""Typed look-ups in a JSON object that a stranger wrote; null counts as absent.

Each raises ValueError in one sentence that names whose object it is, the key and what came.
"""

import math
from collections.abc import Mapping
from typing import Any

Json = Mapping[str, Any]

REQUIRED: Any = object()


def _find(source: Json, name: str, who: str, default: Any) -> Any:
    value = source.get(name)
    if value is None and default is REQUIRED:
        raise ValueError(f"{who}: no {name}")
    return default if value is None else value


def _refuse(who: str, name: str, value: Any, wanted: str) -> ValueError:
    return ValueError(f"{who}: {name} is {str(value)[:80]!r}, wanted {wanted}")


def integer(
    source: Json, name: str, who: str, default: Any = REQUIRED, *, least: int | None = None
) -> int:
    """An integer, perhaps written as 4096.0; a default is returned as it is."""
    value = _find(source, name, who, default)
    if value is default:
        return value
    wanted = "an integer" if least is None else f"an integer from {least}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value != int(value):
        raise _refuse(who, name, value, wanted)
    if least is not None and value < least:
        raise _refuse(who, name, value, wanted)
    return int(value)


def number(
    source: Json, name: str, who: str, default: Any = REQUIRED, *, above: float | None = None
) -> float:
    """A finite number; a default is returned as it is."""
    value = _find(source, name, who, default)
    if value is default:
        return value
    wanted = "a number" if above is None else f"a number above {above:g}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or (above is not None and value <= above):
        raise _refuse(who, name, value, wanted)
    return float(value)


def flag(source: Json, name: str, who: str, default: bool = False) -> bool:
    """true or false."""
    value = _find(source, name, who, default)
    if not isinstance(value, bool):
        raise _refuse(who, name, value, "true or false")
    return value


def mapping(source: Json, name: str, who: str) -> Json:
    """An object; empty where there is none."""
    value = _find(source, name, who, {})
    if not isinstance(value, Mapping):
        raise _refuse(who, name, value, "an object")
    return value


def items(source: Json, name: str, who: str, kind: type) -> tuple[Any, ...]:
    """A list of texts (`str`) or integers (`int`); empty where there is none."""
    value = _find(source, name, who, ())
    is_list = isinstance(value, list | tuple)
    if not is_list or any(not isinstance(x, kind) or isinstance(x, bool) for x in value):
        raise _refuse(who, name, value, f"a list of {'texts' if kind is str else 'integers'}")
    return tuple(value)
