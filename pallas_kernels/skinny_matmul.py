"""Few-row matrix products over weights kept as in checkpoints, with their fused epilogues.

Weights are `[out, in]` and `y = x @ w.T`. Accumulation is f32; roundings are those of the models'
own code: the product is rounded to the activations' dtype before anything else touches it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._launch import check_float, check_rank, check_shape, dispatch, dot_precision


def skinny_matmul(x, w, *, residual=None, out_dtype=None, impl: str = "auto") -> jax.Array:
    """Multiply rows with a weight, optionally adding a residual.

    Without a residual the f32 sum is rounded once, to `out_dtype`. With one, the sum is rounded to
    the dtype of `x`, then the residual is added and the result rounded again.

    Args:
      x: bf16|f32[N, in] rows.
      w: [out, in] in the dtype of `x`.
      residual: [N, out] in the dtype of `x`, or None.
      out_dtype: dtype of the result, by default that of `x`; only without a residual.
      impl: which implementation runs.
    Returns:
      [N, out] rows.
    """
    op = "skinny_matmul"
    n, out = _check_operands(op, x, w, "w")
    dtype = jnp.result_type(x)
    out_dtype = dtype if out_dtype is None else jnp.dtype(out_dtype)
    if residual is not None:
        check_shape(op, "residual", residual, (n, out))
        if jnp.result_type(residual) != dtype or out_dtype != dtype:
            raise ValueError(
                f"{op}: residual is {jnp.result_type(residual).name} and out_dtype "
                f"{out_dtype.name}, wanted both {dtype.name} as x"
            )
    return dispatch(op, impl, None, skinny_matmul_xla, x, w, residual, out_dtype=out_dtype)


def skinny_matmul_swiglu(x, w_gate_up, *, impl: str = "auto") -> jax.Array:
    """Compute `silu(x @ gate.T) * (x @ up.T)` with the weights of both in one array.

    gate and up are rounded to the dtype of `x`; silu is taken in f32 and rounded to it; their
    product is rounded to it.

    Args:
      x: bf16|f32[N, in] rows.
      w_gate_up: [2*F, in] in the dtype of `x`: the gate's rows, then up's.
      impl: which implementation runs.
    Returns:
      [N, F] rows in the dtype of `x`.
    """
    op = "skinny_matmul_swiglu"
    out = _check_operands(op, x, w_gate_up, "w_gate_up")[1]
    if out % 2:
        raise ValueError(f"{op}: w_gate_up has {out} rows, wanted gate and up, so an even number")
    return dispatch(op, impl, None, skinny_matmul_swiglu_xla, x, w_gate_up)


def skinny_matmul_xla(x, w, residual=None, out_dtype=None) -> jax.Array:
    """`skinny_matmul` as one dot."""
    acc = _matmul(x, w)
    if residual is None:
        return acc.astype(out_dtype or x.dtype)
    return acc.astype(x.dtype) + residual


def skinny_matmul_swiglu_xla(x, w_gate_up) -> jax.Array:
    """`skinny_matmul_swiglu` as one dot and one elementwise fusion."""
    gate_up = _matmul(x, w_gate_up).astype(x.dtype)  # [N, 2*F]
    gate, up = jnp.split(gate_up, 2, axis=1)
    return jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype) * up


def _matmul(x, w) -> jax.Array:
    """Return `x @ w.T` as f32[N, out]."""
    return lax.dot_general(
        x,
        w,
        (((1,), (1,)), ((), ())),
        precision=dot_precision(x.dtype),
        preferred_element_type=jnp.float32,
    )


def _check_operands(op: str, x, w, name: str) -> tuple[int, int]:
    """Check rows and weight against each other and return (N, out)."""
    n, width = check_rank(op, "x", x, "N in")
    out, _ = check_rank(op, name, w, "out in")
    check_shape(op, name, w, (out, width))
    check_float(op, x=x)
    if jnp.result_type(w) != jnp.result_type(x):
        raise ValueError(
            f"{op}: {name} is {jnp.result_type(w).name}, wanted {jnp.result_type(x).name} as x"
        )
    return n, out
