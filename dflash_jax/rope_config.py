"""Rotary embeddings as checkpoints spell them: `rope_parameters`, or theta with `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dflash_jax.json_values import Json, flag, integer, mapping, number

_ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding of one model; formulas in `layers.rope_frequencies`.

    `attention_factor` multiplies cos and sin (YaRN); `original_context` is the length before
    scaling. `rotated` is the share of a head's dims that turn, the first ones; the others stay.
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    rotated: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        """Dims of a head that turn."""
        return int(head_dim * self.rotated)

    @staticmethod
    def from_hf(
        config: Json, *, default_theta: float, who: str, default_rotated: float | None = None
    ) -> RopeConfig:
        """Read `rope_parameters` (new) or `rope_theta` with `rope_scaling` (old).

        `mrope_section` and its order say which of three position streams a frequency reads; text
        has one, so they change nothing.

        Args:
          default_rotated: share of a head that turns where the config does not say, for families
            that turn a part of it; None: all of it, and nothing else is accepted.

        Raises:
          NotImplementedError: a rope type other than default, linear, llama3 or yarn.
          ValueError: a scaled type without its factor.
        """
        nested = mapping(config, "rope_parameters", who)
        scaling = {**mapping(config, "rope_scaling", who), **nested}
        by_layer = [name for name, value in scaling.items() if isinstance(value, Mapping)]
        if by_layer:
            raise NotImplementedError(
                f"{who}: rope parameters by layer type ({by_layer[0]}) are not supported"
            )
        theta = number(config, "rope_theta", who, default_theta, above=1.0)
        theta = number(scaling, "rope_theta", who, theta, above=1.0)
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if kind not in _ROPE_KINDS:
            raise NotImplementedError(
                f"{who}: rope type {kind!r} is not supported, wanted one of "
                f"{', '.join(_ROPE_KINDS)}"
            )
        rotated = _rotated(config, scaling, default_rotated, who)
        if kind == "default":
            return RopeConfig(theta=theta, rotated=rotated)
        if scaling.get("factor") is None:
            raise ValueError(f"{who}: rope type {kind!r} has no factor")
        factor = number(scaling, "factor", who, above=0.0)
        # linear divides every frequency and needs no original length
        original = 0
        for source, name in (
            (config, "max_position_embeddings"),
            (config, "original_max_position_embeddings"),
            (scaling, "original_max_position_embeddings"),
        ):
            original = integer(source, name, who, original, least=1)
        if kind in ("llama3", "yarn") and original < 1:
            raise ValueError(f"{who}: rope type {kind!r} has no original_max_position_embeddings")
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=factor,
            original_context=original,
            low_freq_factor=number(scaling, "low_freq_factor", who, 1.0, above=0.0),
            high_freq_factor=number(scaling, "high_freq_factor", who, 4.0, above=0.0),
            beta_fast=number(scaling, "beta_fast", who, 32.0, above=0.0),
            beta_slow=number(scaling, "beta_slow", who, 1.0, above=0.0),
            attention_factor=(
                _yarn_attention_factor(scaling, factor, who) if kind == "yarn" else 1.0
            ),
            truncate=flag(scaling, "truncate", who, True),
            rotated=rotated,
        )


def _rotated(config: Json, scaling: Json, default: float | None, who: str) -> float:
    """The share of a head that turns; what is below 1 only where the family has a default."""
    share = number(config, "partial_rotary_factor", who, 1.0 if default is None else default)
    share = number(scaling, "partial_rotary_factor", who, share)
    if default is None and share != 1.0:
        raise NotImplementedError(f"{who}: partial_rotary_factor below 1 is not supported")
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{who}: partial_rotary_factor is {share}, wanted above 0 and at most 1")
    dim = config.get("head_dim")
    if default is not None and isinstance(dim, int) and (dim * share < 2 or dim * share % 2):
        raise NotImplementedError(
            f"{who}: partial_rotary_factor {share} of head_dim {dim} is not a number of pairs"
        )
    return share


def _yarn_attention_factor(scaling: Json, factor: float, who: str) -> float:
    """YaRN's scale of cos and sin: given, or 0.1 ln(factor) + 1, or the ratio of two m-scales."""
    if scaling.get("attention_factor") is not None:
        return number(scaling, "attention_factor", who, above=0.0)

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own, all_dim = (number(scaling, name, who, 0.0) for name in ("mscale", "mscale_all_dim"))
    if own and all_dim:
        return mscale(own) / mscale(all_dim)
    return mscale(1.0)
