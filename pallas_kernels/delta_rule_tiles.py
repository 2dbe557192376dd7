"""The gated delta rule over the rows of a prompt, in tiles of 16 rows.

A prompt's rows are kept for certain, so they need not run one after another as a step's do in
`gated_delta_rows`: 16 at a time become products of matrices (spec/verify.md §3.1; Gated Delta
Networks, arXiv:2412.06464). With S [Dk, Dv] in front of a tile, q and k of length one, q scaled by
Dk**-0.5, and decay[i, j] = exp(sum of g behind row j up to row i), zero where i < j:

    T = (I + strictly lower(beta_i decay k_i k_j))^-1
    e = v - decay[i, first] k S                     what the values are off what S says
    o = decay[i, first] q S + (decay q_i k_j) T beta e
    S = decay[last, first] S + (decay[last] k)^T T beta e

Two launches. All that does not meet S is of the first one, a program for each tile of a head, and
goes to memory as two 16 x 16 matrices and four vectors. The second one carries `block_v` columns of
S through tile after tile, a warp each, and that chain is what takes the time: some 1,250 SASS
instructions a tile for an H200, 170 of them products, while the next tiles' rows are on their way.
A layer of Qwen3.8-27B (48 heads of 128) takes 0.99 ms for 4,096 rows on an H200, and 6.3 by XLA.

Products are of tensor cores and still of f32: an f32 is the sum of three bf16, a bf16 is itself,
and what queries and keys are multiplied by is multiplied afterwards. S is held transposed, since so
a product leaves in registers what the next one takes, without a trip through shared memory.

Tiles begin at row 0 of a call and are all alike, a row sees only those in front of it, and those
behind have weight zero: cut at multiples of 16, a prompt has the same bits in one call as in many.
"""

from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels._delta_rule import (
    NORM_EPS,
    check_rows,
    inverse_length,
    split_heads,
    unserved_dims,
)
from pallas_kernels._launch import check_shape, dispatch

CHUNK = 64  # rows of XLA's form, whose products are the larger the better
TILE = 16  # rows of the kernel; the smallest side of a product of tensor cores
_EXACT = lax.Precision.HIGHEST  # of f32 products, which a GPU would else round to TF32


@dataclass(frozen=True, slots=True)
class DeltaRuleTilesConfig:
    """block_v: columns of the state that one program holds in registers, all Dk rows of them.

    With three stages the rows of the next two tiles are fetched behind the products of this one.
    """

    block_v: int = 16
    num_warps: int = 1
    num_stages: int = 3


def delta_rule_tiles(
    qkv,
    g,
    beta,
    num_rows,
    state,
    *,
    num_key_heads: int,
    impl: str = "auto",
    config: DeltaRuleTilesConfig | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Run rows over a state, which keeps them all.

    Letters: B sequences, R rows, Hk and Hv heads of Dk and Dv dims. Value head h reads key head
    h // (Hv / Hk). The kernel serves dims of 16 to 256 that are powers of two.

    Args:
      qkv: bf16|f32[B, R, 2*Hk*Dk + Hv*Dv] queries, keys, values, after the convolution.
      g: f32[B, R, Hv] logarithm of each row's decay, at most 0.
      beta: f32[B, R, Hv] strength of each row's write.
      num_rows: i32[B] rows that exist; the outputs of the others are zeros.
      state: f32[B, Hv, Dk, Dv] before the first row.
      num_key_heads: Hk.
      impl: which implementation runs.
      config: tiles of the kernel.
    Returns:
      f32[B, R, Hv, Dv] outputs, and the state after the last row. A row that is not finite makes
      NaN of itself and of those behind it, in XLA's form of its whole chunk.
    """
    op = "delta_rule_tiles"
    check_rows(op, qkv, g, beta, num_rows, state, num_key_heads)
    check_shape(op, "state", state, (jnp.shape(qkv)[0], *jnp.shape(state)[1:]))
    key_dim, value_dim = state.shape[2:]
    config = config or DeltaRuleTilesConfig()
    return dispatch(
        op,
        impl,
        _by_kernel,
        delta_rule_tiles_xla,
        qkv,
        g,
        beta,
        num_rows,
        state,
        unserved=unserved_dims(op, config.block_v, key_dim, value_dim, least=TILE),
        num_key_heads=num_key_heads,
        config=config,
    )


@partial(jax.jit, static_argnames=("num_key_heads", "config", "interpret"))
def _by_kernel(
    qkv, g, beta, num_rows, state, *, num_key_heads, config, interpret
) -> tuple[jax.Array, jax.Array]:
    """Launch a program for each tile of a head, then one for each block of columns of a state."""
    batch, rows = qkv.shape[:2]
    _, heads, key_dim, value_dim = state.shape
    block_v = min(config.block_v, value_dim)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    tiles = pl.cdiv(rows, TILE)
    products, scales = pl.pallas_call(
        partial(_tiles_kernel, num_key_heads=num_key_heads, key_dim=key_dim),
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, tiles, 6, TILE, TILE), jnp.bfloat16),
            jax.ShapeDtypeStruct((batch, heads, tiles, 4, TILE), jnp.float32),
        ],
        grid=(tiles, heads, batch),
        in_specs=[whole] * 4,
        out_specs=[whole] * 2,
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="delta_rule_tiles",
    )(num_rows, qkv, g, beta)
    out, state = pl.pallas_call(
        partial(_rows_kernel, num_key_heads=num_key_heads, block_v=block_v),
        out_shape=[
            jax.ShapeDtypeStruct((batch, rows, heads, value_dim), jnp.float32),
            jax.ShapeDtypeStruct(state.shape, state.dtype),
        ],
        grid=(value_dim // block_v, heads, batch),
        in_specs=[whole] * 5,
        out_specs=[whole] * 2,
        input_output_aliases={4: 1},
        compiler_params=plgpu.CompilerParams(
            num_warps=config.num_warps, num_stages=config.num_stages
        ),
        interpret=interpret,
        name="delta_rule_rows",
    )(num_rows, qkv, products, scales, state)
    return out, state


def _parts(x):
    """bf16 pieces of x whose sum it is: itself, or three times eight bits of an f32.

    Cut by a mask and not by a conversion, which a compiler may leave out together with its inverse.
    """
    if x.dtype == jnp.bfloat16:
        return (x,)
    pieces, rest = [], x.astype(jnp.float32)
    for _ in range(2):
        bits = lax.bitcast_convert_type(rest, jnp.int32) & jnp.int32(-65536)
        piece = lax.bitcast_convert_type(bits, jnp.float32)
        rest = rest - piece
        pieces.append(piece.astype(jnp.bfloat16))
    return (*pieces, rest.astype(jnp.bfloat16))


def _transposed(parts):
    return tuple(x.T for x in parts)


def _product(a, b):
    """a @ b of parts, f32: the smallest terms first, those below f32 left out."""
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < 3]
    pairs.sort(key=sum, reverse=True)
    contract = (((1,), (0,)), ((), ()))
    terms = [
        lax.dot_general(a[i], b[j], contract, preferred_element_type=jnp.float32) for i, j in pairs
    ]
    half = len(terms) // 2  # a term waits for the one before it in the same sum
    return reduce(jnp.add, [reduce(jnp.add, x) for x in (terms[:half], terms[half:]) if x])


def _places():
    """i32[16, 1] and [1, 16] places in a tile."""
    place = jnp.arange(TILE, dtype=jnp.int32)
    return place[:, None], place[None, :]


def _inverse(a):
    """(I + a)^-1 of a strictly lower a f32[16, 16], from diagonal blocks to ones twice their size.

    The product of I - a, I + a^2, I + a^4 and so on would lose all digits where keys repeat.
    """
    row, column = _places()
    pieces = _parts(a)

    def corner(x, size):
        """x in diagonal blocks of a size, but not in those of half of it."""
        half = size // 2
        there = (row // size == column // size) & (row // half != column // half)
        return jnp.where(there, x, jnp.zeros_like(x))

    inverse = jnp.where(row == column, 1.0, 0.0) - corner(a, 2)
    for size in (4, 8, 16):
        parts = _parts(inverse)
        below = _product(parts, tuple(corner(x, size) for x in pieces))
        inverse -= _product(_parts(below), parts)
    return inverse


def _tiles_kernel(
    num_rows_ref,  # i32[B]
    qkv_ref,  # [B, R, 2*Hk*Dk + Hv*Dv]
    g_ref,  # f32[B, R, Hv]
    beta_ref,  # f32[B, R, Hv]
    products_ref,  # out bf16[B, Hv, T, 6, 16, 16]
    scales_ref,  # out f32[B, Hv, T, 4, 16]
    *,
    num_key_heads,
    key_dim,
):
    """One tile of one head: all that does not depend on the state."""
    t, head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row, other = _places()
    count = num_rows_ref[b]

    @pl.when(t * TILE < count)
    def _():
        index = t * TILE + jnp.arange(TILE, dtype=jnp.int32)
        there = index < count
        key_head = head // (g_ref.shape[2] // num_key_heads)
        channel = (key_head * key_dim + jnp.arange(key_dim, dtype=jnp.int32))[None, :]

        def read(channel):
            mask = jnp.broadcast_to(there[:, None], (TILE, key_dim))
            return plgpu.load(qkv_ref.at[b, index[:, None], channel], mask=mask, other=0.0)

        q, k = read(channel), read(num_key_heads * key_dim + channel)
        g = plgpu.load(g_ref.at[b, index, head], mask=there, other=0.0)
        beta = plgpu.load(beta_ref.at[b, index, head], mask=there, other=0.0)
        k_parts, q_parts = _parts(k), _parts(q)
        k_of_k = _product(k_parts, _transposed(k_parts))  # [16, 16]
        q_of_k = _product(q_parts, _transposed(k_parts))
        q_of_q = _product(q_parts, _transposed(q_parts))
        own = lambda x, axis: jnp.sum(jnp.where(row == other, x, 0.0), axis=axis)
        over_length = lambda square: lax.rsqrt(square + NORM_EPS)
        q_scale = over_length(own(q_of_q, 1)) * key_dim**-0.5

        # What a row that is not finite leaves in products with rows in front of it is cut out: in
        # products of rows with rows that is its row and its column.
        def finite(axis):
            """By the axis that is left of two: who is fine, and length, g, beta of those."""
            square = own(k_of_k, axis)
            is_fine = jnp.abs(square + g + beta) < jnp.inf
            return is_fine, *(jnp.where(is_fine, x, 0.0) for x in (over_length(square), g, beta))

        fine, k_scale, g_i, beta_i = finite(1)
        fine_j, k_scale_j, g_j, beta_j = (x[None, :] for x in finite(0))

        # Logarithms of decays, as sums of the rows between: no difference of two sums is as exact.
        lower = jnp.where(other <= row, 1.0, 0.0).astype(jnp.bfloat16)
        gap = _product((lower,), _parts(jnp.where(row > other, g_i[:, None], 0.0)))
        until = jnp.exp(jnp.sum(jnp.where(other <= row, g_j, 0.0), axis=1))
        behind = jnp.exp(jnp.sum(jnp.where(other > row, g_j, 0.0), axis=1))
        total = jnp.exp(jnp.sum(jnp.broadcast_to(g_j, (TILE, TILE)), axis=1))
        decay = jnp.where(other <= row, jnp.exp(gap), 0.0) * k_scale_j
        strict = jnp.where((other < row) & fine[:, None] & fine_j, k_of_k, 0.0)
        inverse = _inverse(strict * decay * (beta_i * k_scale)[:, None]) * beta_j
        attention = jnp.where(fine_j, q_of_k, 0.0) * decay * q_scale[:, None]
        to_out = _product(_parts(attention), _parts(inverse))
        to_state = inverse * (behind * k_scale)[:, None]
        for i, x in enumerate((*_parts(to_out), *_parts(to_state))):
            plgpu.store(products_ref.at[b, head, t, i, row, other], x)
        is_bad = jnp.where(fine, 0.0, 1.0)
        for i, x in enumerate((until * k_scale, until * q_scale, total, is_bad)):
            plgpu.store(scales_ref.at[b, head, t, i, row[:, 0]], x)


def _rows_kernel(
    num_rows_ref,  # i32[B]
    qkv_ref,  # [B, R, 2*Hk*Dk + Hv*Dv]
    products_ref,  # bf16[B, Hv, T, 6, 16, 16]
    scales_ref,  # f32[B, Hv, T, 4, 16]
    _state_in_ref,  # the memory of state_ref
    out_ref,  # out f32[B, R, Hv, Dv]
    state_ref,  # out f32[B, Hv, Dk, Dv]
    *,
    num_key_heads,
    block_v,
):
    """block_v columns of one head's state through tile after tile."""
    block, head, b = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    _, heads, key_dim, value_dim = state_ref.shape
    key_width = num_key_heads * key_dim
    key_column = jnp.arange(key_dim, dtype=jnp.int32)[None, :]
    column = (block * block_v + jnp.arange(block_v, dtype=jnp.int32))[:, None]
    q_channel = (head // (heads // num_key_heads)) * key_dim + key_column
    v_channel = 2 * key_width + head * value_dim + column
    row, other = _places()
    count = num_rows_ref[b]
    # The state is held transposed, [block_v, Dk]: as a product leaves it, so the next one takes it.
    state_at = state_ref.at[b, head, key_column, column]

    def one_tile(t, state):
        index = t * TILE + jnp.arange(TILE, dtype=jnp.int32)

        def read(channel, axis):
            at = jnp.expand_dims(index, 1 - axis)
            mask = jnp.broadcast_to(at < count, jnp.broadcast_shapes(at.shape, channel.shape))
            return plgpu.load(qkv_ref.at[b, at, channel], mask=mask, other=0.0)

        q, k, v = read(q_channel, 0), read(key_width + q_channel, 0), read(v_channel, 1)
        products = [plgpu.load(products_ref.at[b, head, t, i, row, other]) for i in range(6)]
        scale = lambda i: plgpu.load(scales_ref.at[b, head, t, i, other])  # [1, 16]
        k_parts, state_parts = _parts(k), _parts(state)
        of_keys = _product(state_parts, _transposed(k_parts))  # [block_v, 16]
        of_queries = _product(state_parts, _transposed(_parts(q)))
        v = v.astype(jnp.float32)
        fine = (scale(3) == 0.0) & (jnp.abs(v) < jnp.inf)
        error = _parts(jnp.where(fine, v - scale(0) * of_keys, 0.0))
        out = scale(1) * of_queries + _product(error, _transposed(products[:3]))
        upper = jnp.where(row <= other, 1.0, 0.0).astype(jnp.bfloat16)
        num_bad = _product((jnp.where(fine, 0.0, 1.0).astype(jnp.bfloat16),), (upper,))
        at = index[None, :]
        plgpu.store(
            out_ref.at[b, at, head, column],
            jnp.where(num_bad > 0, jnp.nan, out),
            mask=jnp.broadcast_to(at < count, out.shape),
        )
        is_bad = jnp.max(num_bad, axis=1)[:, None] > 0
        kept = jnp.where(is_bad, jnp.nan, jnp.max(scale(2), axis=1)[:, None])
        update = _product(error, _transposed(products[3:]))
        return state * kept + _product(_parts(update), k_parts)

    state = plgpu.load(state_at)
    state = lax.fori_loop(0, pl.cdiv(count, TILE), one_tile, state)
    plgpu.store(state_at, state)

    def no_row(i, carry):
        plgpu.store(out_ref.at[b, i, head, column[:, 0]], jnp.zeros((block_v,), jnp.float32))
        return carry

    lax.fori_loop(count, out_ref.shape[1], no_row, 0)


def delta_rule_tiles_xla(
    qkv, g, beta, num_rows, state, *, num_key_heads, config=None
) -> tuple[jax.Array, jax.Array]:
    """`delta_rule_tiles` in chunks of 64."""
    del config  # tiles of the kernel
    heads, key_dim, value_dim = state.shape[1:]
    mixed = qkv.astype(jnp.float32)
    q, k, v = split_heads(mixed, num_key_heads, heads, key_dim, value_dim)
    q, k = q * (inverse_length(q) * key_dim**-0.5), k * inverse_length(k)
    is_row = jnp.arange(qkv.shape[1], dtype=jnp.int32)[None] < num_rows[:, None]
    return chunked_delta_rule(q, k, v, g, beta, state, is_row)


def chunked_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    is_row: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The gated delta rule over whole sequences, CHUNK rows at a time.

    Args:
      q, k: f32[B, T, Hv, Dk] of length one, q scaled.
      v: f32[B, T, Hv, Dv].
      g, beta: f32[B, T, Hv].
      state: f32[B, Hv, Dk, Dv] before the first row.
      is_row: bool[B, T]; what does not exist changes nothing.
    Returns:
      out f32[B, T, Hv, Dv], and the state after the last row.
    """
    batch, count = is_row.shape
    size = min(CHUNK, count)
    pad = -count % size

    def in_chunks(x: jax.Array) -> jax.Array:
        """[B, T, Hv, ...] -> [chunks, B, Hv, size, ...], with zeros where there is no row."""
        there = is_row.reshape(batch, count, *(1,) * (x.ndim - 2))
        x = jnp.where(there, x, jnp.zeros_like(x))
        x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(batch, -1, size, *x.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(x, 1, 0), 3, 2)

    def one(state: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta = chunk
        out, state = _chunk(q, k, v, g, beta, state)
        return state, out

    state, out = lax.scan(one, state, tuple(map(in_chunks, (q, k, v, g, beta))))
    out = jnp.moveaxis(jnp.moveaxis(out, 2, 3), 0, 1)  # [B, chunks, size, Hv, Dv]
    return out.reshape(batch, count + pad, *out.shape[3:])[:, :count], state


def _chunk(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One chunk of C rows: q, k [B, H, C, Dk], v [B, H, C, Dv], g, beta [B, H, C].

    The corrections e solve a triangular system, by substitution: its inverse as a product of
    powers loses all digits where keys repeat, as they do in a prompt that repeats a word.
    """
    rows = q.shape[2]
    total = jnp.cumsum(g, axis=2)  # [B, H, C] logarithm of the decay up to each row
    is_past = jnp.tri(rows, dtype=bool)[None, None]
    gap = jnp.where(is_past, total[..., :, None] - total[..., None, :], -jnp.inf)
    decay = jnp.exp(gap)  # [B, H, C, C], zero for rows that come later
    weighted = beta[..., None] * k
    lower = _dot("bhik,bhjk->bhij", weighted, k) * jnp.where(
        jnp.tri(rows, k=-1, dtype=bool)[None, None], decay, jnp.zeros_like(decay)
    )
    grown = jnp.exp(total)[..., None]
    right = jnp.concatenate([beta[..., None] * v, weighted * grown], axis=3)
    unit = lower + jnp.eye(rows, dtype=lower.dtype)[None, None]
    solved = lax.linalg.triangular_solve(
        unit, right, left_side=True, lower=True, unit_diagonal=True
    )
    values, keys = solved[..., : v.shape[3]], solved[..., v.shape[3] :]
    errors = values - _dot("bhik,bhkv->bhiv", keys, state)  # [B, H, C, Dv]
    scores = _dot("bhik,bhjk->bhij", q, k) * decay
    out = _dot("bhik,bhkv->bhiv", q * grown, state) + _dot("bhij,bhjv->bhiv", scores, errors)
    left = jnp.exp(total[..., -1:] - total)[..., None]  # decay from each row to the chunk's end
    state = state * grown[:, :, -1:] + _dot("bhik,bhiv->bhkv", k * left, errors)
    return out, state


def _dot(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=_EXACT, preferred_element_type=jnp.float32)
