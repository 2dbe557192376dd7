"""Read a checkpoint folder with numpy alone: config.json and safetensors, one file or shards.

numpy has no bfloat16, so bf16 tensors come back widened to f32, which is exact.
"""

import json
import struct
from pathlib import Path

import numpy as np

_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",  # bits; widened below
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
}


def widen_bf16(bits):
    """u16 bit patterns of bfloat16 numbers -> the same numbers in f32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(x):
    """Round to the nearest bfloat16, ties to even; the result is f32 and holds a bf16 number."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    lowest_kept_bit = (bits >> 16) & 1
    return ((bits + 0x7FFF + lowest_kept_bit) & 0xFFFF0000).view(np.float32)


def read_safetensors(path):
    """A safetensors file -> {name: array}.

    The file is u64 header size, a JSON header {name: {dtype, shape, data_offsets}}, then the bytes.
    """
    blob = Path(path).read_bytes()
    (header_size,) = struct.unpack("<Q", blob[:8])
    header = json.loads(blob[8 : 8 + header_size])
    data = memoryview(blob)[8 + header_size :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[begin:end], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
        tensors[name] = widen_bf16(array) if entry["dtype"] == "BF16" else array
    return tensors


def read_tensors(folder):
    """Every tensor of a checkpoint folder, whichever of its shards holds it."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_safetensors(folder / "model.safetensors")
    tensors = {}
    for shard in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        tensors.update(read_safetensors(folder / shard))
    return tensors


def read_config(folder):
    """config.json of a checkpoint folder."""
    return json.loads((Path(folder) / "config.json").read_text())
