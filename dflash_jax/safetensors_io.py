"""safetensors files: a checked, memory-mapped reader and an atomic writer.

A tensor comes back as a read-only NumPy view of the mapped file, in its own dtype (`ml_dtypes`
names bf16 and the float8 kinds, which the library's own NumPy loader does not know), so reading a
checkpoint costs address space and no memory. A file is data from a stranger: every number of its
header is checked against the file before a view is made.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "I64": np.int64,
        "I32": np.int32,
        "I16": np.int16,
        "I8": np.int8,
        "U64": np.uint64,
        "U32": np.uint32,
        "U16": np.uint16,
        "U8": np.uint8,
        "BOOL": np.bool_,
    }.items()
}
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def read_file(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Map a safetensors file: tensor name -> read-only view, in the file's dtypes."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such safetensors file")
    size = path.stat().st_size
    if size < 8:
        raise ValueError(
            f"{path}: {size} bytes, a safetensors file starts with an 8-byte header length"
        )
    data = np.memmap(path, dtype=np.uint8, mode="r")
    header_bytes = int.from_bytes(data[:8].tobytes(), "little")
    if header_bytes > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path}: header of {header_bytes} bytes, the format allows {MAX_HEADER_BYTES}"
        )
    if 8 + header_bytes > size:
        raise ValueError(f"{path}: header of {header_bytes} bytes in a file of {size} (truncated?)")
    header = _parse_header(path, data[8 : 8 + header_bytes].tobytes())
    return _views(path, header, data, 8 + header_bytes)


def read_checkpoint(folder: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Map a checkpoint folder: `model.safetensors`, or the shards that its index names."""
    folder = Path(folder)
    if (folder / SINGLE_NAME).is_file():
        return read_file(folder / SINGLE_NAME)
    index = folder / INDEX_NAME
    if not index.is_file():
        names = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else ["no such folder"]
        found = ", ".join(names[:8]) or "nothing"
        raise FileNotFoundError(
            f"{folder}: neither {SINGLE_NAME} nor {INDEX_NAME} (found: {found})"
        )
    return _read_shards(folder, _read_index(index))


def write_file(
    path: str | os.PathLike[str], tensors: Mapping[str, Any], metadata: dict[str, str] | None = None
) -> None:
    """Write NumPy or JAX arrays under a temporary name, then rename: never half a file."""
    from safetensors.numpy import save_file  # only writers need the library

    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    arrays = {name: np.asarray(x, order="C") for name, x in tensors.items()}
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # by the user's umask; the library's is the owner's alone
        save_file(arrays, temporary, metadata=metadata)
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, an endless number
        raise ValueError(f"{path}: the header is not JSON ({error})") from None
    except _DuplicateKeyError as error:
        raise ValueError(f"{path}: the header names {error} twice") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header is a JSON {type(header).__name__}, want an object")
    header.pop("__metadata__", None)
    return header


class _DuplicateKeyError(Exception):
    """A JSON object with the same key twice, which `json` would quietly reduce to the last one."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateKeyError(repr(key))
        result[key] = value
    return result


def _views(
    path: Path, header: dict[str, Any], data: np.ndarray, start: int
) -> dict[str, np.ndarray]:
    entries = [_entry(path, name, spec) for name, spec in header.items()]
    entries.sort(key=lambda entry: entry[3:])
    views, expected, previous = {}, 0, "the header"
    for name, dtype, shape, begin, end in entries:
        where = f"{path}: tensor {name!r}"
        # The format has no holes: a begin other than the last end is an overlap or a gap.
        if begin != expected:
            what = "overlaps" if begin < expected else "leaves a hole after"
            raise ValueError(f"{where} at bytes {begin}..{end} {what} {previous} at {expected}")
        if start + end > data.size:
            held = data.size - start
            raise ValueError(f"{where} ends at byte {end} of the data, the file holds {held}")
        try:
            views[name] = np.ndarray(shape, dtype, buffer=data, offset=start + begin)
        except (ValueError, OverflowError) as error:  # too many axes, or an axis beside a 0
            raise ValueError(f"{where} has shape {str(list(shape))[:80]}: {error}") from None
        expected, previous = end, f"tensor {name!r}"
    if start + expected != data.size:
        raise ValueError(
            f"{path}: {data.size - start} bytes of data, the header describes {expected}"
        )
    return {name: views[name] for name in header}


def _entry(path: Path, name: str, spec: Any) -> tuple[str, np.dtype, tuple[int, ...], int, int]:
    """Check one header entry by itself; its place among the others is `_views`' business."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(spec, dict) or not {"dtype", "shape", "data_offsets"} <= spec.keys():
        raise ValueError(
            f"{where} is described by {str(spec)[:80]}, want dtype, shape and data_offsets"
        )
    dtype = DTYPES.get(spec["dtype"]) if isinstance(spec["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"{where} has dtype {spec['dtype']!r}, known are {', '.join(DTYPES)}")
    shape, offsets = spec["shape"], spec["data_offsets"]
    if not _naturals(shape):
        raise ValueError(f"{where} has shape {str(shape)[:80]}, want a list of sizes")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where} has data_offsets {str(offsets)[:80]}, want [begin, end]")
    wanted = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != wanted:
        taken = offsets[1] - offsets[0]
        raise ValueError(f"{where} takes {taken} bytes, {spec['dtype']} {shape} needs {wanted}")
    return name, dtype, tuple(shape), offsets[0], offsets[1]


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: not an index with a weight_map ({error!r})") from None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ValueError(f"{index}: weight_map must map tensor names to file names")
    for shard in weight_map.values():
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise ValueError(f"{index}: shard {shard!r} is not a plain file name")
    return weight_map


def _read_shards(folder: Path, weight_map: dict[str, str]) -> dict[str, np.ndarray]:
    index = folder / INDEX_NAME
    tensors: dict[str, np.ndarray] = {}
    owner: dict[str, str] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{index}: shard {shard} is missing")
        for name, tensor in read_file(folder / shard).items():
            if name in owner:
                raise ValueError(
                    f"{index}: tensor {name!r} is in {owner[name]} and again in {shard}"
                )
            owner[name], tensors[name] = shard, tensor
    for name, shard in weight_map.items():
        if owner.get(name) != shard:
            raise ValueError(
                f"{index}: tensor {name!r} should be in {shard}, found {owner.get(name, 'nowhere')}"
            )
    return tensors
