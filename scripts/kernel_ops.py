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
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from tests import cases
from tests.kernels.compare import TOLERANCE
from tests.reference import ops
from tests.reference.delta_rule_tiles import delta_rule_tiles
from tests.reference.gated_delta_rows import gated_delta_rows
from tests.reference.layers import rms_norm
from tests.reference.markov_argmax import markov_argmax

Arrays = tuple[Any, ...]
_EPS = 0.25  # of norms, large, so that it counts


@dataclass(frozen=True, slots=True)
class Op:
    """One op of `pallas_kernels`, by the names that its test uses.

    call(case, impl) is a function of the arrays of make(case), as is oracle(case).
    exact: whether floats equal the oracle's to the bit too, as ids always do.
    donated: which inputs are written in place.
    """

    name: str
    cases: tuple[Any, ...]
    make: Callable[[Any], Arrays]
    call: Callable[[Any, str], Callable[..., Any]]
    oracle: Callable[[Any], Callable[..., Any]]
    exact: bool = False
    donated: tuple[int, ...] = ()


def _attention(case: Any) -> dict[str, Any]:
    return {"is_causal": case.is_causal, "window": case.window}


def _top(case: Any) -> dict[str, Any]:
    return {"k": case.k, "vocab": case.vocab}


def _greedy(case: Any) -> dict[str, Any]:
    return {"vocab": case.vocab, "with_hashes": case.dtype == "f32"}  # hashes are of f32 alone


def _markov(case: Any) -> dict[str, Any]:
    return {"row": case.rows - 1, "vocab": case.vocab, "with_bias": case.with_bias}


def _norm_rope(case: Any, impl: str) -> Callable[..., Any]:
    def call(rows, cos, sin, k_pools, v_pools, slots, q_norm, k_norms):
        got = pk.norm_rope_cache(
            rows,
            cos,
            sin,
            k_pools,
            v_pools,
            slots,
            num_heads=case.heads[0],
            q_norm=q_norm,
            k_norms=k_norms,
            impl=impl,
        )
        # The oracle has an empty array where the op has none.
        q = jnp.zeros((case.rows, 0, case.head_dim), rows.dtype) if got.q is None else got.q
        return q, got.k_pools, got.v_pools

    return call


def _fused_conv(x, dyn, base, norm, residual, *, impl: str):
    return pk.dynamic_conv(x, dyn, base, side=1, norm=norm, residual=residual, impl=impl)


def _both_products(
    product: Callable[..., Any], normed: Callable[..., Any], *, with_norm: bool = True
) -> Callable[..., Any]:
    """A product, with the residual if there is one, and one of normed rows.

    Not both in one: of several roundings in a row each may fall to the other side.
    """

    def both(x: Any, w: Any, *residual: Any) -> Arrays:
        added = {"residual": residual[0]} if residual else {}
        first = product(x, w, **added)
        return (first, normed(product, x, w)) if with_norm else (first,)

    return both


def _norm_weight(x: Any) -> Any:
    return np.linspace(0.5, 2.0, x.shape[1]).astype(x.dtype)


def _normed_in(product: Callable[..., Any], x: Any, w: Any) -> Any:
    return product(x, w, norm=_norm_weight(x), eps=_EPS)


def _normed_before(product: Callable[..., Any], x: Any, w: Any) -> Any:
    rounded = rms_norm(x.astype(np.float64), 1.0, _EPS).astype(x.dtype)
    return product(rounded * _norm_weight(x), w)


def _two(make: Callable[[Any], Arrays]) -> Callable[[Any], Arrays]:
    return lambda case: make(case)[:2]


OPS = (
    Op(
        "paged_attention",
        cases.ATTENTION,
        cases.make_attention,
        lambda case, impl: partial(pk.paged_attention, **_attention(case), impl=impl),
        lambda case: partial(ops.paged_attention, **_attention(case)),
    ),
    Op(
        "reshape_and_cache",
        cases.CACHE,
        cases.make_cache,
        lambda case, impl: partial(pk.reshape_and_cache, impl=impl),
        lambda case: ops.reshape_and_cache,
        exact=True,
        donated=(2, 3),
    ),
    Op(
        "norm_rope_cache",
        cases.NORM_ROPE,
        cases.make_norm_rope,
        lambda case, impl: _norm_rope(case, impl),
        lambda case: partial(ops.norm_rope_cache, num_heads=case.heads[0]),
        donated=(3, 4),
    ),
    Op(
        "dynamic_conv",
        cases.CONV,
        cases.make_conv,
        lambda case, impl: partial(pk.dynamic_conv, impl=impl),
        lambda case: ops.dynamic_conv,
    ),
    Op(
        "dynamic_conv_fused",
        cases.CONV,
        cases.make_conv_sides,
        lambda case, impl: partial(_fused_conv, impl=impl),
        lambda case: partial(ops.dynamic_conv, side=1),
    ),
    Op(
        "top16",
        cases.TOP,
        lambda case: (cases.make_top(case),),
        lambda case, impl: partial(pk.top16, **_top(case), impl=impl),
        lambda case: partial(ops.top16, **_top(case)),
        exact=True,
    ),
    Op(
        "greedy_rows",
        cases.TOP,
        lambda case: (cases.make_top(case),),
        lambda case, impl: partial(pk.greedy_rows, **_greedy(case), impl=impl),
        lambda case: partial(ops.greedy_rows, **_greedy(case)),
    ),
    Op(
        "markov_argmax",
        cases.MARKOV,
        cases.make_markov,
        lambda case, impl: partial(pk.markov_argmax, **_markov(case), impl=impl),
        lambda case: partial(markov_argmax, **_markov(case)),
    ),
    Op(
        "selector_walk",
        cases.WALK,
        cases.make_walk,
        lambda case, impl: partial(pk.selector_walk, k=case.k, impl=impl),
        lambda case: partial(ops.selector_walk, k=case.k),
    ),
    Op(
        "selector_walk_sampled",
        cases.WALK,
        cases.make_walk_draws,
        lambda case, impl: partial(pk.selector_walk_sampled, k=case.k, impl=impl),
        lambda case: partial(ops.selector_walk_sampled, k=case.k),
    ),
    Op(
        "skinny_matmul",
        cases.MATMUL,
        cases.make_matmul,
        lambda case, impl: _both_products(partial(pk.skinny_matmul, impl=impl), _normed_in),
        lambda case: _both_products(ops.skinny_matmul, _normed_before),
    ),
    Op(
        "skinny_matmul_swiglu",
        cases.MATMUL,
        _two(cases.make_matmul),
        lambda case, impl: _both_products(
            partial(pk.skinny_matmul_swiglu, impl=impl), _normed_in, with_norm=case.dtype == "f32"
        ),
        lambda case: _both_products(
            ops.skinny_matmul_swiglu, _normed_before, with_norm=case.dtype == "f32"
        ),
    ),
    Op(
        "gated_delta_rows",
        cases.DELTA,
        cases.make_delta,
        lambda case, impl: partial(pk.gated_delta_rows, num_key_heads=case.heads[0], impl=impl),
        lambda case: partial(gated_delta_rows, num_key_heads=case.heads[0]),
        donated=(4,),
    ),
    Op(
        "delta_rule_tiles",
        cases.TILES,
        cases.make_tiles,
        lambda case, impl: partial(pk.delta_rule_tiles, num_key_heads=case.heads[0], impl=impl),
        lambda case: partial(delta_rule_tiles, num_key_heads=case.heads[0]),
        donated=(4,),
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
    got = jax.tree.leaves(jax.jit(op.call(case, impl))(*inputs))
    want = jax.tree.leaves(op.oracle(case)(*inputs))
    errors, is_right = [0.0], True
    for one, oracle in zip(got, want, strict=True):
        error, allowed = _distance(np.asarray(one), np.asarray(oracle), op.exact)
        errors.append(error)
        is_right &= error <= allowed  # false for a NaN
    found = {"op": op.name, "case": case.name, "dtype": case.dtype, "impl": impl}
    return {**found, "error": max(errors), "right": bool(is_right)}


def _distance(got: np.ndarray, want: np.ndarray, exact: bool) -> tuple[float, float]:
    """The largest error over the oracle's largest magnitude, and how much of it is rounding.

    NaN and masked scores are where the oracle has them, or the error is infinite.
    """
    if exact or got.dtype.kind in "iub":
        same = (got == want) | (np.isnan(got) & np.isnan(want)) if exact else got == want
        return float(1 - np.mean(same)) if got.size else 0.0, 0.0
    tolerance = TOLERANCE[got.dtype.name]
    got, want = got.astype(np.float64), want.astype(np.float64)
    counts = ~np.isnan(want) & (want > pk.MASK_VALUE)
    if (np.isnan(got) != np.isnan(want)).any() or (got[want <= pk.MASK_VALUE] > -1e37).any():
        return float("inf"), 0.0
    scale = float(np.abs(want[counts]).max(initial=0.0)) or 1.0
    return float(np.abs(got - want)[counts].max(initial=0.0)) / scale, tolerance
