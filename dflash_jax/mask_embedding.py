"""`mask_embedding.pt`: a vector that stands in for the mask token's embedding, as torch saves it.

The file is a zip with a pickle in it, and a pickle is a program. Ours may use the opcodes and the
names that a saved tensor needs; any other is an error before anything is called. No torch is
needed, to read or to write.
"""

import io
import math
import os
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

NAME = "mask_embedding.pt"
_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}
_OPCODES = frozenset(
    "PROTO STOP MARK GLOBAL REDUCE BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE "
    "NEWFALSE BININT BININT1 BININT2 BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT "
    "SETITEM SETITEMS".split()
)
# What zipfile raises for a damaged archive: a seek below 0, an unknown method, encryption, a name.
_NOT_A_ZIP = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    EOFError,
    OSError,
    RuntimeError,
    UnicodeDecodeError,
    struct.error,
)
_MAX_PICKLE = 1 << 16  # bytes; a saved tensor's is about 400
_MAX_STORAGE = 1 << 26


class MaskEmbedding(NamedTuple):
    """One row [E] of an embedding, and the token it belongs to if the file says."""

    vector: np.ndarray
    mask_id: int | None


class _Tensor(NamedTuple):
    """What a saved tensor is rebuilt from, before its bytes are read."""

    dtype: np.dtype
    key: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def read_mask_embedding(path: Path) -> MaskEmbedding:
    """Read a tensor of one row, or a dict with one under `embedding` and perhaps `mask_token_id`.

    Raises:
      ValueError: not a zip that torch saved, or a pickle with anything but tensors in it.
    """
    with path.open("rb") as file:
        try:
            return _read_archive(path, zipfile.ZipFile(file))
        except _NOT_A_ZIP as error:
            raise ValueError(f"{path}: not a zip that torch.save wrote ({error})") from None


def _read_archive(path: Path, archive: zipfile.ZipFile) -> MaskEmbedding:
    found = _unpickled(path, archive)
    mask_id = None
    if isinstance(found, dict):
        mask_id = found.get("mask_token_id")
        found = found.get("embedding")
    if mask_id is not None and (type(mask_id) is not int or mask_id < 0):
        raise ValueError(f"{path}: mask_token_id is no token id")
    if not isinstance(found, _Tensor):
        raise ValueError(f"{path}: no tensor in it, nor a dict with one named 'embedding'")
    return MaskEmbedding(_row(path, archive, found), mask_id)


def write_mask_embedding(path: Path, vector: np.ndarray, mask_id: int) -> None:
    """Write what `read_mask_embedding` and `torch.load(weights_only=True)` read."""
    names = {dtype: name for name, dtype in _STORAGES.items()}
    if vector.ndim != 1 or vector.dtype not in names:
        raise ValueError(f"{path}: {vector.dtype}{list(vector.shape)}, wanted one row of floats")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    stem = path.stem
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr(f"{stem}/data.pkl", _pickled(names[vector.dtype], vector, mask_id))
            archive.writestr(f"{stem}/byteorder", "little")
            archive.writestr(f"{stem}/data/0", np.ascontiguousarray(vector).tobytes())
            archive.writestr(f"{stem}/version", "3\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _unpickled(path: Path, archive: zipfile.ZipFile) -> Any:
    names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(names) != 1:
        raise ValueError(
            f"{path}: {len(names)} pickles in it, wanted the one that torch.save wrote"
        )
    program = _read(path, archive, names[0], _MAX_PICKLE)
    try:
        _check_program(program)
        return _TensorsOnly(io.BytesIO(program)).load()
    except _ForbiddenError as error:
        raise ValueError(
            f"{path}: the pickle in it asks for {error}, wanted float tensors and nothing else"
        ) from None
    except Exception as error:  # a pickle is a program: broken, it may fail in any way
        raise ValueError(f"{path}: the pickle in it is damaged ({error})") from None


class _ForbiddenError(Exception):
    """What a tensor does not need, by name."""


def _check_program(program: bytes) -> None:
    """Raise `_ForbiddenError` before a pickle runs that is more than saved tensors."""
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name == "GLOBAL" and argument not in _GLOBALS:
            raise _ForbiddenError(str(argument)[:80].replace(" ", "."))
        # A memo index of 2^31 would have the interpreter allocate as many places.
        is_far = opcode.name == "LONG_BINPUT" and argument is not None and argument > 9999
        if opcode.name not in _OPCODES or is_far:
            raise _ForbiddenError(f"opcode {opcode.name}")


class _TensorsOnly(pickle.Unpickler):
    """A pickle interpreter in which nothing can be called but the functions of `_GLOBALS`."""

    def find_class(self, module: str, name: str) -> Any:
        return _GLOBALS[f"{module} {name}"]

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, _, count = pid  # ("storage", class, key, device, elements)
        if kind != "storage" or storage not in _STORAGES or type(key) is not str:
            raise ValueError("not a storage")
        return _STORAGES[storage], key, int(count)


def _no_hooks() -> tuple[()]:
    """The empty OrderedDict that a tensor's hooks are."""
    return ()


def _unwrapped(data: Any, *rest: Any) -> Any:
    """A parameter is its tensor."""
    return data


def _rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> _Tensor:
    dtype, key, _ = storage
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(type(x) is not int or x < 0 for x in numbers):
        raise ValueError("a tensor's shape is not made of sizes")
    return _Tensor(dtype, key, offset, tuple(shape), tuple(stride))


_GLOBALS = {
    "torch._utils _rebuild_tensor_v2": _rebuilt,
    "torch._utils _rebuild_parameter": _unwrapped,
    "collections OrderedDict": _no_hooks,
    **{f"torch {name}": name for name in _STORAGES},
}


def _row(path: Path, archive: zipfile.ZipFile, tensor: _Tensor) -> np.ndarray:
    """The tensor's one row; only then are its bytes read."""
    size = math.prod(tensor.shape)
    if size != max(tensor.shape, default=0) or not size:
        raise ValueError(f"{path}: the tensor has shape {list(tensor.shape)}, wanted one row")
    folder = next(n for n in archive.namelist() if n.endswith("/data.pkl"))[: -len("data.pkl")]
    order = f"{folder}byteorder"
    if order in archive.namelist() and _read(path, archive, order, 16) != b"little":
        raise ValueError(f"{path}: big-endian numbers, wanted little")
    data = _read(path, archive, f"{folder}data/{tensor.key}", _MAX_STORAGE)
    storage = np.frombuffer(data, tensor.dtype, count=len(data) // tensor.dtype.itemsize)
    step = tensor.stride[int(np.argmax(tensor.shape))]
    row = storage[tensor.offset :][:: max(step, 1)][:size]
    if len(row) != size or (step == 0 and size > 1):
        raise ValueError(f"{path}: the tensor leaves its storage of {len(storage)} numbers")
    if not np.isfinite(row.astype(np.float32)).all():
        raise ValueError(f"{path}: the embedding has numbers that are not finite")
    return row.copy()


def _read(path: Path, archive: zipfile.ZipFile, name: str, most: int) -> bytes:
    if name not in archive.namelist():
        raise ValueError(f"{path}: no {name!r} in it")
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > most:
        raise ValueError(
            f"{path}: {name!r} is packed or has {info.file_size} bytes, wanted at most {most} as "
            "they are"
        )
    try:
        return archive.read(name)
    except ValueError as error:  # a place in the file that is no number of bytes
        raise zipfile.BadZipFile(str(error)) from None


def _pickled(storage: str, vector: np.ndarray, mask_id: int) -> bytes:
    """{"embedding": tensor, "mask_token_id": id} as torch pickles it, protocol 2."""
    text, number = _short_text, _integer
    storage_id = (
        b"(" + text("storage") + _name("torch", storage) + text("0") + text("cpu")
        + number(len(vector)) + b"tQ"
    )  # fmt: skip
    hooks = _name("collections", "OrderedDict") + b")R"
    tensor = (
        _name("torch._utils", "_rebuild_tensor_v2") + b"(" + storage_id + number(0)
        + number(len(vector)) + b"\x85" + number(1) + b"\x85" + b"\x89" + hooks + b"tR"
    )  # fmt: skip
    return (
        b"\x80\x02}(" + text("embedding") + tensor + text("mask_token_id") + number(mask_id) + b"u."
    )


def _short_text(text: str) -> bytes:
    raw = text.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def _integer(value: int) -> bytes:
    return b"J" + value.to_bytes(4, "little")


def _name(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()
