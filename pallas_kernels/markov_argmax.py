"""The best token of one row of DSpark's chain: base logits plus a Markov bias, never written out.

A row's logits are its base logits plus `code @ out.T`, the bias that the token before it adds
(spec/drafters.md §5.1). Order is `greedy_rows`': larger value first, equal values by lower token
id, NaN as minus infinity.

Pass 1 has a program for each tile of the vocabulary, which reads its rows of `out` once, sums over
the rank in f32, adds the base logits and leaves the tile's maximum and where it first stands; pass
2 has a program a sequence, which puts the tiles together. The base logits are read where they
stand among the block's rows, so that no row is cut out beforehand. The bias can be asked for: it
costs a write of f32[B, V], 0.14 us a sequence at 151,936 columns and 4.37 TB/s.

Limits: up to 4,096 tiles, 1,048,576 columns; a kernel reads `out` once for every 64 sequences.
151,936 x 256 bf16 and one row of base logits are 78.4 MB, 17.9 us at 4.37 TB/s. On an H200 a row
takes 25.7 us in a chain, with the second launch; a product, a sum and a search by XLA 31.6.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._launch import (
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    dispatch,
    dot_precision,
    is_power_of_2,
    next_power_of_2,
)
from pallas_kernels._skinny_tiles import SkinnyMatmulConfig, rows_in_block, stages_that_fit
from pallas_kernels.greedy_rows import ordered
from pallas_kernels.skinny_matmul import skinny_matmul_xla

_MAX_TILES = 4096
_MIN_BLOCK_B = 8  # fewer rows of `code` are not copied asynchronously, and each step waits for them
_NO_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class MarkovArgmaxConfig:
    """Rows of `out` and columns of it a step that a program takes.

    Fewer and larger programs than a head's product likes: seven rows of 151,936 x 256 one after
    another took 190 us on an H200, by 128 rows of `out` 203.
    """

    block_v: int = 256
    block_k: int = 64
    num_warps: int = 4
    num_stages: int = 4


class MarkovArgmax(NamedTuple):
    """One entry a sequence."""

    ids: jax.Array  # i32[B] the best token
    bias: jax.Array | None  # f32[B, V] of all columns, if asked for


def markov_argmax(
    base,
    code,
    out,
    row=0,
    *,
    vocab: int | None = None,
    with_bias: bool = False,
    impl: str = "auto",
    config: MarkovArgmaxConfig | None = None,
) -> MarkovArgmax:
    """Choose the best token of `base[:, row] + code @ out.T` for each sequence.

    Args:
      base: f32[B, J, V] base logits of a block's rows.
      code: float[B, rank] what the tokens before the row say.
      out: [V, rank] in the dtype of `code`, the Markov head's output.
      row: i32[], which of the rows; inside a program one kernel serves all of them.
      vocab: tokens that exist, if columns from there on are padding; those are never chosen.
      with_bias: whether to return the bias as well.
      impl: which implementation runs.
      config: tiles of the kernel.
    """
    op = "markov_argmax"
    batch, rows, columns = check_rank(op, "base", base, "B J V")
    check_dtype(op, "base", base, jnp.float32)
    rank = check_rank(op, "code", code, "B rank")[1]
    check_shape(op, "code", code, (batch, rank))
    check_shape(op, "out", out, (columns, rank))
    check_float(op, code=code)
    check_dtype(op, "out", out, jnp.result_type(code))
    vocab = columns if vocab is None else vocab
    if not 1 <= vocab <= columns:
        raise ValueError(f"{op}: vocab is {vocab}, wanted 1 to the {columns} columns of base")
    if isinstance(row, int) and not 0 <= row < rows:
        raise ValueError(f"{op}: row is {row}, wanted 0 to {rows - 1}, a row of base")
    config = config or MarkovArgmaxConfig()
    for name in ("block_v", "block_k"):
        size = getattr(config, name)
        if size < 16 or not is_power_of_2(size):
            raise ValueError(f"{op}: config.{name} is {size}, wanted a power of two from 16")
    unserved = None
    if -(-columns // config.block_v) > _MAX_TILES:
        most = _MAX_TILES * config.block_v
        unserved = f"has no kernel for {columns} columns, only for up to {most}"
    row = np.int32(row) if isinstance(row, int) else row
    static = {"vocab": vocab, "with_bias": with_bias}
    kernel = partial(_markov_argmax_pallas, config=config)
    arrays = (base, code, out, row)
    return dispatch(op, impl, kernel, markov_argmax_xla, *arrays, unserved=unserved, **static)


def markov_argmax_xla(base, code, out, row, *, vocab: int, with_bias: bool) -> MarkovArgmax:
    """`markov_argmax` as a product, a sum and a search."""
    bias = skinny_matmul_xla(code, out, out_dtype=jnp.float32)
    logits = lax.dynamic_index_in_dim(base, row, axis=1, keepdims=False) + bias
    ids = lax.argmax(ordered(logits[:, :vocab]), 1, jnp.int32)
    return MarkovArgmax(ids, bias if with_bias else None)


def _tile_kernel(
    row_ref,  # i32[1]
    base_ref,  # f32[B, J, V]
    code_ref,  # [B, rank]
    out_ref,  # [V, rank]
    best_ref,  # f32[B, tiles]
    at_ref,  # i32[B, tiles]
    *bias_ref,  # f32[B, V], if asked for
    vocab: int,
    block_b: int,
    block_k: int,
    config: MarkovArgmaxConfig,
):
    """Reduce a tile of the vocabulary for a block of sequences."""
    tile, block = pl.program_id(0), pl.program_id(1)
    batch, rank = code_ref.shape
    columns = out_ref.shape[0]
    # Past an end they are the last one again: equal bits stored twice, and no other maximum.
    seqs = block * block_b + jnp.arange(block_b, dtype=jnp.int32)
    seqs = jnp.minimum(seqs, batch - 1) if batch % block_b else seqs
    ids = tile * config.block_v + jnp.arange(config.block_v, dtype=jnp.int32)
    ids = jnp.minimum(ids, columns - 1) if columns % config.block_v else ids
    row = plgpu.load(row_ref.at[jnp.int32(0)])
    base = plgpu.load(base_ref.at[seqs[:, None], row, ids[None, :]])

    def load(ref, lines, k):
        at = ref.at[lines[:, None], k[None, :]]
        if rank % block_k == 0:
            return plgpu.load(at)
        return plgpu.load(at, mask=jnp.broadcast_to(k < rank, (lines.size, k.size)), other=0)

    def step(i, acc):
        k = i * block_k + jnp.arange(block_k, dtype=jnp.int32)
        code, out = load(code_ref, seqs, k), load(out_ref, ids, k)
        return acc + plgpu.dot(code, out, trans_b=True, precision=dot_precision(code.dtype))

    zero = jnp.zeros((block_b, config.block_v), jnp.float32)
    bias = lax.fori_loop(0, pl.cdiv(rank, block_k), step, zero)
    if bias_ref:
        plgpu.store(bias_ref[0].at[seqs[:, None], ids[None, :]], bias)
    values = jnp.where((ids < vocab)[None, :], ordered(base + bias), -jnp.inf)
    best = jnp.max(values, axis=1)
    plgpu.store(best_ref.at[seqs, tile], best)
    at = jnp.where(values == best[:, None], ids[None, :], _NO_ID)
    plgpu.store(at_ref.at[seqs, tile], jnp.min(at, axis=1))


def _join_kernel(
    best_ref,  # f32[B, tiles]
    at_ref,  # i32[B, tiles]
    ids_ref,  # i32[B]
):
    """Put one sequence's tiles together."""
    seq = pl.program_id(0)
    tiles = best_ref.shape[1]
    tile = jnp.arange(next_power_of_2(tiles), dtype=jnp.int32)
    load = lambda ref, other: plgpu.load(ref.at[seq, tile], mask=tile < tiles, other=other)
    best = load(best_ref, -jnp.inf)
    at = jnp.where(best == jnp.max(best), load(at_ref, _NO_ID), _NO_ID)
    plgpu.store(ids_ref.at[seq], jnp.min(at))


@partial(jax.jit, static_argnames=("vocab", "with_bias", "config", "interpret"))
def _markov_argmax_pallas(
    base, code, out, row, *, vocab: int, with_bias: bool, config: MarkovArgmaxConfig, interpret
) -> MarkovArgmax:
    """`markov_argmax` in two launches."""
    (batch, rank), columns = code.shape, out.shape[0]
    tiles = -(-columns // config.block_v)
    block_k = min(config.block_k, max(16, next_power_of_2(rank)))
    asked = SkinnyMatmulConfig(block_k=block_k, num_stages=config.num_stages)
    block_b = max(_MIN_BLOCK_B, rows_in_block(batch, rank, asked, has_norm=False))
    stages = stages_that_fit(asked, block_b + config.block_v, code.dtype.itemsize)
    part = lambda dtype: jax.ShapeDtypeStruct((batch, tiles), dtype)
    bias_shape = [jax.ShapeDtypeStruct((batch, columns), jnp.float32)] if with_bias else []
    sizes = {"vocab": vocab, "block_b": block_b, "block_k": block_k, "config": config}
    best, at, *bias = pl.pallas_call(
        partial(_tile_kernel, **sizes),
        out_shape=[part(jnp.float32), part(jnp.int32), *bias_shape],
        grid=(tiles, -(-batch // block_b)),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=stages),
        interpret=interpret,
        name="markov_argmax_tiles",
    )(row.reshape(1), base, code, out)
    ids = pl.pallas_call(
        _join_kernel,
        out_shape=jax.ShapeDtypeStruct((batch,), jnp.int32),
        grid=(batch,),
        compiler_params=plgpu.CompilerParams(num_warps=4),
        interpret=interpret,
        name="markov_argmax_join",
    )(best, at)
    return MarkovArgmax(ids, bias[0] if bias else None)
