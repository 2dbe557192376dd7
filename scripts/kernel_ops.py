"""Every op with its cases and its oracle, so that scripts and tests check the same things.

The shapes are those of `tests/cases.py` and the oracles those of `tests/reference`; `check` runs
one case by one implementation and says how far it is from the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

import pallas_kernels as pk
from tests import cases
from tests.kernels.compare import TOLERANCE
from tests.reference import ops

Arrays = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Op:
    """One op of `pallas_kernels`, by the names that its test uses.

    call(case, impl) is a function of the arrays of make(case), as is oracle(case).
    exact: of each output, whether it equals the oracle's to the bit.
    """

    name: str
    cases: tuple[Any, ...]
    make: Callable[[Any], Arrays]
    call: Callable[[Any, str], Callable[..., Any]]
    oracle: Callable[[Any], Callable[..., Any]]
    exact: tuple[bool, ...]


def _attention(case: Any) -> dict[str, Any]:
    return {"is_causal": case.is_causal, "window": case.window}


def _top(case: Any) -> dict[str, Any]:
    return {"k": case.k, "vocab": case.vocab}


def _two(make: Callable[[Any], Arrays]) -> Callable[[Any], Arrays]:
    return lambda case: make(case)[:2]


OPS = (
    Op(
        "paged_attention",
        cases.ATTENTION,
        cases.make_attention,
        lambda case, impl: partial(pk.paged_attention, **_attention(case), impl=impl),
        lambda case: partial(ops.paged_attention, **_attention(case)),
        (False,),
    ),
    Op(
        "reshape_and_cache",
        cases.CACHE,
        cases.make_cache,
        lambda case, impl: partial(pk.reshape_and_cache, impl=impl),
        lambda case: ops.reshape_and_cache,
        (True, True),
    ),
    Op(
        "dynamic_conv",
        cases.CONV,
        cases.make_conv,
        lambda case, impl: partial(pk.dynamic_conv, impl=impl),
        lambda case: ops.dynamic_conv,
        (False,),
    ),
    Op(
        "top16",
        cases.TOP,
        lambda case: (cases.make_top(case),),
        lambda case, impl: partial(pk.top16, **_top(case), impl=impl),
        lambda case: partial(ops.top16, **_top(case)),
        (True, True),
    ),
    Op(
        "selector_walk",
        cases.WALK,
        cases.make_walk,
        lambda case, impl: partial(pk.selector_walk, k=case.k, impl=impl),
        lambda case: partial(ops.selector_walk, k=case.k),
        (True, False),
    ),
    Op(
        "skinny_matmul",
        cases.MATMUL,
        _two(cases.make_matmul),
        lambda case, impl: partial(pk.skinny_matmul, impl=impl),
        lambda case: ops.skinny_matmul,
        (False,),
    ),
    Op(
        "skinny_matmul_swiglu",
        cases.MATMUL,
        _two(cases.make_matmul),
        lambda case, impl: partial(pk.skinny_matmul_swiglu, impl=impl),
        lambda case: ops.skinny_matmul_swiglu,
        (False,),
    ),
)
NAMES = tuple(op.name for op in OPS)


def in_both_dtypes(op: Op) -> list[Any]:
    """The op's cases in f32 and in bf16, whichever of them the table has."""
    found = []
    for case in op.cases:
        for dtype in ("f32", "bf16"):
            changes = {"dtype": dtype}
            if case.dtype == dtype or not hasattr(case, "pool_dtype"):
                found.append(replace(case, **changes))
            else:
                found.append(replace(case, **changes, pool_dtype=dtype))
    return found


def check(op: Op, case: Any, impl: str) -> dict[str, Any]:
    """Run one case; say how far each output is from the oracle, and whether that is allowed."""
    inputs = op.make(case)
    got = jax.jit(op.call(case, impl))(*inputs)
    want = op.oracle(case)(*inputs)
    got = got if isinstance(got, tuple) else (got,)
    want = want if isinstance(want, tuple) else (want,)
    errors, is_right = [], True
    for one, oracle, exact in zip(got, want, op.exact, strict=True):
        error, allowed = _distance(np.asarray(one), np.asarray(oracle), exact)
        errors.append(error)
        is_right &= error <= allowed  # false for a NaN
    found = {"op": op.name, "case": case.name, "dtype": case.dtype, "impl": impl}
    return {**found, "error": max(errors), "right": bool(is_right)}


def _distance(got: np.ndarray, want: np.ndarray, exact: bool) -> tuple[float, float]:
    """The largest error over the oracle's largest magnitude, and how much of it is rounding."""
    if exact:
        return float(np.mean(got != want)), 0.0
    tolerance = TOLERANCE[got.dtype.name]
    counts = want > pk.MASK_VALUE  # a masked score is the same number on both sides
    if (got[~counts] != np.float32(pk.MASK_VALUE)).any():
        return float("inf"), 0.0
    got, want = got[counts].astype(np.float64), want[counts].astype(np.float64)
    scale = float(np.abs(want).max(initial=0.0)) or 1.0
    return float(np.abs(got - want).max(initial=0.0)) / scale, tolerance
