"""The letters of every signature, and the check that reads them.

    B sequences in the batch    H query heads     E model width       V vocabulary
    R rows of a block           K kv heads        F ffn width         L layers
    N flattened rows, B*R       D head dim        M tapped layers     C candidates, 16
    T prompt tokens             S context length  P pages a sequence  W context rows

A spec is a string of letters, numbers and products, one word an axis: ``"B R H D"``, ``"W M*E"``.
"""

import operator
from collections.abc import Mapping
from typing import Any

Dims = Mapping[str, int]


def _axis_size(word: str, dims: Dims) -> int | None:
    """Size of one axis word, or None when one of its letters is free."""
    size = 1
    for factor in word.split("*"):
        if factor.isdigit():
            size *= int(factor)
        elif factor in dims:
            size *= dims[factor]
        else:
            return None
    return size


def check_integers(op: str, **values: Any) -> None:
    """Raise TypeError unless every value that is given is an integer; 16.0 and True are none."""
    for name, value in values.items():
        if value is None:
            continue
        try:
            operator.index(value)
        except TypeError:
            raise TypeError(f"{op}: {name} is {value!r}, wanted an integer") from None
        if isinstance(value, bool):
            raise TypeError(f"{op}: {name} is {value!r}, wanted an integer")


def check_shape(name: str, x: Any, spec: str, dims: Dims) -> None:
    """Raise ValueError unless `x` has the shape that `spec` spells with the letters of `dims`.

    Letters that `dims` does not hold are free, but must be equal wherever they stand alone.
    Runs at trace time only, so it costs nothing in a compiled step.
    """
    words = spec.split()
    shape = tuple(x.shape)
    known = dict(dims)
    fits = len(words) == len(shape)
    if fits:
        for word, found in zip(words, shape, strict=True):
            want = _axis_size(word, known)
            if want is None and word.isalpha():
                known[word] = found
            elif want is not None and want != found:
                fits = False
    if not fits:
        wanted = ", ".join(
            word if _axis_size(word, dims) is None else f"{word}={_axis_size(word, dims)}"
            for word in words
        )
        raise ValueError(f"{name} has shape {list(shape)}, wanted [{wanted}]")
