"""Named shapes of the ops: what the kernel tests check is what the kernel benchmark measures.

A case is sizes alone; `make_attention(case, seed)` and its like draw the NumPy inputs. What an op
must not read (unowned pages, tails of pages, padding columns) is poisoned: NaN, or huge logits.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """`kv_lens` gives the batch; rows end at kv_len unless `q_offsets` says where row 0 stands."""

    name: str
    rows: int
    heads: tuple[int, int]  # query heads, kv heads
    head_dim: int
    page_size: int
    pages: int  # pages a sequence, the capacity
    kv_lens: tuple[int, ...]
    is_causal: bool = True
    window: int | None = None
    dtype: str = "bf16"
    q_offsets: tuple[int, ...] | None = None

    def offsets(self) -> tuple[int, ...]:
        """Key index of row 0 of each sequence."""
        return self.q_offsets or tuple(max(n - self.rows, 0) for n in self.kv_lens)


# Between them: every head dim, row count and length of known-faults C01, GQA 1, 3, 4, 8, pages of
# 4, 16, 64, windows of both kinds, blocks that straddle pages and blocks longer than what exists.
ATTENTION = (
    AttentionCase("one_row", 1, (4, 4), 16, 4, 5, (1, 15, 16, 17), dtype="f32"),
    AttentionCase("two_rows", 2, (6, 2), 64, 16, 2, (2, 15, 16, 17), dtype="f32"),
    AttentionCase("two_rows_bf16", 2, (6, 2), 64, 16, 2, (2, 15, 16, 17)),
    AttentionCase("short_budget", 5, (4, 1), 16, 4, 6, (1, 3, 17, 24), q_offsets=(0, 1, 15, 19)),
    AttentionCase("drafter_block", 5, (8, 1), 96, 16, 3, (5, 33, 48), is_causal=False, dtype="f32"),
    AttentionCase("full_capacity", 8, (8, 2), 64, 16, 3, (48, 8, 31)),
    AttentionCase("straddle", 9, (3, 1), 128, 4, 8, (11, 30, 32), dtype="f32"),
    AttentionCase("window", 16, (4, 1), 64, 16, 8, (16, 17, 100), window=7, dtype="f32"),
    AttentionCase("window_two_sided", 8, (8, 8), 16, 4, 12, (8, 29, 48), is_causal=False, window=5),
    AttentionCase("wide_head", 17, (2, 1), 256, 64, 2, (17, 64, 100)),
    AttentionCase("verify_1k", 16, (16, 2), 128, 16, 64, (1000,), dtype="f32"),
    AttentionCase("drafter_1k", 16, (16, 2), 128, 64, 18, (1019,), is_causal=False),
    AttentionCase("prefill", 70, (4, 1), 16, 4, 20, (70, 77), dtype="f32"),
    # Segments end at keys 1024 and 2048: one lies inside the block, the other inside the window.
    AttentionCase("prefill_segments", 128, (4, 2), 16, 16, 140, (1100,)),
    AttentionCase("prefill_window", 80, (2, 2), 16, 16, 200, (2140, 3000), window=50, dtype="f32"),
)


def make_attention(case: AttentionCase, seed: int = 0):
    """Return q, k_pool, v_pool, block_table, args of a case."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    batch = len(case.kv_lens)
    heads, kv_heads = case.heads
    num_pages = batch * case.pages + 2  # two that nobody owns, the last page among them
    q = rng.standard_normal((batch, case.rows, heads, case.head_dim)).astype(dtype)
    shape = (num_pages, kv_heads, case.page_size, case.head_dim)
    k_pool, v_pool = np.full((2, *shape), np.nan, dtype)
    table = np.full((batch, case.pages), -1, np.int32)
    free = iter(rng.permutation(num_pages - 1))
    for b, kv_len in enumerate(case.kv_lens):
        for p in range(-(-kv_len // case.page_size)):
            page = table[b, p] = next(free)
            used = min(kv_len - p * case.page_size, case.page_size)
            rows = (kv_heads, used, case.head_dim)
            k_pool[page, :, :used] = rng.standard_normal(rows)
            v_pool[page, :, :used] = rng.standard_normal(rows)
    args = np.stack([case.kv_lens, case.offsets(), case.offsets()], axis=1).astype(np.uint32)
    return q, k_pool, v_pool, table, args


@dataclass(frozen=True, slots=True)
class CacheCase:
    """Rows to write into pools of `pages` pages; `dropped` of them have slot -1."""

    name: str
    rows: int
    dropped: int
    kv_heads: int
    head_dim: int
    page_size: int
    pages: int
    dtype: str = "bf16"
    pool_dtype: str = "bf16"


CACHE = (
    CacheCase("one_row", 1, 0, 1, 16, 4, 3, dtype="f32", pool_dtype="f32"),
    CacheCase("drops", 17, 5, 2, 64, 4, 9),
    CacheCase("all_dropped", 5, 5, 3, 16, 16, 2, dtype="f32", pool_dtype="f32"),
    CacheCase("rounds_to_pool", 9, 2, 4, 96, 16, 3, dtype="f32"),
    CacheCase("verify_8b", 16, 0, 8, 128, 16, 65),
)


def make_cache(case: CacheCase, seed: int = 0):
    """Return k, v, k_pool, v_pool, slots; consecutive slots from the middle of a page."""
    rng = np.random.default_rng(seed)
    rows = (case.rows, case.kv_heads, case.head_dim)
    pool = (case.pages, case.kv_heads, case.page_size, case.head_dim)
    k, v = rng.standard_normal((2, *rows)).astype(DTYPES[case.dtype])
    k_pool, v_pool = rng.standard_normal((2, *pool)).astype(DTYPES[case.pool_dtype])
    slots = np.arange(case.rows, dtype=np.int32) + case.page_size // 2
    slots[rng.permutation(case.rows)[: case.dropped]] = -1
    return k, v, k_pool, v_pool, slots


@dataclass(frozen=True, slots=True)
class NormRopeCase:
    """Fused rows of `layers` layers; `norm` is None, "same" (dtype of the rows) or "f32"."""

    name: str
    rows: int
    heads: tuple[int, int]  # query heads, kv heads
    head_dim: int
    page_size: int
    turned: int | None = None  # dims that RoPE turns, all by default
    layers: int = 1
    norm: str | None = "same"
    dropped: int = 0
    extra: int = 0  # columns behind the values
    dtype: str = "bf16"


NORM_ROPE = (
    NormRopeCase("llama", 3, (3, 1), 16, 4, norm=None, dtype="f32"),
    NormRopeCase("odd_heads", 5, (6, 2), 96, 16, dropped=2, dtype="f32"),
    NormRopeCase("partial", 9, (4, 2), 64, 16, turned=16, norm="f32", extra=256),
    NormRopeCase("context", 17, (0, 2), 64, 4, layers=3, dropped=5),
    NormRopeCase("context_bias", 4, (0, 1), 16, 16, layers=2, norm=None, dtype="f32"),
    NormRopeCase("verify_8b", 16, (32, 8), 128, 64),
    NormRopeCase("context_8b", 16, (0, 8), 128, 64, layers=5),
    NormRopeCase("hybrid", 16, (16, 2), 256, 64, turned=64, norm="f32"),
)


def make_norm_rope(case: NormRopeCase, seed: int = 0):
    """Return rows, cos, sin, k_pools, v_pools, slots, q_norm, k_norms."""
    rng = np.random.default_rng(seed)
    dtype, (heads, kv_heads), d = DTYPES[case.dtype], case.heads, case.head_dim
    columns = (heads + 2 * case.layers * kv_heads) * d + case.extra
    rows = rng.standard_normal((case.rows, columns)).astype(dtype)
    rows[:, columns - case.extra :] = np.nan
    angles = rng.uniform(-3, 3, (case.rows, (case.turned or d) // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    pages = -(-case.rows // case.page_size) + 2
    pool = (2, case.layers, pages, kv_heads, case.page_size, d)
    k_pools, v_pools = rng.standard_normal(pool).astype(dtype)
    slots = np.arange(case.rows, dtype=np.int32) + case.page_size // 2
    slots[rng.permutation(case.rows)[: case.dropped]] = -1
    weight = lambda: rng.uniform(0.5, 1.5, d).astype(dtype if case.norm == "same" else np.float32)
    q_norm = weight() if case.norm and heads else None
    k_norms = tuple(weight() for _ in range(case.layers)) if case.norm else None
    return rows, cos, sin, tuple(k_pools), tuple(v_pools), slots, q_norm, k_norms


@dataclass(frozen=True, slots=True)
class ConvCase:
    """A block of rows with `taps` taps over `groups` groups of channels."""

    name: str
    batch: int
    rows: int
    width: int
    taps: int
    groups: int
    dtype: str = "bf16"


CONV = (
    ConvCase("one_tap", 1, 5, 48, 1, 3, dtype="f32"),
    ConvCase("two_taps", 3, 8, 64, 2, 4, dtype="f32"),
    ConvCase("odd_groups", 2, 9, 60, 3, 5, dtype="f32"),
    ConvCase("more_taps_than_rows", 2, 2, 16, 4, 16, dtype="f32"),
    ConvCase("one_row", 2, 1, 32, 2, 1),
    ConvCase("drafter", 2, 16, 512, 2, 32),
)


def make_conv(case: ConvCase, seed: int = 0):
    """Return x, dyn, base."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    x = rng.standard_normal((case.batch, case.rows, case.width)).astype(dtype)
    dyn = rng.standard_normal((case.batch, case.rows, case.taps, case.groups)).astype(dtype)
    base = rng.standard_normal((case.taps, case.width)).astype(dtype)
    return x, dyn, base


def make_conv_sides(case: ConvCase, seed: int = 0):
    """Return x, dyn[B, R, 2, T, G], base[2, T, E], a norm's weight and a residual."""
    x, *kernels = make_conv(case, seed)
    dyn, base = zip(kernels, make_conv(case, seed + 1)[1:], strict=True)
    rng = np.random.default_rng(seed)
    norm = rng.standard_normal(case.width).astype(x.dtype)
    residual = rng.standard_normal(x.shape).astype(x.dtype)
    return x, np.stack(dyn, axis=2), np.stack(base), norm, residual


@dataclass(frozen=True, slots=True)
class TopCase:
    """Rows of logits; `vocab` tokens exist, later columns are huge padding. `levels` makes ties."""

    name: str
    rows: int
    columns: int
    vocab: int | None = None
    k: int = 16
    levels: int | None = None  # logits are drawn from this many values
    dtype: str = "f32"


TOP = (
    TopCase("sixteen_tokens", 3, 16),
    TopCase("few_groups", 3, 1000, vocab=901, levels=7),
    TopCase("sixteen_groups", 2, 2048, levels=40),
    TopCase("seventeen_groups", 4, 2049, k=5, levels=3),
    TopCase("padded_vocabulary", 5, 5120, vocab=4099),
    TopCase("ties_everywhere", 4, 10000, levels=1),
    TopCase("bf16", 4, 10000, dtype="bf16"),
    TopCase("smollm2", 7, 49152, k=8),
    TopCase("qwen3", 15, 151936, vocab=151669),
)


def make_top(case: TopCase, seed: int = 0):
    """Return logits[N, columns]."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((case.rows, case.columns)).astype(np.float32) * 4
    if case.levels is not None:
        logits = rng.integers(-case.levels, 0, logits.shape).astype(np.float32)
    logits[:, case.vocab or case.columns :] = 1e30
    return logits.astype(DTYPES[case.dtype])


@dataclass(frozen=True, slots=True)
class MarkovCase:
    """The last of `rows` draft rows; padding columns are huge. `levels` makes ties everywhere."""

    name: str
    batch: int
    rows: int
    columns: int
    rank: int
    vocab: int | None = None
    levels: int | None = None  # base logits are drawn from this many values, the rest from -1, 0, 1
    with_bias: bool = False
    dtype: str = "bf16"


MARKOV = (
    MarkovCase("one_tile", 1, 1, 40, 8, dtype="f32"),
    MarkovCase("ties", 3, 2, 1000, 24, vocab=901, levels=2, with_bias=True),
    MarkovCase("bias", 5, 3, 700, 96, vocab=650, with_bias=True, dtype="f32"),
    MarkovCase("drafter", 1, 7, 5120, 256, vocab=5000),
)


def make_markov(case: MarkovCase, seed: int = 0):
    """Return base, code, out; the bias is as large as the base logits."""
    rng = np.random.default_rng(seed)
    shapes = (case.batch, case.rows, case.columns), (case.batch, case.rank)
    if case.levels is not None:
        base = rng.integers(0, case.levels, shapes[0])
        code, out = (rng.integers(-1, 2, s) for s in (shapes[1], (case.columns, case.rank)))
    else:
        base, code = (rng.standard_normal(shape) for shape in shapes)
        out = rng.standard_normal((case.columns, case.rank)) / case.rank**0.5
    base[..., case.vocab or case.columns :] = 10**6
    dtype = DTYPES[case.dtype]
    return base.astype(np.float32), code.astype(dtype), out.astype(dtype)


@dataclass(frozen=True, slots=True)
class WalkCase:
    """A walk of `rows` draft rows with codebooks [vocab, rank]."""

    name: str
    batch: int
    rows: int
    vocab: int
    rank: int
    k: int = 16
    dtype: str = "f32"


WALK = (
    WalkCase("one_row", 1, 1, 40, 8),
    WalkCase("batch", 3, 7, 300, 32, k=9),
    WalkCase("drafter", 2, 15, 5000, 256),
    WalkCase("drafter_bf16", 2, 15, 5000, 256, dtype="bf16"),
)


def make_walk(case: WalkCase, seed: int = 0):
    """Return anchor, vals, ids, hproj, predecessor, successor; edges as large as unary scores."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    anchor = rng.integers(0, case.vocab, case.batch).astype(np.int32)
    vals = -np.sort(-rng.standard_normal((case.batch, case.rows, 16)), axis=2).astype(np.float32)
    picks = [rng.permutation(case.vocab)[:16] for _ in range(case.batch * case.rows)]
    ids = np.array(picks, np.int32).reshape(case.batch, case.rows, 16)
    vals[..., case.k :], ids[..., case.k :] = -2e38, 0
    hproj = rng.standard_normal((case.batch, case.rows, case.rank)).astype(dtype)
    predecessor, successor = rng.standard_normal((2, case.vocab, case.rank)).astype(dtype)
    return anchor, vals, ids, hproj, predecessor, successor / dtype.type(case.rank**0.5)


def make_walk_draws(case: WalkCase, seed: int = 0):
    """Return what `make_walk` does, temperatures from 0 up, and uniforms."""
    rng = np.random.default_rng(seed + 1)
    temperature = np.linspace(0, 1.3, case.batch, dtype=np.float32)
    return *make_walk(case, seed), temperature, rng.random((case.batch, case.rows), np.float32)


@dataclass(frozen=True, slots=True)
class MatmulCase:
    """Few rows times a weight `[out, inner]`."""

    name: str
    rows: int
    inner: int
    out: int
    dtype: str = "bf16"


MATMUL = (
    MatmulCase("one_row", 1, 64, 48, dtype="f32"),
    MatmulCase("five_rows", 5, 96, 128, dtype="f32"),
    MatmulCase("sixteen_rows", 16, 576, 960),
    MatmulCase("seventeen_rows", 17, 256, 64),
)


def make_matmul(case: MatmulCase, seed: int = 0):
    """Return x, w, residual, of unit variance in and out."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    x = rng.standard_normal((case.rows, case.inner)).astype(dtype)
    w = (rng.standard_normal((case.out, case.inner)) / case.inner**0.5).astype(dtype)
    residual = rng.standard_normal((case.rows, case.out)).astype(dtype)
    return x, w, residual


@dataclass(frozen=True, slots=True)
class DeltaCase:
    """Gated-DeltaNet rows: `rows` a step, of which `new` exist; `kept` of the step before."""

    name: str
    rows: int
    heads: tuple[int, int]  # key heads, value heads
    dims: tuple[int, int]  # of a key, of a value
    new: tuple[int, ...]  # a sequence
    kept: tuple[int, ...]
    past: int | None = None  # rows that may be kept, by default as many as a step has
    dtype: str = "bf16"
    spare_slots: int = 1


# Between them: no rows, one and all of them, kept and new; blocks shorter than a convolution;
# rows of equal and of unequal number; one head a key and several; tiles narrower than a head.
DELTA = (
    DeltaCase("one_row", 1, (1, 1), (16, 16), (1,), (1,), dtype="f32"),
    DeltaCase("plain_steps", 4, (2, 4), (16, 32), (1, 1, 0), (1, 0, 0), dtype="f32"),
    DeltaCase("ragged", 4, (2, 4), (16, 64), (4, 2, 0, 3), (0, 4, 0, 1)),
    DeltaCase("fold_alone", 1, (1, 2), (32, 16), (0, 0), (5, 2), past=5, dtype="f32"),
    DeltaCase("verify", 16, (1, 3), (128, 128), (16,), (11,)),
)


def make_delta(case: DeltaCase, seed: int = 0):
    """Return qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept.

    What does not exist is NaN, and so is the state of a slot that belongs to nobody.
    """
    rng = np.random.default_rng(seed)
    dtype = DTYPES[case.dtype]
    batch, past = len(case.new), case.past or case.rows
    (key_heads, heads), (key_dim, value_dim) = case.heads, case.dims
    num_slots = batch + case.spare_slots
    slots = rng.permutation(num_slots)[:batch].astype(np.int32)
    width = 2 * key_heads * key_dim + heads * value_dim
    qkv = rng.standard_normal((batch, case.rows, width)).astype(dtype)
    g = -rng.uniform(0.01, 1.0, (batch, case.rows, heads)).astype(np.float32)
    beta = rng.uniform(0.1, 0.9, g.shape).astype(np.float32)
    state = np.full((num_slots, heads, key_dim, value_dim), np.nan, np.float32)
    past_kv = np.full((num_slots, past, width - key_heads * key_dim), np.nan, dtype)
    past_g, past_beta = np.full((2, num_slots, past, heads), np.nan, np.float32)
    for b, slot in enumerate(slots):
        kept = case.kept[b]
        state[slot] = rng.standard_normal(state.shape[1:])
        past_kv[slot, :kept] = rng.standard_normal((kept, past_kv.shape[2]))
        past_g[slot, :kept] = -rng.uniform(0.01, 1.0, (kept, heads))
        past_beta[slot, :kept] = rng.uniform(0.1, 0.9, (kept, heads))
        for x in (qkv, g, beta):
            x[b, case.new[b] :] = np.nan
    counts = (np.array(x, np.int32) for x in (case.new, case.kept))
    num_rows, num_kept = counts
    return qkv, g, beta, num_rows, state, slots, past_kv, past_g, past_beta, num_kept


@dataclass(frozen=True, slots=True)
class TilesCase:
    """Rows of a prompt over a state."""

    name: str
    rows: int  # R
    heads: tuple[int, int]  # key heads, value heads
    dims: tuple[int, int]  # of a key, of a value
    count: tuple[int, ...]  # rows of each sequence
    dtype: str = "bf16"


# Between them: a tile begun, whole and none; one head a key and several; both dtypes; a block of
# columns narrower than a head.
TILES = (
    TilesCase("one_row", 1, (1, 1), (16, 16), (1,), dtype="f32"),
    TilesCase("ragged", 40, (2, 4), (32, 32), (40, 0, 32, 19), dtype="f32"),
    TilesCase("prompt", 100, (1, 3), (128, 128), (100,)),
)


def make_tiles(case: TilesCase, seed: int = 0):
    """Return qkv, g, beta, num_rows, state; rows that do not exist are NaN."""
    rng = np.random.default_rng(seed)
    (key_heads, heads), (key_dim, value_dim) = case.heads, case.dims
    shape = len(case.count), case.rows
    width = 2 * key_heads * key_dim + heads * value_dim
    qkv = rng.standard_normal((*shape, width)).astype(DTYPES[case.dtype])
    g = -rng.uniform(0.01, 1.0, (*shape, heads)).astype(np.float32)
    beta = rng.uniform(0.1, 0.9, g.shape).astype(np.float32)
    state = rng.standard_normal((shape[0], heads, key_dim, value_dim)).astype(np.float32)
    for x in (qkv, g, beta):
        for b, count in enumerate(case.count):
            x[b, count:] = np.nan
    return qkv, g, beta, np.array(case.count, np.int32), state
