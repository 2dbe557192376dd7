"""What `bench_kernels.py` times: the ops at the shapes they are meant for, beside PyTorch's forms.

A measure makes sets of random inputs on the device. Attention reads pools whose pages are in random
order and whose last page ends before its sequence does.
"""

# pyright: reportMissingImports=false
# torch is no dependency of the package; it is there on the machine that measures.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import pallas_kernels as pk

Inputs = tuple[Any, ...]
HEADS, KV_HEADS, DIM, WIDTH, FFN = 32, 8, 128, 4096, 12288  # of Qwen3-8B
ROWS, PAGE, VOCAB, LARGE_VOCAB, RANK = 16, 64, 151_936, 248_320, 256


@dataclass(frozen=True, slots=True)
class Measure:
    """One op at one shape.

    make(key) draws a set of inputs; call(impl) is a function of them that returns a tuple.
    nbytes: the fewest that a call can move. aim_us: aimed at beforehand, if anything was.
    xla_us: about what XLA's form takes, for the length of a sample.
    torch(): a function of one set of torch inputs, and how to make one; None where it has no op.
    carried: inputs that are written in place. exact: outputs that equal the XLA form's to the bit.
    """

    op: str
    shape: str
    make: Callable[[Any], Inputs]
    call: Callable[[str], Callable[..., Any]]
    nbytes: int
    aim_us: float | None = None
    xla_us: float = 50.0
    torch: Callable[[], tuple[Callable[..., Any], Callable[[], Inputs]]] | None = None
    carried: int = 0
    exact: bool = False
    impls: tuple[str, ...] = ("pallas", "xla")


def _normal(key: Any, *shape: int, dtype: str = "bfloat16", scale: float = 1.0) -> jax.Array:
    return _draw(key, scale, shape=shape, dtype=dtype)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _draw(key, scale, *, shape, dtype):
    return (scale * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)


def _torch_normal(*shape: int, dtype: str = "bfloat16", scale: float = 1.0) -> Any:
    import torch

    drawn = torch.empty(shape, device="cuda", dtype=getattr(torch, dtype))
    return drawn.normal_(0.0, scale)


def _size(*shape: int, itemsize: int = 2) -> int:
    return math.prod(shape) * itemsize


# Attention


def attention(batch: int, context: int, planned: int | None = None, aim: float | None = None):
    """16 rows at the end of each sequence's `context` keys, in a table for `planned` of them."""
    planned = planned or context
    pages = -(-planned // PAGE)
    used = -(-context // PAGE)

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 4)
        pool = (batch * used, KV_HEADS, PAGE, DIM)
        table = jax.random.permutation(keys[3], batch * used).astype(jnp.int32)
        table = table.reshape(batch, used)
        table = jnp.pad(table, ((0, 0), (0, pages - used)), constant_values=-1)
        kv_len = context - 5
        args = jnp.array([[kv_len, kv_len - ROWS, kv_len - ROWS]] * batch, jnp.uint32)
        q = _normal(keys[0], batch, ROWS, HEADS, DIM)
        return q, _normal(keys[1], *pool), _normal(keys[2], *pool), table, args

    def of_torch() -> tuple[Callable[..., Any], Callable[[], Inputs]]:
        """Contiguous keys: GQA by folding the query heads of a group into rows, no mask."""
        import torch.nn.functional as F

        def call(q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

        folded = (batch, KV_HEADS, ROWS * HEADS // KV_HEADS, DIM)
        cache = (batch, KV_HEADS, context, DIM)
        return call, lambda: tuple(_torch_normal(*shape) for shape in (folded, cache, cache))

    where = f"B={batch}, {context} keys" + (f" in {planned}" if planned != context else "")
    kv = 2 * _size(batch, context, KV_HEADS, DIM)
    return Measure(
        "paged_attention",
        where,
        make,
        lambda impl: lambda *x: (pk.paged_attention(*x, is_causal=True, impl=impl),),
        kv + 2 * _size(batch, ROWS, HEADS, DIM),
        aim,
        xla_us=30 + kv / 4e5,
        torch=of_torch if planned == context and batch * context <= 1 << 18 else None,
    )


# Vocabulary rows and the walk over their candidates


def top16(vocab: int, aim: float | None = None, dtype: str = "float32"):
    def of_torch() -> tuple[Callable[..., Any], Callable[[], Inputs]]:
        import torch

        def call(logits):
            return torch.topk(logits, 16, dim=1)

        return call, lambda: (_torch_normal(ROWS, vocab, dtype=dtype),)

    return Measure(
        "top16",
        f"{ROWS} x {vocab:,} {dtype}",
        lambda key: (_normal(key, ROWS, vocab, dtype=dtype),),
        lambda impl: partial(pk.top16, impl=impl),
        _size(ROWS, vocab, itemsize=jnp.dtype(dtype).itemsize),
        aim,
        xla_us=60.0,
        torch=of_torch,
        exact=True,
    )


def greedy(vocab: int, *, with_hashes: bool = False):
    """The best token of each row, and whether all of it is finite."""

    def of_torch() -> tuple[Callable[..., Any], Callable[[], Inputs]]:
        import torch

        def call(logits):
            return torch.argmax(logits, dim=1)

        return call, lambda: (_torch_normal(ROWS, vocab, dtype="float32"),)

    def call(impl: str) -> Callable[..., Any]:
        return lambda logits: tuple(
            x for x in pk.greedy_rows(logits, with_hashes=with_hashes, impl=impl) if x is not None
        )

    return Measure(
        "greedy_rows",
        f"{ROWS} x {vocab:,} float32" + (", hashed" if with_hashes else ""),
        lambda key: (_normal(key, ROWS, vocab, dtype="float32"),),
        call,
        _size(ROWS, vocab, itemsize=4),
        xla_us=40.0,
        torch=None if with_hashes else of_torch,
        exact=True,
    )


def markov(batch: int, vocab: int = VOCAB, rank: int = RANK, drafts: int = 7):
    """One row of DSpark's chain, the one before the block's last."""

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 3)
        base = _normal(keys[0], batch, drafts, vocab, dtype="float32")
        return base, _normal(keys[1], batch, rank), _normal(keys[2], vocab, rank, scale=0.1)

    def call(impl: str) -> Callable[..., Any]:
        return lambda base, code, out: (
            pk.markov_argmax(base, code, out, drafts - 2, impl=impl).ids,
        )

    moved = _size(vocab, rank) + _size(batch, vocab, itemsize=4)
    return Measure(
        "markov_argmax",
        f"B={batch}, {vocab:,} x {rank}",
        make,
        call,
        moved,
        aim_us=1.4 * _size(vocab, rank) / 4.37e6 if batch == 1 and vocab == VOCAB else None,
        xla_us=30.0,
    )


def walk(batch: int, vocab: int = VOCAB):
    rows = ROWS - 1

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 6)
        vals = -jnp.sort(-_normal(keys[0], batch, rows, 16, dtype="float32"), axis=2)
        ids = jax.random.randint(keys[1], (batch, rows, 16), 0, vocab // 16, jnp.int32)
        ids = ids * 16 + jnp.arange(16, dtype=jnp.int32)  # distinct in a row
        anchor = jax.random.randint(keys[2], (batch,), 0, vocab, jnp.int32)
        books = [_normal(k, vocab, RANK, scale=0.1) for k in keys[3:5]]
        return anchor, vals, ids, _normal(keys[5], batch, rows, RANK), *books

    return Measure(
        "selector_walk",
        f"B={batch}, {rows} rows, rank {RANK}",
        make,
        lambda impl: partial(pk.selector_walk, impl=impl),
        _size(batch, rows, 32, RANK) + _size(batch, rows, 16, 2, itemsize=4),
        xla_us=40.0,
    )


# The convolution


def conv(batch: int, *, side: str):
    """A side of the drafter's convolution: `prepare` with its norm, `finish` with its residual."""
    taps, groups, at = 2, WIDTH // 16, ("prepare", "finish").index(side)

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 4)
        dyn = _normal(keys[1], batch, ROWS, 2, taps, groups)
        x = _normal(keys[0], batch, ROWS, WIDTH)
        third = _normal(keys[3], *((WIDTH,) if at == 0 else x.shape))
        return x, dyn, _normal(keys[2], 2, taps, WIDTH), third

    def call(impl: str) -> Callable[..., Any]:
        named = ("norm", "residual")[at]

        def run(x, dyn, base, third):
            y = pk.dynamic_conv(x, dyn, base, side=at, impl=impl, **{named: third})
            return y if isinstance(y, tuple) else (y,)

        return run

    rows = _size(batch, ROWS, WIDTH)
    return Measure(
        "dynamic_conv",
        f"{side}, B={batch}, {ROWS} x {WIDTH}, {taps} taps",
        make,
        call,
        (2 + 2 * at) * rows + _size(batch, ROWS, taps, groups) + _size(taps, WIDTH),
        xla_us=5.0 * (1 + batch / 32),
    )


# Keys and values into pages


def cache(rows: int):
    pages = 32

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 4)
        pool = (pages, KV_HEADS, PAGE, DIM)
        slots = 3 * PAGE + 7 + jnp.arange(rows, dtype=jnp.int32)
        pools = [_normal(k, *pool) for k in keys[:2]]
        return *pools, *(_normal(k, rows, KV_HEADS, DIM) for k in keys[2:]), slots

    def call(impl: str) -> Callable[..., Any]:
        return lambda kp, vp, k, v, slots: pk.reshape_and_cache(k, v, kp, vp, slots, impl=impl)

    moved = 4 * _size(rows, KV_HEADS, DIM)
    return Measure(
        "reshape_and_cache", f"{rows} rows", make, call, moved, xla_us=5.0, carried=2, exact=True
    )


def norm_rope(rows: int, layers: int, aim: float | None = None):
    """The rows of a target's layer, or a context's rows for all layers of a drafter."""
    heads = HEADS if layers == 1 else 0
    pages = 32

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 4 + 2 * layers)
        pool = (pages, KV_HEADS, PAGE, DIM)
        fused = _normal(keys[0], rows, (heads + 2 * layers * KV_HEADS) * DIM)
        angle = _normal(keys[1], rows, DIM // 2, dtype="float32")
        slots = 3 * PAGE + 7 + jnp.arange(rows, dtype=jnp.int32)
        norm = _normal(keys[2], DIM)
        pools = [tuple(_normal(keys[4 + 2 * i + j], *pool) for i in range(layers)) for j in (0, 1)]
        return *pools, fused, jnp.cos(angle), jnp.sin(angle), slots, norm

    def call(impl: str) -> Callable[..., Any]:
        def run(k_pools, v_pools, fused, cos, sin, slots, norm):
            got = pk.norm_rope_cache(
                fused,
                cos,
                sin,
                k_pools,
                v_pools,
                slots,
                num_heads=heads,
                q_norm=norm if heads else None,
                k_norms=(norm,) * layers,
                impl=impl,
            )
            return (got.k_pools, got.v_pools) if got.q is None else (*got[3:], got.q)

        return run

    moved = 2 * _size(rows, heads + 2 * layers * KV_HEADS, DIM) + 2 * _size(rows, DIM, itemsize=4)
    what = "q, k, v of a layer" if heads else f"context of {layers} layers"
    return Measure(
        "norm_rope_cache", f"{rows} rows, {what}", make, call, moved, aim, xla_us=8.0, carried=2
    )


# Gated DeltaNet


def delta_rows(batch: int):
    """16 rows, 8 kept ones before them, at the shapes of Qwen3.8-27B."""
    key_heads, heads, dim, kept = 16, 48, 128, 8
    width = (2 * key_heads + heads) * dim

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 7)
        gate = lambda k, *shape: jax.nn.sigmoid(_normal(k, *shape, heads, dtype="float32"))
        every = jnp.ones((batch,), jnp.int32)
        state = _normal(keys[0], batch, heads, dim, dim, dtype="float32")
        rows = (batch, ROWS)
        past_kv = _normal(keys[2], *rows, width - key_heads * dim)
        return (
            state,
            _normal(keys[1], *rows, width),
            -gate(keys[3], *rows),
            gate(keys[4], *rows),
            ROWS * every,
            jnp.arange(batch, dtype=jnp.int32),
            past_kv,
            -gate(keys[5], *rows),
            gate(keys[6], *rows),
            kept * every,
        )

    def call(impl: str) -> Callable[..., Any]:
        def run(state, qkv, g, beta, num_rows, slots, *past):
            out, state = pk.gated_delta_rows(
                qkv, g, beta, num_rows, state, slots, *past, num_key_heads=key_heads, impl=impl
            )
            return state, out

        return run

    state_bytes = 2 * _size(batch, heads, dim, dim, itemsize=4)
    rows_bytes = _size(batch, ROWS, width) + _size(batch, ROWS, heads, dim, itemsize=4)
    return Measure(
        "gated_delta_rows",
        f"B={batch}, {ROWS} rows after {kept}, {heads} heads of {dim}",
        make,
        call,
        state_bytes + rows_bytes,
        xla_us=200.0,
        carried=1,
    )


def delta_tiles(rows: int):
    """A prompt at once, at the shapes of Qwen3.8-27B."""
    key_heads, heads, dim = 16, 48, 128
    width = (2 * key_heads + heads) * dim

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 4)
        gate = lambda k: jax.nn.sigmoid(_normal(k, 1, rows, heads, dtype="float32"))
        return (
            _normal(keys[0], 1, heads, dim, dim, dtype="float32"),
            _normal(keys[1], 1, rows, width),
            -gate(keys[2]),
            gate(keys[3]),
            jnp.full((1,), rows, jnp.int32),
        )

    def call(impl: str) -> Callable[..., Any]:
        def run(state, qkv, g, beta, num_rows):
            out, state = pk.delta_rule_tiles(
                qkv, g, beta, num_rows, state, num_key_heads=key_heads, impl=impl
            )
            return state, out

        return run

    moved = 2 * _size(heads, dim, dim, itemsize=4) + _size(rows, width)
    return Measure(
        "delta_rule_tiles",
        f"{rows:,} rows, {heads} heads of {dim}",
        make,
        call,
        moved + _size(rows, heads, dim, itemsize=4) + 2 * _size(rows, heads, itemsize=4),
        xla_us=1.6 * rows,
        carried=1,
    )


# Matrix products


def matmul(
    name: str,
    inner: int,
    out: int,
    rows: int = ROWS,
    *,
    with_norm: bool = False,
    with_residual: bool = False,
    out_dtype: str = "bfloat16",
):
    """A product, with the norm before it or the residual after it as a layer has them.

    PyTorch's writes bf16 whatever is asked for.
    """

    def of_torch() -> tuple[Callable[..., Any], Callable[[], Inputs]]:
        import torch
        import torch.nn.functional as F

        x_and_w = lambda: (_torch_normal(rows, inner), _torch_normal(out, inner, scale=0.02))
        if not with_residual:
            return F.linear, x_and_w
        add = lambda x, w, residual: torch.addmm(residual, x, w.T)
        return add, lambda: (*x_and_w(), _torch_normal(rows, out))

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 4)
        x, w = _normal(keys[0], rows, inner), _normal(keys[1], out, inner, scale=0.02)
        norm = (_normal(keys[2], inner),) if with_norm else ()
        return (x, w, *norm, _normal(keys[3], rows, out)) if with_residual else (x, w, *norm)

    def call(impl: str) -> Callable[..., Any]:
        def run(x, w, *more):
            norm = more[0] if with_norm else None
            residual = more[-1] if with_residual else None
            named = {"norm": norm, "residual": residual, "out_dtype": out_dtype}
            return (pk.skinny_matmul(x, w, impl=impl, **named),)

        return run

    what = ", norm before it" * with_norm + ", residual after it" * with_residual
    out_bytes = _size(rows, out, itemsize=jnp.dtype(out_dtype).itemsize)
    return Measure(
        "skinny_matmul",
        f"{name}, {rows} x {inner} -> {out}{what}"
        + ("" if out_dtype == "bfloat16" else f" {out_dtype}"),
        make,
        call,
        _size(out, inner) + _size(rows, inner) + out_bytes + with_residual * _size(rows, out),
        xla_us=max(4.0, _size(out, inner) / 3e6),
        torch=None if with_norm else of_torch,
        impls=("pallas", "triton", "xla"),
    )


def swiglu(inner: int, ffn: int, rows: int = ROWS, *, has_norm: bool = False):
    def of_torch() -> tuple[Callable[..., Any], Callable[[], Inputs]]:
        import torch.nn.functional as F

        def call(x, w):
            gate, up = F.linear(x, w).chunk(2, -1)
            return F.silu(gate) * up

        return call, lambda: (
            _torch_normal(rows, inner),
            _torch_normal(2 * ffn, inner, scale=0.02),
        )

    def make(key: Any) -> Inputs:
        keys = jax.random.split(key, 3)
        x, w = _normal(keys[0], rows, inner), _normal(keys[1], 2 * ffn, inner, scale=0.02)
        return (x, w, _normal(keys[2], inner)) if has_norm else (x, w)

    def call(impl: str) -> Callable[..., Any]:
        return lambda x, w, *norm: (
            pk.skinny_matmul_swiglu(x, w, norm=norm[0] if norm else None, impl=impl),
        )

    return Measure(
        "skinny_matmul_swiglu",
        f"{rows} x {inner} -> 2 x {ffn}" + (", norm before it" if has_norm else ""),
        make,
        call,
        _size(2 * ffn, inner) + _size(rows, inner) + _size(rows, ffn),
        xla_us=max(4.0, _size(2 * ffn, inner) / 3e6),
        torch=None if has_norm else of_torch,
    )


def full() -> list[Measure]:
    """The shapes of published models, those that have an aim first."""
    aims = {
        (1, 1024): 9.0,
        (1, 4096): 14.0,
        (1, 32768): 50.0,
        (8, 1024): 21.0,
        (8, 4096): 52.0,
        (8, 32768): 310.0,
        (32, 1024): 47.0,
        (32, 4096): 165.0,
        (32, 32768): 1200.0,
    }
    return [
        *(attention(*size, aim=aim) for size, aim in aims.items()),
        attention(1, 1024, 32768, aim=13.5),
        top16(VOCAB, 15.0),
        top16(LARGE_VOCAB, 18.0),
        top16(VOCAB, dtype="bfloat16"),
        norm_rope(ROWS, 1, 2.0),
        greedy(VOCAB),
        greedy(VOCAB, with_hashes=True),
        markov(1),
        markov(8),
        markov(1, LARGE_VOCAB),
        walk(1),
        walk(32),
        *(conv(batch, side=side) for side in ("prepare", "finish") for batch in (1, 32)),
        norm_rope(ROWS, 5),
        cache(ROWS),
        delta_rows(1),
        delta_rows(8),
        delta_tiles(512),
        delta_tiles(4096),
        matmul("qkv", WIDTH, (HEADS + 2 * KV_HEADS) * DIM),
        matmul("o", WIDTH, WIDTH),
        matmul("gate_up", WIDTH, 2 * FFN),
        matmul("down", FFN, WIDTH),
        matmul("lm_head", WIDTH, VOCAB, out_dtype="float32"),
        matmul("SmolLM2 qkv", 576, 960, 8, with_norm=True),
        matmul("SmolLM2 o", 576, 576, 8, with_residual=True),
        matmul("SmolLM2 down", 1536, 576, 8, with_residual=True),
        swiglu(WIDTH, FFN),
        swiglu(576, 1536, 8, has_norm=True),
    ]


def smoke() -> list[Measure]:
    """One small measure an op, for a run on a CPU."""
    return [
        attention(1, 70, 128),
        top16(5000),
        markov(1, 400, 16),
        walk(1, 400),
        conv(1, side="prepare"),
        norm_rope(4, 1),
        greedy(5000),
        cache(4),
        matmul("small", 64, 48, 8, with_norm=True, with_residual=True),
        swiglu(64, 48, 8, has_norm=True),
    ]
