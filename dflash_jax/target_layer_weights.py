"""One layer of a hybrid or mixture-of-experts target, by its checkpoint names.

Both families of fused projections come out in one order (`params.GdnParams`), experts side by side
(`targets.moe`), and a norm of `1 + w` as that sum in f32: rounded to bf16 it would lose `w`.
"""

from functools import partial
from typing import Any

import jax
import numpy as np

from dflash_jax.config import GdnConfig, MoeConfig, TargetConfig
from dflash_jax.layer_weights import read_layer
from dflash_jax.params import GdnParams, LayerParams
from dflash_jax.tensor_source import TensorSource


def read_target_layer(
    source: TensorSource, at: str, c: TargetConfig, *, is_gdn: bool, has_experts: bool
) -> LayerParams:
    """One decoder layer whose names start with `at`; the flags say which kind."""
    if not (is_gdn or has_experts or c.has_output_gate):
        return read_layer(source, at, c)
    norm = partial(read_norm, source, c=c)
    attention = {} if is_gdn else _attention(source, f"{at}self_attn.", c)
    gdn = c.gdn if is_gdn else None
    moe = c.moe if has_experts else None
    return LayerParams(
        input_norm=norm(f"{at}input_layernorm.weight", c.width),
        qkv=attention.get("qkv"),
        o=attention.get("o"),
        post_norm=norm(f"{at}post_attention_layernorm.weight", c.width),
        q_norm=None if is_gdn else norm(f"{at}self_attn.q_norm.weight", c.head_dim),
        k_norm=None if is_gdn else norm(f"{at}self_attn.k_norm.weight", c.head_dim),
        gdn=None if gdn is None else _gdn(source, f"{at}linear_attn.", c.width, gdn),
        **_feed_forward(source, f"{at}mlp.", c, moe),
    )


def read_norm(source: TensorSource, name: str, size: int, c: TargetConfig) -> jax.Array:
    """What a norm multiplies by: the weight, or one more than it in f32."""
    if not c.has_unit_norms:
        return source.put(name, size)
    return source.place(1 + source.take(name, size, dtype=np.float32))


def _attention(source: TensorSource, at: str, c: TargetConfig) -> dict[str, jax.Array]:
    """qkv and o; the query projection of a gated head is its query rows, then its gate rows."""
    heads, dim = c.num_heads, c.head_dim
    kv = c.num_kv_heads * dim
    halves = 2 if c.has_output_gate else 1
    q = source.take(f"{at}q_proj.weight", halves * heads * dim, c.width)
    q_and_gate = q.reshape(heads, halves, dim, -1).swapaxes(0, 1)
    k, v = (source.take(f"{at}{which}_proj.weight", kv, c.width) for which in "kv")
    q, *gate = (part.reshape(heads * dim, -1) for part in q_and_gate)
    return {
        "qkv": source.place(np.concatenate([q, k, v, *gate])),
        "o": source.put(f"{at}o_proj.weight", c.width, heads * dim),
    }


def _gdn(source: TensorSource, at: str, width: int, c: GdnConfig) -> GdnParams:
    heads = c.num_value_heads
    is_grouped = f"{at}in_proj_qkvz.weight" in source.names
    in_proj = (_grouped_in_proj if is_grouped else _plain_in_proj)(source, at, width, c)
    conv = source.take(f"{at}conv1d.weight", c.conv_width, 1, c.conv_taps)
    return GdnParams(
        in_proj=source.place(in_proj),
        conv=source.place(np.ascontiguousarray(conv[:, 0].T)),
        a_log=source.place(source.take(f"{at}A_log", heads, dtype=np.float32)),
        dt_bias=source.place(source.take(f"{at}dt_bias", heads, dtype=np.float32)),
        norm=source.put(f"{at}norm.weight", c.value_dim),
        out=source.put(f"{at}out_proj.weight", width, c.value_width),
    )


def _plain_in_proj(source: TensorSource, at: str, width: int, c: GdnConfig) -> np.ndarray:
    """Qwen3.5: four projections, one below the other."""
    rows = {"qkv": c.conv_width, "z": c.value_width, "b": c.num_value_heads, "a": c.num_value_heads}
    parts = (source.take(f"{at}in_proj_{x}.weight", n, width) for x, n in rows.items())
    return np.concatenate(list(parts))


def _grouped_in_proj(source: TensorSource, at: str, width: int, c: GdnConfig) -> np.ndarray:
    """Qwen3-Next: two projections whose rows are grouped by key head, (q, k, v, z) and (b, a)."""
    heads, share = c.num_key_heads, c.num_value_heads // c.num_key_heads
    values = share * c.value_dim
    rows = c.conv_width + c.value_width
    qkvz = source.take(f"{at}in_proj_qkvz.weight", rows, width).reshape(heads, -1, width)
    gates = source.take(f"{at}in_proj_ba.weight", 2 * c.num_value_heads, width)
    parts = np.split(qkvz, np.cumsum([c.key_dim, c.key_dim, values]), axis=1)
    parts += np.split(gates.reshape(heads, -1, width), 2, axis=1)
    return np.concatenate([part.reshape(-1, width) for part in parts])


def _feed_forward(
    source: TensorSource, at: str, c: TargetConfig, moe: MoeConfig | None
) -> dict[str, Any]:
    if moe is None:
        gate_up = source.rows(
            f"{at}gate_up_proj.weight",
            {f"{at}gate_proj.weight": c.ffn, f"{at}up_proj.weight": c.ffn},
            c.width,
        )
        down = source.put(f"{at}down_proj.weight", c.width, c.ffn)
        return {"gate_up": source.place(gate_up), "down": down}
    gates, ups, downs = _experts(source, f"{at}experts.", c.width, moe)
    if moe.shared_ffn:
        shared = f"{at}shared_expert."
        gates.append(source.take(f"{shared}gate_proj.weight", moe.shared_ffn, c.width))
        ups.append(source.take(f"{shared}up_proj.weight", moe.shared_ffn, c.width))
        downs.append(source.take(f"{shared}down_proj.weight", c.width, moe.shared_ffn))
    return {
        "gate_up": source.place(np.concatenate(gates + ups)),
        "down": source.place(np.concatenate(downs, axis=1)),
        "router": source.put(f"{at}gate.weight", moe.num_experts, c.width),
        "shared_gate": source.maybe(
            f"{at}shared_expert_gate.weight", 1, c.width, wanted=moe.shared_ffn > 0
        ),
    }


def _experts(
    source: TensorSource, at: str, width: int, moe: MoeConfig
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Gate, up and down matrices of every expert, from one tensor each or from one for all."""
    count, ffn = moe.num_experts, moe.ffn
    if f"{at}gate_up_proj" in source.names:
        gate_up = source.take(f"{at}gate_up_proj", count, 2 * ffn, width)
        down = source.take(f"{at}down_proj", count, width, ffn)
        return list(gate_up[:, :ffn]), list(gate_up[:, ffn:]), list(down)

    def each(which: str, *shape: int) -> list[np.ndarray]:
        return [source.take(f"{at}{i}.{which}_proj.weight", *shape) for i in range(count)]

    return each("gate", ffn, width), each("up", ffn, width), each("down", width, ffn)
