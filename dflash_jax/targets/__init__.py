"""Targets by architecture. `forward` is chosen by `params.config` at trace time."""

from dflash_jax.targets.qwen3 import TargetOutput, forward

__all__ = ["TargetOutput", "forward"]
