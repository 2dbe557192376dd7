"""Few-row ops of block-diffusion decoding: one op a name, `impl` picks its implementation.

Every op is a pure function of arrays whose row bits depend on that row's inputs and on static
shapes only, so that a token decodes to the same bits whatever shares its batch.
"""

from pallas_kernels._attention_tiles import AttentionConfig, attention_config
from pallas_kernels._launch import IMPLS, MASK_VALUE, check_impl
from pallas_kernels._skinny_tiles import SkinnyMatmulConfig
from pallas_kernels.delta_rule_tiles import (
    DeltaRuleTilesConfig,
    delta_rule_tiles,
    delta_rule_tiles_xla,
)
from pallas_kernels.dynamic_conv import dynamic_conv, dynamic_conv_xla
from pallas_kernels.gated_delta_rows import (
    GatedDeltaRowsConfig,
    gated_delta_rows,
    gated_delta_rows_xla,
)
from pallas_kernels.greedy_rows import GreedyRows, argmax_rows, greedy_rows, greedy_rows_xla
from pallas_kernels.markov_argmax import MarkovArgmax, markov_argmax, markov_argmax_xla
from pallas_kernels.norm_rope_cache import NormRopeCache, norm_rope_cache, norm_rope_cache_xla
from pallas_kernels.paged_attention import paged_attention, paged_attention_xla
from pallas_kernels.reshape_and_cache import reshape_and_cache, reshape_and_cache_xla
from pallas_kernels.selector_walk import (
    selector_walk,
    selector_walk_sampled,
    selector_walk_xla,
)
from pallas_kernels.skinny_matmul import (
    skinny_matmul,
    skinny_matmul_swiglu,
    skinny_matmul_swiglu_xla,
    skinny_matmul_xla,
)
from pallas_kernels.top16_selector import CANDIDATES, top16, top16_xla

__all__ = [
    "CANDIDATES",
    "DeltaRuleTilesConfig",
    "GatedDeltaRowsConfig",
    "GreedyRows",
    "IMPLS",
    "MASK_VALUE",
    "MarkovArgmax",
    "AttentionConfig",
    "NormRopeCache",
    "SkinnyMatmulConfig",
    "argmax_rows",
    "attention_config",
    "check_impl",
    "delta_rule_tiles",
    "delta_rule_tiles_xla",
    "dynamic_conv",
    "dynamic_conv_xla",
    "gated_delta_rows",
    "gated_delta_rows_xla",
    "greedy_rows",
    "greedy_rows_xla",
    "markov_argmax",
    "markov_argmax_xla",
    "norm_rope_cache",
    "norm_rope_cache_xla",
    "paged_attention",
    "paged_attention_xla",
    "reshape_and_cache",
    "reshape_and_cache_xla",
    "selector_walk",
    "selector_walk_sampled",
    "selector_walk_xla",
    "skinny_matmul",
    "skinny_matmul_swiglu",
    "skinny_matmul_swiglu_xla",
    "skinny_matmul_xla",
    "top16",
    "top16_xla",
]
