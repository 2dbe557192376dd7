"""Dispatch of every op to one of its implementations, and the checks that all ops share.

An op has an XLA form, which runs anywhere, and mostly a Pallas-Triton kernel beside it. `impl` says
which of them runs, and nothing else does: "xla" the former, "pallas" the latter, "interpret" the
latter in Pallas' interpreter (any backend), "auto" the kernel where the program is lowered for CUDA
and the XLA form elsewhere. "auto" takes the XLA form on CUDA too for operands that a kernel does
not serve, by the rule of shapes and dtypes that the op's docstring states.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

IMPLS = ("auto", "xla", "pallas", "interpret")

# Finite, so that a difference of two masked scores is 0 and not the NaN of inf - inf.
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)

FLOATS = ("bfloat16", "float16", "float32")

# Triton needs tensor cores that know bf16 and asynchronous copies: Ampere, 8.0.
_OLDEST_GPU = (8, 0)
# KiB a program may take, by compute capability (CUDA C++ programming guide).
_SHARED_MEMORY = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}


def dispatch(
    op: str,
    impl: str,
    kernel: Callable[..., Any] | None,
    xla: Callable[..., Any],
    *arrays: Any,
    unserved: str | None = None,
    **static: Any,
) -> Any:
    """Run `op` by the implementation that `impl` names; never another one silently.

    Args:
      op, impl: for messages; as the caller gave it.
      kernel: called with (*arrays, interpret=bool, **static), or None where no kernel exists. It is
        traced beside the XLA form even where it will not run, so wrap it in `jax.jit`, which traces
        it once for all layers and calls of equal shapes.
      xla: called with (*arrays, **static).
      arrays: the op's operands, None among them for what is absent.
      unserved: what of these operands the kernel does not serve, and what it would, in a few words.
      static: hashable settings of both.
    """
    _check_name(op, impl)
    # Callers at a prompt pass NumPy arrays, which have no `.at`.
    operands = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in arrays]
    served = kernel is not None and unserved is None
    if impl == "xla" or (impl == "auto" and not served):
        return xla(*operands, **static)
    if kernel is None or unserved is not None:
        why = unserved or "has no kernel to run"
        raise NotImplementedError(f"{op}: impl={impl!r} {why}, supported are 'auto' and 'xla'")
    if impl == "interpret":
        return kernel(*operands, interpret=True, **static)
    _check_gpu(op, impl)
    compiled = partial(kernel, interpret=False, **static)
    if impl == "pallas":
        return compiled(*operands)
    return lax.platform_dependent(*operands, cuda=compiled, default=partial(xla, **static))


def check_impl(op: str, impl: str) -> None:
    """Raise unless `impl` names an implementation that this process can run."""
    _check_name(op, impl)
    _check_gpu(op, impl)


def _check_name(op: str, impl: str) -> None:
    if impl not in IMPLS:
        raise ValueError(f"{op}: impl is {impl!r}, wanted one of {', '.join(map(repr, IMPLS))}")


def _check_gpu(op: str, impl: str) -> None:
    """Raise where kernels would be compiled for a device that cannot run them.

    Under an abstract mesh of a GPU the program is for that one, whatever this machine has.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if impl not in ("auto", "pallas") or getattr(mesh, "abstract_device", None) is not None:
        return
    device = jax.devices()[0]
    if device.platform != "gpu":
        if impl == "pallas":
            raise NotImplementedError(
                f"{op}: impl='pallas' needs a CUDA device and this process has {device.platform}, "
                "supported here are 'auto', 'xla' and 'interpret'"
            )
        return
    generation = str(getattr(device, "compute_capability", ""))
    if generation and tuple(map(int, generation.split("."))) < _OLDEST_GPU:
        raise NotImplementedError(
            f"{op}: kernels need compute capability {'.'.join(map(str, _OLDEST_GPU))} and "
            f"{device.device_kind} has {generation}, supported here are 'xla' and 'interpret'"
        )


def shared_memory() -> int:
    """KiB that a program may take on the device that programs are compiled for.

    227 on Hopper, which is what is assumed where there is no GPU; the least of all supported ones
    for a generation that is not listed.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if getattr(mesh, "abstract_device", None) is not None:
        return _SHARED_MEMORY["9.0"]
    device = jax.devices()[0]
    if device.platform != "gpu":
        return _SHARED_MEMORY["9.0"]
    generation = str(getattr(device, "compute_capability", ""))
    return _SHARED_MEMORY.get(generation, min(_SHARED_MEMORY.values()))


def is_power_of_2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; Triton's blocks have such sizes."""
    return 1 << max(n - 1, 0).bit_length()


def show(x: Any) -> str:
    """Name an array as XLA prints it: `bf16[2, 3]`."""
    aval = jax.typeof(x)
    short = aval.str_short(True).split("[")[0]
    return f"{short}[{', '.join(map(str, aval.shape))}]"


def check_rank(op: str, name: str, x: Any, letters: str) -> tuple[int, ...]:
    """Return the shape of `x` if it has one axis for each of the letters, such as "B R H D"."""
    shape = jnp.shape(x)
    if len(shape) != len(letters.split()):
        raise ValueError(f"{op}: {name} is {show(x)}, wanted [{', '.join(letters.split())}]")
    return shape


def check_shape(op: str, name: str, x: Any, wanted: tuple[int, ...]) -> None:
    """Raise unless `x` has exactly the wanted shape."""
    if jnp.shape(x) != wanted:
        raise ValueError(f"{op}: {name} is {show(x)}, wanted shape [{', '.join(map(str, wanted))}]")


def check_float(op: str, **arrays: Any) -> None:
    """Raise unless every array has a float dtype that the ops compute with."""
    for name, x in arrays.items():
        if jnp.result_type(x).name not in FLOATS:
            raise ValueError(f"{op}: {name} is {show(x)}, wanted one of {', '.join(FLOATS)}")


def check_dtype(op: str, name: str, x: Any, dtype: Any) -> None:
    """Raise unless `x` has the wanted dtype."""
    if jnp.result_type(x) != jnp.dtype(dtype):
        raise ValueError(f"{op}: {name} is {show(x)}, wanted dtype {jnp.dtype(dtype).name}")


def dot_precision(dtype: Any) -> lax.Precision:
    """HIGHEST for f32 operands, which a GPU would else round to TF32; 16-bit operands are exact."""
    is_f32 = jnp.dtype(dtype) == jnp.float32
    return lax.Precision.HIGHEST if is_f32 else lax.Precision.DEFAULT
