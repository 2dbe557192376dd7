"""Hyperparameters of layers that only some targets have: Gated DeltaNet and experts."""

from __future__ import annotations

from dataclasses import dataclass

from dflash_jax.json_values import Json, flag, integer, items

_LAYER_KINDS = ("full_attention", "linear_attention")
_FULL_ATTENTION_INTERVAL = 4  # where a hybrid's config names neither layer types nor an interval


@dataclass(frozen=True, slots=True)
class GdnConfig:
    """Gated-DeltaNet layers (spec/verify.md §3): value head h reads key head h // (Hv / Hk)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def in_width(self) -> int:
        """Rows of the fused projection: channels, output gate z, and the gates b and a."""
        return self.conv_width + self.value_width + 2 * self.num_value_heads

    @staticmethod
    def from_hf(config: Json, who: str) -> GdnConfig:
        """Read the `linear_*` keys; ValueError where they are missing or do not divide."""

        def size(name: str, least: int = 1) -> int:
            return integer(config, f"linear_{name}", who, least=least)

        found = GdnConfig(
            num_key_heads=size("num_key_heads"),
            num_value_heads=size("num_value_heads"),
            key_dim=size("key_head_dim"),
            value_dim=size("value_head_dim"),
            conv_taps=size("conv_kernel_dim", 2),
        )
        if found.num_value_heads % found.num_key_heads:
            raise ValueError(
                f"{who}: {found.num_value_heads} linear value heads are not a multiple of "
                f"{found.num_key_heads} key heads"
            )
        return found


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Experts of a feed-forward: each row takes `top_k` of them, and the shared one if there is.

    `ffn` and `shared_ffn` are widths of one expert and of the shared one (0: none).
    `renormalises`: the chosen probabilities are brought to a sum of one.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int
    renormalises: bool

    @property
    def width(self) -> int:
        """Inner columns of all experts side by side, the shared one last."""
        return self.num_experts * self.ffn + self.shared_ffn

    @staticmethod
    def from_hf(config: Json, who: str, *, renormalises: bool) -> MoeConfig | None:
        """Read the experts, None where a config has none.

        Args:
          renormalises: the family's rule where the config has no `norm_topk_prob`.

        Raises:
          NotImplementedError: a router that is not a softmax over all experts at once.
        """
        _refuse_routers(config, who)
        number = integer(config, "num_local_experts", who, 0, least=0)
        number = integer(config, "num_experts", who, number, least=0)
        if not number:
            return None
        top_k = integer(config, "num_experts_per_tok", who, least=1)
        if top_k > number:
            raise ValueError(f"{who}: num_experts_per_tok is {top_k} of {number} experts")
        return MoeConfig(
            num_experts=number,
            top_k=top_k,
            ffn=integer(config, "moe_intermediate_size", who, least=1),
            shared_ffn=integer(config, "shared_expert_intermediate_size", who, 0, least=0),
            renormalises=flag(config, "norm_topk_prob", who, renormalises),
        )


def _refuse_routers(config: Json, who: str) -> None:
    scoring = config.get("scoring_func") or "softmax"
    if scoring != "softmax":
        raise NotImplementedError(f"{who}: scoring_func {scoring!r}, supported: softmax")
    for name in ("n_group", "topk_group"):
        if integer(config, name, who, 1, least=0) > 1:
            raise NotImplementedError(
                f"{who}: {name} {config[name]} (experts in groups) is not supported, wanted one "
                "softmax over all experts"
            )


def gdn_layers(config: Json, num_layers: int, who: str) -> tuple[int, ...]:
    """Ids of the Gated-DeltaNet layers, by `layer_types` or by `full_attention_interval`.

    Raises:
      NotImplementedError: another kind of layer, or no layer of full attention at all.
      ValueError: a list of another length.
    """
    kinds = items(config, "layer_types", who, str)
    if not kinds:
        every = integer(config, "full_attention_interval", who, _FULL_ATTENTION_INTERVAL, least=1)
        kinds = tuple(_LAYER_KINDS[(i + 1) % every != 0] for i in range(num_layers))
    unknown = sorted(set(kinds) - set(_LAYER_KINDS))
    if unknown:
        raise NotImplementedError(
            f"{who}: layer types {unknown} are not supported, wanted {' and '.join(_LAYER_KINDS)}"
        )
    if len(kinds) != num_layers:
        raise ValueError(f"{who}: {len(kinds)} layer_types for {num_layers} layers")
    found = tuple(i for i, kind in enumerate(kinds) if kind == "linear_attention")
    if len(found) == num_layers:
        raise NotImplementedError(
            f"{who}: a target without any full_attention layer is not supported"
        )
    return found


def moe_layers(config: Json, num_layers: int, who: str) -> tuple[int, ...]:
    """Ids of the layers with experts, by `mlp_only_layers` and `decoder_sparse_step`."""
    dense = items(config, "mlp_only_layers", who, int)
    every = integer(config, "decoder_sparse_step", who, 1, least=1)
    return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % every == 0)
