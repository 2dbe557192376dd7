"""One decoder layer of a target or a drafter, by its checkpoint names."""

from collections.abc import Mapping

import jax

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.params import ConvParams, LayerParams
from dflash_jax.tensor_source import TensorSource


def read_layer(source: TensorSource, at: str, c: TargetConfig | DraftConfig) -> LayerParams:
    """One decoder layer whose names start with `at`."""
    query, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    has_qk_norm = isinstance(c, DraftConfig) or c.has_qk_norm
    conv = c if isinstance(c, DraftConfig) and c.kind == "dflash2" else None

    def joined(module: str, parts: Mapping[str, int], what: str, *rest: int) -> jax.Array:
        fused = f"{at}{module}_proj.{what}"
        folder = fused.rsplit(".", 2)[0]
        names = {f"{folder}.{part}_proj.{what}": rows for part, rows in parts.items()}
        return source.place(source.rows(fused, names, *rest))

    heads = {"q": query, "k": kv, "v": kv}
    return LayerParams(
        input_norm=source.put(f"{at}input_layernorm.weight", c.width),
        qkv=joined("self_attn.qkv", heads, "weight", c.width),
        o=source.put(f"{at}self_attn.o_proj.weight", c.width, query),
        post_norm=source.put(f"{at}post_attention_layernorm.weight", c.width),
        gate_up=joined("mlp.gate_up", {"gate": c.ffn, "up": c.ffn}, "weight", c.width),
        down=source.put(f"{at}mlp.down_proj.weight", c.width, c.ffn),
        q_norm=source.maybe(f"{at}self_attn.q_norm.weight", c.head_dim, wanted=has_qk_norm),
        k_norm=source.maybe(f"{at}self_attn.k_norm.weight", c.head_dim, wanted=has_qk_norm),
        qkv_bias=joined("self_attn.qkv", heads, "bias") if c.has_attention_bias else None,
        o_bias=source.maybe(f"{at}self_attn.o_proj.bias", c.width, wanted=c.has_attention_bias),
        attention_conv=None if conv is None else _read_conv(source, f"{at}attention_conv.", conv),
        mlp_conv=None if conv is None else _read_conv(source, f"{at}mlp_conv.", conv),
    )


def _read_conv(source: TensorSource, at: str, c: DraftConfig) -> ConvParams:
    rows = 2 * c.conv_taps * c.num_conv_groups
    return ConvParams(
        base=source.put(f"{at}base_kernel", 2, c.conv_taps, c.width),
        projection=source.put(f"{at}kernel_projection.weight", rows, c.width),
    )
