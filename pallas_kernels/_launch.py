"""Dispatch of every op to one of its implementations, and the checks that all ops share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

IMPLS = ("auto", "xla", "pallas", "interpret")

# Finite, so that a difference of two masked scores is 0 and not the NaN of inf - inf.
MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)

FLOATS = ("bfloat16", "float16", "float32")


def dispatch(op: str, impl: str, xla: Callable[..., Any], *args: Any) -> Any:
    """Run `op` on `args` by the implementation that `impl` names; never another one silently."""
    check_impl(op, impl)
    # Callers at a prompt pass NumPy arrays, which have no `.at`.
    return xla(*(jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args))


def check_impl(op: str, impl: str) -> None:
    """Raise unless `impl` names an implementation that there is."""
    if impl not in IMPLS:
        raise ValueError(f"{op}: impl is {impl!r}, wanted one of {', '.join(map(repr, IMPLS))}")
    if impl in ("pallas", "interpret"):
        raise NotImplementedError(
            f"{op}: impl={impl!r} has no kernel to run, supported are 'auto' and 'xla'"
        )


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
