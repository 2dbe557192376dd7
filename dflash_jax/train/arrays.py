"""`.npz` files written whole or not at all, and read with one sentence for what is wrong."""

import os
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write under a temporary name, then rename."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType] its stubs want a bool
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """The same for text."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_arrays(path: Path, names: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """All arrays of a file, `names` among them.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged or something else.
    """
    try:
        with path.open("rb") as file, np.load(file) as data:  # np.load leaks what it opens itself
            found = {name: data[name] for name in data.files}
    except (zipfile.BadZipFile, EOFError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: not a whole .npz file ({error})") from None
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"{path}: no array {', '.join(missing)}, it has {', '.join(found)}")
    return found
