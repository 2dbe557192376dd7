"""dflash_jax: block-diffusion speculative decoding in JAX.

A target language model is decoded several tokens a step, losslessly, by a small drafter that
guesses a block in one pass. Names are resolved on first use: importing the package starts nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_jax.config import DraftConfig, TargetConfig
    from dflash_jax.drafters import (
        Proposal,
        no_drafter,
        oracle_drafter,
        prompt_lookup_drafter,
    )
    from dflash_jax.drafters.confidence import fit_temperatures, with_scheduler, with_threshold
    from dflash_jax.engine import generate, start, stream
    from dflash_jax.fixed import Fixed, plan
    from dflash_jax.loop import decode, decode_autoregressive, prefill, step
    from dflash_jax.options import DecodeOptions
    from dflash_jax.params import Params
    from dflash_jax.sampling import SamplingOptions
    from dflash_jax.scratch import DflashScratch, init_scratch
    from dflash_jax.state import Buffers, DecodeState, init_buffers, init_state
    from dflash_jax.stats import Stats
    from dflash_jax.tokenizer import load_tokenizer
    from dflash_jax.verify import Verification
    from dflash_jax.weight_layout import turn_weights
    from dflash_jax.weights import load_drafter, load_target

_HOME = {
    "config": ("DraftConfig", "TargetConfig"),
    "drafters": ("Proposal", "no_drafter", "oracle_drafter", "prompt_lookup_drafter"),
    "drafters.confidence": ("fit_temperatures", "with_scheduler", "with_threshold"),
    "engine": ("generate", "start", "stream"),
    "fixed": ("Fixed", "plan"),
    "loop": ("decode", "decode_autoregressive", "prefill", "step"),
    "options": ("DecodeOptions",),
    "params": ("Params",),
    "sampling": ("SamplingOptions",),
    "scratch": ("DflashScratch", "init_scratch"),
    "state": ("Buffers", "DecodeState", "init_buffers", "init_state"),
    "stats": ("Stats",),
    "tokenizer": ("load_tokenizer",),
    "verify": ("Verification",),
    "weight_layout": ("turn_weights",),
    "weights": ("load_drafter", "load_target"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Buffers",
    "DecodeOptions",
    "DecodeState",
    "DflashScratch",
    "DraftConfig",
    "Fixed",
    "Params",
    "Proposal",
    "SamplingOptions",
    "Stats",
    "TargetConfig",
    "Verification",
    "decode",
    "decode_autoregressive",
    "fit_temperatures",
    "generate",
    "init_buffers",
    "init_scratch",
    "init_state",
    "load_drafter",
    "load_target",
    "load_tokenizer",
    "no_drafter",
    "oracle_drafter",
    "plan",
    "prefill",
    "prompt_lookup_drafter",
    "start",
    "step",
    "stream",
    "turn_weights",
    "with_scheduler",
    "with_threshold",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dflash_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dflash_jax.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
