"""`paged_attention` in plain jnp: the form that runs where there is no kernel.

Few rows (decode, verify) attend in one shot over the whole static capacity. Many rows (prefill)
go through segments of keys at absolute positions with an online softmax (Milakov and Gimelshein,
2018); segments that no row can see are skipped, with the bits of masking them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._launch import MASK_VALUE, dot_precision

_ONE_SHOT_ROWS = 64  # above this the scores of the whole capacity would be the largest array
_SEGMENT_KEYS = 1024  # keys a step of the segmented form reads, at least one page


def paged_attention_xla(
    q, k_pool, v_pool, block_table, args, is_causal: bool, window: int | None, scale: float
) -> jax.Array:
    """`paged_attention` by gathering pages, in one shot or by segments as R asks."""
    b, r, h, d = q.shape
    kv_heads, page_size = k_pool.shape[1:3]
    kv_len = args[:, 0].astype(jnp.int32)
    row_pos = args[:, 1].astype(jnp.int32)[:, None] + jnp.arange(r, dtype=jnp.int32)[None]  # [B, R]
    # All rows and heads that share a kv head are the rows of one matrix; G = H // K.
    q_bkrgd = q.reshape(b, r, kv_heads, h // kv_heads, d).transpose(0, 2, 1, 3, 4)
    # Keys before this are out of every row's window: zeroed when read, as they are masked.
    oldest = jnp.zeros_like(kv_len) if window is None else row_pos[:, 0] - window + 1

    def attend(table, first_key):
        """Return (m, l, acc) of all rows over the keys of the pages in `table`."""
        keys = (oldest, kv_len)
        k, v, exists, key_pos = _read_pages(k_pool, v_pool, table, first_key, keys, q.dtype)
        ahead = key_pos[None, None] - row_pos[:, :, None]
        sees = exists[:, None] & in_reach(ahead, is_causal, window)  # [B, R, S]
        return _softmax_over(q_bkrgd, k, v, sees[:, None, :, None], scale)

    if r <= _ONE_SHOT_ROWS:
        _, l, acc = attend(block_table, 0)
    else:
        pages_a_step = max(1, min(_SEGMENT_KEYS // page_size, block_table.shape[1]))
        bounds = _segment_bounds(row_pos, kv_len, is_causal, window, pages_a_step * page_size)
        _, l, acc = _by_segments(
            attend, block_table, pages_a_step, page_size, bounds, q_bkrgd.shape
        )
    out = acc / jnp.where(l == 0, 1.0, l)  # a row that sees no key has acc = 0
    return out.transpose(0, 2, 1, 3, 4).reshape(b, r, h, d).astype(q.dtype)


def _read_pages(k_pool, v_pool, table, first_key, keys_between, dtype):
    """Gather pages as [B, K, S, D], zero where no key exists or lies outside `keys_between`.

    `keys_between` is (first, one past the last), i32[B] each.
    Returns k, v, which keys remain bool[B, S], and their positions i32[S].
    """
    b, pages = table.shape
    kv_heads, page_size, d = k_pool.shape[1:]
    keys = pages * page_size
    key_pos = first_key + jnp.arange(keys, dtype=jnp.int32)
    has_page = jnp.broadcast_to((table >= 0)[:, :, None], (b, pages, page_size)).reshape(b, keys)
    first, end = keys_between
    exists = has_page & (key_pos[None] >= first[:, None]) & (key_pos[None] < end[:, None])  # [B, S]
    # Indexing (page, kv head) lets the gather write [B, K, S, D], the layout of both dots.
    page = jnp.maximum(table, 0)[:, None, :]  # [B, 1, P]
    head = jnp.arange(kv_heads, dtype=jnp.int32)[None, :, None]  # [1, K, 1]

    def read(pool):
        at = pool.at[page, head]
        rows = at.get(mode="promise_in_bounds", wrap_negative_indices=False)
        rows = rows.reshape(b, kv_heads, keys, d).astype(dtype)
        return jnp.where(exists[:, None, :, None], rows, jnp.zeros((), dtype))

    return read(k_pool), read(v_pool), exists, key_pos


def in_reach(ahead, is_causal: bool, window: int | None):
    """Return whether the mask lets a row see a key that lies `ahead` positions after it."""
    reach = ahead <= 0 if is_causal else jnp.ones_like(ahead, bool)
    if window is not None:
        reach &= -ahead < window
        if not is_causal:
            reach &= ahead < window
    return reach


def _softmax_over(q, k, v, sees, scale):
    """Return the maximum m, the sum l (both f32[B, K, R, G, 1]) and acc f32[B, K, R, G, D]."""
    dot = partial(jnp.einsum, precision=dot_precision(q.dtype), preferred_element_type=jnp.float32)
    scores = jnp.where(sees, dot("bkrgd,bksd->bkrgs", q, k) * scale, MASK_VALUE)
    m = jnp.max(scores, axis=-1, keepdims=True)
    # The second mask is for rows that see nothing, where exp(MASK_VALUE - m) is 1.
    p = jnp.where(sees, jnp.exp(scores - m), 0.0)
    l = jnp.sum(p, axis=-1, keepdims=True)
    return m, l, dot("bkrgs,bksd->bkrgd", p.astype(v.dtype), v)


def _segment_bounds(row_pos, kv_len, is_causal: bool, window: int | None, segment: int):
    """Return the first and one past the last segment that holds a key any row can see."""
    last = kv_len
    if is_causal:
        last = jnp.minimum(last, row_pos[:, -1] + 1)
    elif window is not None:
        last = jnp.minimum(last, row_pos[:, -1] + window)
    first = jnp.zeros_like(last)
    if window is not None:
        first = jnp.maximum(first, row_pos[:, 0] - window + 1)
    end = jnp.max(last) + (segment - 1)
    return lax.div(jnp.min(first), segment), lax.div(end, segment)


def _by_segments(attend, table, pages_a_step: int, page_size: int, bounds, shape):
    """Run `attend` over segments of pages and merge their softmaxes online."""
    num_steps = -(-table.shape[1] // pages_a_step)
    pad = num_steps * pages_a_step - table.shape[1]
    table = jnp.pad(table, ((0, 0), (0, pad)), constant_values=-1)

    def step(i, carry):
        m, l, acc = carry
        pages = lax.dynamic_slice_in_dim(table, i * pages_a_step, pages_a_step, axis=1)
        m_i, l_i, acc_i = attend(pages, i * (pages_a_step * page_size))
        m_new = jnp.maximum(m, m_i)
        old, new = jnp.exp(m - m_new), jnp.exp(m_i - m_new)
        # A segment that a row does not see has l_i = acc_i = 0 and leaves m: its bits stay.
        return m_new, l * old + l_i * new, acc * old + acc_i * new

    start = (
        jnp.full((*shape[:-1], 1), MASK_VALUE, jnp.float32),
        jnp.zeros((*shape[:-1], 1), jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    return lax.fori_loop(bounds[0], jnp.minimum(bounds[1], num_steps), step, start)
