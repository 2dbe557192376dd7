"""Tiles of the attention kernel and its segments of keys, chosen by shapes: one table of figures.

NVIDIA H200, 2026-11-30, 16 query rows, 32/8 heads of 128 in bf16, pages of 64, cold inputs: us,
with the segments and their keys (lanes = sequences x kv heads; a..b = growing from a to b):

    lanes    1k keys           4k                32k
        8    8 x 128     9.1   16 x 256   14.6   128..1024    57
       64    4 x 256    22.0   4 x 1024   50.4   1024..8192  320
      256    1 x 1024   47.1   1 x 4096  157     1024..8192 1100

1k keys in a table for 32k are 8 x 128 too, 12.4. In another run one sequence of 1k or 4k keys took
9.9 or 15.2 with segments half as long, whose results take longer to fold, and 9.1 or 13.4 with
these; 32k keys took 55.3 with ones twice as long and 53.0 with these. Blocks of 64 keys, 4 warps
and 3 stages in all of them: 2 stages took 3 to 15 % longer, 8 warps 13 %. Other capacities and
lanes, f32, and head dims other than 128 have not been measured. Their tiles are sized by what
compiles for an H200 without spilling and leaves room for two programs a multiprocessor: a block of
K or V takes at most 16 KiB. With 16-bit heads of 128 that is 112 KiB of shared memory and 174
registers; a GPU with less than that (8.6, 8.9, 12.0 and generations that are not known) gets 2
stages, 80 KiB, and the same bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._launch import is_power_of_2, next_power_of_2, shared_memory

TILE_ROWS = 64  # rows of the dots: block_r query rows of all heads that share a kv head
_F32_TILE_ROWS = 16  # f32 dots are unrolled into multiply-adds, which 64 rows would make thousands
_MAX_BLOCK_R = 16
_BLOCK_BYTES = 16 * 1024
_MIN_SEGMENT = 128
_FOLDED = 16  # segments that are folded at once (`paged_attention`)
_FEW_KEYS = 512  # a program adds these in less time than more segments would take to fold
_PROGRAMS = 256  # about two for each of the 132 multiprocessors


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Tiles of the kernel. A row's bits depend on them, on nothing else that is chosen.

    block_r: query rows of a program; times the heads of a kv head they are the rows of its dots.
    block_s: keys of one step of its loop.
    first_segment, longest_segment: keys of the segments at position 0, and at most; multiples of
      block_s.
    """

    block_r: int
    block_s: int
    first_segment: int
    longest_segment: int
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        for name in self.__slots__:
            value = getattr(self, name)
            any_size = name == "num_stages"
            if not isinstance(value, int) or value < 1 or not (any_size or is_power_of_2(value)):
                raise ValueError(f"AttentionConfig: {name} is {value!r}, wanted a power of two")
        if not self.block_s <= self.first_segment <= self.longest_segment:
            raise ValueError(
                f"AttentionConfig: block_s {self.block_s}, first_segment {self.first_segment} and "
                f"longest_segment {self.longest_segment}, wanted none smaller than the one before"
            )


def attention_config(
    heads_per_kv_head: int, head_dim: int, itemsize: int, capacity: int, lanes: int
) -> AttentionConfig:
    """Choose tiles by shapes, and by no number of query rows.

    The longest segment leaves about 256 programs, at most 32 a lane and 16 where each has few keys.
    Where that is long, segments before it are shorter (`segments_of`), so that a context far below
    the capacity has some to share out: 1k keys in 32k are 8 of 128 for one sequence.
    """
    tile_rows = TILE_ROWS if itemsize == 2 else _F32_TILE_ROWS
    row_bytes = next_power_of_2(head_dim) * itemsize  # of one key
    keys = next_power_of_2(capacity)
    longest = max(
        _MIN_SEGMENT,
        next_power_of_2(keys * min(max(lanes, 8), _PROGRAMS) // _PROGRAMS),
        min(keys // _FOLDED, _FEW_KEYS),
    )
    is_uniform = longest <= 2 * _MIN_SEGMENT
    first = longest if is_uniform else max(_MIN_SEGMENT, next_power_of_2(16 * lanes))
    return AttentionConfig(
        block_r=max(1, min(_MAX_BLOCK_R, tile_rows // next_power_of_2(heads_per_kv_head))),
        block_s=max(16, min(64 if itemsize == 2 else 32, _BLOCK_BYTES // row_bytes)),
        first_segment=min(longest, first),
        longest_segment=longest,
        num_stages=3 if itemsize == 2 and row_bytes <= 256 and shared_memory() >= 112 else 2,
    )


class _Run(NamedTuple):
    """Consecutive segments of equal size, a power of two."""

    first: int  # index of the first of them
    start: int  # key that it starts at
    size: int


class Segments(NamedTuple):
    """Where segments lie: a few runs of them, so that a kernel needs no table in memory."""

    runs: tuple[_Run, ...]
    count: int

    def keys_of(self, segment) -> tuple[jax.Array, jax.Array]:
        """Return the first key of a segment (i32[]) and one past its last."""
        start = size = jnp.int32(0)
        for run in self.runs:
            here = segment >= run.first
            start = jnp.where(here, run.start + (segment - run.first) * run.size, start)
            size = jnp.where(here, run.size, size)
        return start, start + size

    def holding(self, key) -> jax.Array:
        """Return the segment (i32[]) that holds a key of the capacity."""
        segment = jnp.int32(0)
        for run in self.runs:
            inside = run.first + (key - run.start) // run.size
            segment = jnp.where(key >= run.start, inside, segment)
        return segment


def segments_of(capacity: int, config: AttentionConfig) -> Segments:
    """Cut `capacity` keys into segments.

    Each is at most a quarter of what lies before it, within the limits of `config`: a context of
    any length has its keys in several segments, and a long one is not cut into hundreds.
    """
    runs, count, end = [], 0, 0
    while end < capacity:
        quarter = next_power_of_2(end // 4 + 1) // 2  # rounded down to a power of two
        size = min(max(quarter, config.first_segment), config.longest_segment)
        if not runs or runs[-1].size != size:
            runs.append(_Run(count, end, size))
        count, end = count + 1, end + size
    return Segments(tuple(runs), count)
