"""Tiles of the few-row matrix products, frozen by (in, out) of the weight, with what they measured.

Nothing is tuned at run time: equal shapes get equal tiles in every process, so a row keeps its
bits. All times are microseconds of 16 bf16 rows on one H200 with cold weights. Of a split product
they exclude the sum of its parts; XLA's include one small kernel that chains the calls.
"""

from dataclasses import dataclass
from typing import NamedTuple

_MAX_BLOCK_R = 64
_FEW_ROWS = 8
_PROGRAMS = 128  # about one for each multiprocessor of an H200
_MAX_PROGRAMS = 400  # more parts than this many programs only add work to the sum
SHORT_SUM = 2048  # columns of `in` up to which a program adds all of them
_STEPS = 3  # one less than the stages of a pipeline, so that all are under way at once
_SHARED_BYTES = 96 << 10  # of the pipeline's stages: what every GPU since Ampere has


@dataclass(frozen=True, slots=True)
class SkinnyMatmulConfig:
    """Tiles of one product.

    block_n, block_k: rows and columns of a weight tile. split_k: parts of the sum over `in`, each
    a program of its own, added in order. num_warps, num_stages: Triton's. num_sums: tiles of
    block_k that one step reads, each added to a sum of its own, since a tensor core's next addition
    to a sum waits for the one before; added in order in the end.
    """

    block_n: int = 64
    block_k: int = 64
    split_k: int = 1
    num_warps: int = 4
    num_stages: int = 4
    num_sums: int = 1


class Tuned(NamedTuple):
    """A measured choice, beside XLA's product."""

    config: SkinnyMatmulConfig
    kernel_us: float
    xla_us: float
    source: str


# Alone the kernels are about as fast as XLA's GEMMs. In a decode the order is clear: a cycle of
# Qwen3-8B shapes took 5.46 ms with XLA's products and 7.01 with these, batch 1, in one run.
_ALONE = "2026-11, JAX 0.11.2, each product alone; slower than XLA in a whole stack"
TUNED: dict[tuple[int, int], Tuned] = {
    (4096, 6144): Tuned(SkinnyMatmulConfig(64, 128, 2, 4, 4), 15.2, 17.8, _ALONE),
    (4096, 4096): Tuned(SkinnyMatmulConfig(64, 64, 4, 4, 6), 10.8, 12.6, _ALONE),
    (4096, 24576): Tuned(SkinnyMatmulConfig(64, 64, 1, 4, 6), 50.5, 53.4, _ALONE),
    (12288, 4096): Tuned(SkinnyMatmulConfig(64, 128, 4, 4, 4), 26.9, 30.6, _ALONE),
    (4096, 151936): Tuned(
        SkinnyMatmulConfig(64, 128, 1, 4, 4),
        361.1,
        347.6,
        "NVIDIA H200, 2026-11-30, JAX 0.11.2, f32 out, in one run",
    ),
}


def tiles_for(inner: int, out: int, itemsize: int) -> SkinnyMatmulConfig:
    """The tiles of a weight `[out, inner]`: measured ones, else by a rule of its sizes.

    The rule fills the device: a short sum by narrow tiles, since a second launch for its parts
    would cost more than it gains, a long one by parts. What few programs have to read is under way
    at once, in three steps. Not measured.
    """
    if (inner, out) in TUNED:
        return TUNED[inner, out].config
    if inner <= SHORT_SUM:
        block_n = 64
        while block_n > 16 and out < _PROGRAMS * block_n:
            block_n //= 2
        # Of more, three steps would not fit the memory of every GPU.
        num_sums = min(-(-inner // (_STEPS * 64)), 16 // itemsize) if block_n == 16 else 1
        return SkinnyMatmulConfig(block_n=block_n, num_sums=num_sums)
    blocks, split = -(-out // 64), 1
    while blocks * split < _PROGRAMS and 2 * blocks * split <= _MAX_PROGRAMS and split < 8:
        split *= 2
    return SkinnyMatmulConfig(split_k=split)


def rows_in_block(rows: int, inner: int, config: SkinnyMatmulConfig, *, has_norm: bool) -> int:
    """Rows a program takes, a power of two; Triton fills a tensor core's sixteen by itself.

    Eight where a step is long, for all steps to fit, and where a norm reads whole rows, for them to
    fit registers; whatever their number, since the order of a row's sum of squares follows from how
    a tile is spread over threads. Then few tiles of weights are read more often, from L2.
    """
    if config.num_sums > 1 or (has_norm and inner <= SHORT_SUM):
        return _FEW_ROWS
    return min(1 << (rows - 1).bit_length(), _MAX_BLOCK_R)


def stages_that_fit(config: SkinnyMatmulConfig, tile_rows: int, itemsize: int) -> int:
    """Pipeline stages, fewer than asked where `tile_rows` of x and weights fill the memory."""
    a_stage = tile_rows * config.block_k * config.num_sums * itemsize
    return max(1, min(config.num_stages, _SHARED_BYTES // a_stage))
