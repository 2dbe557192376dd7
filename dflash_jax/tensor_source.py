"""The tensors of one checkpoint: each taken once, its shape checked, its dtype converted."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
# Buffers that some exports carry and that inference does not read (spec/checkpoints.md §6).
_IGNORED_ENDINGS = ("rotary_emb.inv_freq",)


class TensorSource:
    """A checkpoint on its way to params.

    `names` shrinks as tensors are taken; what is left at `finish` is an error, since it means that
    the file is not what its config says. `dtype` is what `take` converts to.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, np.ndarray], ignored: tuple[str, ...]
    ) -> None:
        self.path = path
        self.dtype = np.dtype(np.float32)
        self._tensors = tensors
        self.left_out = sorted(name for name in tensors if name.startswith(ignored))
        self.names = {
            name
            for name in tensors
            if not name.startswith(ignored) and not name.endswith(_IGNORED_ENDINGS)
        }

    def use_dtype(self, asked: Any, stored: np.dtype) -> None:
        """Convert to the dtype that was asked for, else to the stored one."""
        dtype = jnp.dtype(stored if asked is None else asked)
        if asked is None and dtype == np.float16:
            dtype = np.dtype(np.float32)  # exact, and the engine has no float16 path
        if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
            raise NotImplementedError(
                f"{self.path}: weights in {dtype} are not supported, wanted float32 or bfloat16"
            )
        self.dtype = dtype

    def peek(self, name: str) -> np.ndarray:
        """A tensor as it is stored; it still has to be taken, or dropped."""
        if name not in self.names:
            raise ValueError(f"{self.path}: tensor {name!r} is missing")
        return self._tensors[name]

    def drop(self, name: str) -> None:
        self.names.remove(name)

    def take(self, name: str, *shape: int, dtype: Any = None) -> np.ndarray:
        """Take one tensor in the compute dtype, or another, as host memory of its own."""
        array = self.peek(name)
        self.names.remove(name)
        if array.shape != shape:
            raise ValueError(
                f"{self.path}: tensor {name!r} has shape {list(array.shape)}, wanted {list(shape)}"
            )
        if array.dtype == np.int8:
            return self._dequantise(name, array)
        if array.dtype not in _FLOATS:
            raise NotImplementedError(
                f"{self.path}: tensor {name!r} is {array.dtype}, supported are float32, float16 "
                "and bfloat16"
            )
        return self._read(array).astype(self.dtype if dtype is None else dtype)

    def put(self, name: str, *shape: int) -> jax.Array:
        return self.place(self.take(name, *shape))

    def place(self, array: np.ndarray) -> jax.Array:
        """Put on the device what was made of taken tensors."""
        return jax.device_put(array)

    def maybe(self, name: str, *shape: int, wanted: bool) -> jax.Array | None:
        return self.put(name, *shape) if wanted else None

    def rows(self, fused: str, parts: Mapping[str, int], *rest: int) -> np.ndarray:
        """Take several tensors stacked by rows, or the one that an export has fused already."""
        if fused in self.names:
            return self.take(fused, sum(parts.values()), *rest)
        return np.concatenate([self.take(name, n, *rest) for name, n in parts.items()])

    def finish(self) -> None:
        if self.names:
            names = sorted(self.names)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{self.path}: tensors that its config has no place for: "
                f"{', '.join(map(repr, names[:3]))}{more}"
            )

    def _dequantise(self, name: str, array: np.ndarray) -> np.ndarray:
        """int8 with one f32 scale an output row, or a column for tables that are looked up."""
        for ending, axis in ((".scale", 0), (".column_scale", 1)):
            if name + ending in self.names:
                scale = self.peek(name + ending)
                self.names.remove(name + ending)
                wanted = array.shape[axis : axis + 1]
                if array.ndim != 2 or scale.shape != wanted or scale.dtype != np.float32:
                    raise ValueError(
                        f"{self.path}: tensor {name + ending!r} is {scale.dtype} "
                        f"{list(scale.shape)} for an int8 {list(array.shape)}, wanted float32 "
                        f"{list(wanted)} and a matrix"
                    )
                scale = self._read(scale) if axis == 1 else scale
                wide = self._read(array).astype(np.float32) * np.expand_dims(scale, 1 - axis)
                return wide.astype(self.dtype)
        raise ValueError(f"{self.path}: tensor {name!r} is int8 and has no {name + '.scale'!r}")

    def _read(self, array: np.ndarray) -> np.ndarray:
        """What is read of a tensor that was checked: all of it."""
        return array


class HeaderSource(TensorSource):
    """Checks names, shapes and dtypes, and reads no numbers: what it takes has no columns."""

    def place(self, array: np.ndarray) -> Any:
        return array

    def _read(self, array: np.ndarray) -> np.ndarray:
        return array[..., :0]


def full_dtype(path: Path, array: np.ndarray, hf: Mapping[str, Any]) -> np.dtype:
    """dtype of a file's weights; of int8 ones what its config.json says they were made from."""
    if array.dtype != np.int8:
        return array.dtype
    name = hf.get("dtype") or "bfloat16"
    wanted = [str(dtype) for dtype in _FLOATS]
    if name not in wanted:
        raise ValueError(f"{path}: dtype is {name!r}, wanted one of {', '.join(sorted(wanted))}")
    return jnp.dtype(name)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays are equal in shape, dtype and every bit."""
    a, b = np.asarray(a), np.asarray(b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return bool(np.array_equal(a.view(f"u{a.itemsize}"), b.view(f"u{b.itemsize}")))
