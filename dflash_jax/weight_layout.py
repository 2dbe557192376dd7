"""Matrices of layers as `[in, out]`, which XLA's products on a GPU read faster than `[out, in]`.

The 144 products of Qwen3-8B's layers, one after another with a head behind them, took 4.31 ms
instead of 4.49 at 16 rows and 5.52 instead of 5.75 at 128 (one H200, bf16, median of 12); a head
turned as well gained nothing. Kernels take matrices as checkpoints have them, so this is for
impl="auto" and "xla".
"""

from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.core import Tracer

from dflash_jax.params import ByInput, DraftParams, GdnParams, LayerParams, MtpParams

_Params = TypeVar("_Params")

_MATRICES: dict[type, tuple[str, ...]] = {
    LayerParams: ("qkv", "o", "gate_up", "down"),
    GdnParams: ("in_proj", "out"),
    DraftParams: ("fc", "fused_kv"),
    MtpParams: ("fc", "kv"),
}


def turn_weights(params: _Params) -> _Params:
    """The same weights with the matrices of layers as `[in, out]`; for a decode on a GPU.

    Gives up `params` as a donated argument is: each matrix is freed once it is turned, so that no
    model is held twice. What has been turned stays as it is. Turned weights can be neither trained
    nor exported.

    Args:
      params: `Params`, or a target's or a drafter's alone; of arrays, or of their shapes under
        `jax.eval_shape`.

    Raises:
      TypeError: something that is none of these.
    """
    if not isinstance(params, struct.PyTreeNode):
        raise TypeError(
            f"turn_weights: params is a {type(params).__name__}, wanted Params, or a target's or a "
            "drafter's"
        )
    return _visit(params, {})


def laid_out(params: _Params, impl: str) -> _Params:
    """Weights as a decode by `impl` on this process's device takes them; may give up `params`."""
    gains = jax.default_backend() == "gpu" and impl in ("auto", "xla")
    return turn_weights(params) if gains else params


def _visit(node: Any, turned: dict[int, ByInput]) -> Any:
    if isinstance(node, tuple):
        return tuple(_visit(x, turned) for x in node)
    if not (isinstance(node, struct.PyTreeNode) and is_dataclass(node)):
        return node
    matrices = _MATRICES.get(type(node), ())
    made = {}
    for field in fields(node):
        if field.metadata.get("pytree_node", True):
            one = _turned if field.name in matrices else _visit
            made[field.name] = one(getattr(node, field.name), turned)
    return node.replace(**made)


def _turned(matrix: Any, turned: dict[int, ByInput]) -> Any:
    """A matrix turned; the same one twice stays one array."""
    if matrix is None or isinstance(matrix, ByInput):
        return matrix
    if id(matrix) not in turned:
        turned[id(matrix)] = ByInput(jnp.transpose(matrix))
        if isinstance(matrix, jax.Array) and not isinstance(matrix, Tracer):
            turned[id(matrix)].array.block_until_ready()
            matrix.delete()
    return turned[id(matrix)]
