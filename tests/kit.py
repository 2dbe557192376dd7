"""Tiny pairs, ragged batches and runs that the tests of the loop share.

Weights are written by `scripts/make_tiny.py` and read twice: by the library's loaders and by the
NumPy reference. What costs a compile is keyed by what the caller passes and nothing else, so tests
that ask for the same pair and sizes share executables.
"""

import tempfile
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import dflash_jax as dj
from dflash_jax import loop
from dflash_jax.fixed import Fixed, plan
from dflash_jax.pages import block_table, pages_for
from dflash_jax.params import Params, RuleParams
from dflash_jax.scratch import init_scratch
from dflash_jax.state import Status, init_buffers, init_state
from dflash_jax.weights import load_drafter, load_target
from scripts.make_tiny import write_tiny_pair
from tests.reference.checkpoint import read_config, read_tensors
from tests.reference.dense_target import DenseTarget
from tests.reference.dflash import DFlash
from tests.reference.dflash2 import DFlash2
from tests.reference.dspark import DSpark
from tests.reference.hybrid_target import HybridTarget
from tests.reference.mtp import MtpHead

FAMILIES = ("qwen3", "llama")
HYBRIDS = ("qwen3_5", "qwen3_next")
DRAFTERS = ("dflash", "dflash2")
KINDS = (*DRAFTERS, "dspark", "mtp")  # all that have weights
WINDOW = 8
ALPHABET = 4  # ids that random models emit: a random drafter then guesses one draft in a few
ANY_ID = 307
MAX_PROMPT_ID = 300  # below the mask's id, 306
OPTIONS = loop.DecodeOptions(cycles=8, certify=True)
BUCKET = 32  # rows of a prefill call


# Pairs


class Pair(NamedTuple):
    """One pair of weights, ours and the reference's (f64 arithmetic on the same numbers)."""

    params: Params
    target: DenseTarget
    drafter: DFlash | MtpHead


# A sliding layer is causal in dflash's block, where the config says nothing, and not in dflash2's.
_SLIDES = {"use_sliding_window": True, "sliding_window": WINDOW}
_DRAFT_LAYERS = {
    ("dflash", "mixed"): _SLIDES | {"layer_types": ["sliding_attention", "full_attention"]},
    ("dflash2", "mixed"): _SLIDES,
    ("dflash", "one"): {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    ("dflash2", "one"): _SLIDES | {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
    ("dspark", "mixed"): _SLIDES | {"layer_types": ["full_attention", "sliding_attention"]},
    ("dspark", "one"): {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    ("mtp", "one"): {},
    ("mtp", "residual"): {"mtp_reads_residual": True},
}


_REFERENCES = {"dflash": DFlash, "dflash2": DFlash2, "dspark": DSpark, "mtp": MtpHead}
_SEEDS = {"qwen3": 3, "llama": 3}  # texts that vary, drafts that are right now and then


@cache
def pair(
    family: str = "qwen3",
    kind: str = "dflash2",
    *,
    dtype: str = "float32",
    block: int = 8,
    layers: str = "mixed",
    target_layers: int = 2,
    taps: tuple[int, ...] | None = None,
    alphabet: int = ALPHABET,
    seed: int | None = None,
) -> Pair:
    """A random target with a random drafter.

    Args:
      layers: "mixed", a sliding layer and a full one, or "one".
      taps: the drafter's `target_layer_ids`, by default all layers but the last.
      alphabet: ids below it are emitted, others hardly ever.
    """
    changes = dict(_DRAFT_LAYERS[kind, layers])
    if taps is not None:
        changes["dflash_config"] = {"target_layer_ids": list(taps)}
    with tempfile.TemporaryDirectory() as folder:
        at = write_tiny_pair(
            folder,
            target=family,
            drafter=kind,
            dtype=dtype,
            num_layers=target_layers,
            block_size=block,
            seed=_SEEDS.get(family, 3) if seed is None else seed,
            draft_config=changes,
        )
        ours = load_target(at.target)
        draft = load_drafter(at.drafter, ours)
        tensors = read_tensors(at.target)
        draft_tensors = read_tensors(at.drafter)
        configs = read_config(at.target), read_config(at.drafter)
    gain = np.where(np.arange(ours.config.vocab) < alphabet, 1.0, 1 / 16)[:, None]  # exact in bf16
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * gain
    head = jnp.asarray(tensors["lm_head.weight"], ours.embed.dtype)
    target = (HybridTarget if family in HYBRIDS else DenseTarget)(configs[0], tensors)
    drafter = _REFERENCES[kind](configs[1], draft_tensors, target.embedding, target.head)
    return Pair(Params(ours.replace(head=head), draft), target, drafter)


def with_rule(params: Params, draft: RuleParams) -> Params:
    """The pair's target with a drafter that follows a rule."""
    return params.replace(draft=draft)


def lookup(params: Params, num_drafts: int = 7) -> Params:
    return with_rule(params, dj.prompt_lookup_drafter(num_drafts=num_drafts))


def oracle(params: Params, tokens, poison_at=None, num_drafts: int = 7) -> Params:
    """The target with an oracle over `tokens` i32[B, S] that spoils draft `poison_at`."""
    tokens = jnp.asarray(tokens, jnp.int32)
    draft = dj.oracle_drafter(tokens, num_drafts=num_drafts, poison_at=poison_at)
    return with_rule(params, draft)


# Batches


class Request(NamedTuple):
    """One sequence to decode; `max_len` limits the tokens that its pages may hold."""

    prompt: tuple[int, ...]
    budget: int
    stop_ids: tuple[int, ...] = ()
    max_len: int | None = None


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random prompt ids."""
    ids = np.random.default_rng([seed, length]).integers(0, MAX_PROMPT_ID, length)
    return tuple(ids.tolist())


def ragged(batch: int) -> list[Request]:
    """Prompts and budgets of many lengths; with four, rows finish at different steps and ways."""
    requests = [
        Request(prompt(20), 36),
        Request(prompt(7), 21, stop_ids=(0,)),
        Request(prompt(33), 40, stop_ids=(2,)),
        Request(prompt(1), 3),
    ]
    return requests[:batch]


def sizes(
    params: Params,
    batch: int,
    *,
    page_size: int = 4,
    max_context: int = 80,
    num_drafts: int | None = None,
    num_pages: int | None = None,
    prefill_chunk: int = BUCKET,
) -> Fixed:
    return plan(
        params.target.config,
        params.draft.config,
        batch=batch,
        max_context=max_context,
        num_drafts=num_drafts,
        page_size=page_size,
        prefill_chunk=prefill_chunk,
        num_pages=num_pages,
        dtype=params.target.embed.dtype.name,
    )


CONTEXT = 160
UNKNOWN = np.zeros((3, CONTEXT + 1), np.int32)  # an oracle's tokens when there are none yet


def standard(params: Params, max_context: int = CONTEXT) -> Fixed:
    """Three sequences of up to 160 tokens: what most tests of the loop share."""
    return sizes(params, 3, max_context=max_context, prefill_chunk=64)


Carriers = tuple[dj.DecodeState, dj.Buffers, dj.DflashScratch]


def carriers(
    params: Params,
    fixed: Fixed,
    requests: list[Request],
    *,
    keep=None,
    pages: list[list[int]] | None = None,
    worn: tuple[dj.Buffers, dj.DflashScratch] | None = None,
) -> Carriers:
    """Carriers before prefill.

    Args:
      requests: at most `fixed.batch`; rows without one stay empty.
      keep: drafts kept a step, one number or i32[B]; by default all of them.
      pages: of each request, by default as many as it needs, out of order.
      worn: buffers and scratch of an earlier call; by default new ones full of NaN.
    """
    assert len(requests) <= fixed.batch
    pages = _pages(fixed, requests) if pages is None else [np.int32(ids) for ids in pages]
    limits = [
        min(len(own) * fixed.page_size, one.max_len or fixed.capacity)
        for own, one in zip(pages, requests, strict=True)
    ]
    stops = np.full((fixed.batch, 16), -1, np.int32)
    for row, one in enumerate(requests):
        stops[row, : len(one.stop_ids)] = one.stop_ids
    keep = fixed.num_drafts if keep is None else keep
    state = init_state(fixed).replace(
        remaining=_i32([one.budget for one in requests], fixed.batch),
        max_lens=_i32(limits, fixed.batch),
        keep=jnp.broadcast_to(jnp.asarray(keep, jnp.int32), (fixed.batch,)),
        stop_ids=jnp.asarray(stops),
    )
    if worn is None:
        scratch = filled(init_scratch(params.draft.config, fixed=fixed))
        worn = filled(init_buffers(fixed)), scratch.replace(draft_tokens_event=jnp.uint32(0))
    buffers, scratch = worn
    nobody = [np.zeros(0, np.int32)] * (fixed.batch - len(requests))
    table = jnp.asarray(block_table([*pages, *nobody], fixed.capacity // fixed.page_size))
    buffers = buffers.replace(meta=buffers.meta.replace(block_table=table))
    if buffers.gdn is not None:  # not in their own order, so that the table is read
        slots = jnp.arange(fixed.batch, dtype=jnp.int32)[::-1]
        buffers = buffers.replace(verify_wy_tables=slots)
    return state, buffers, scratch


def _pages(fixed: Fixed, requests: list[Request]) -> list[np.ndarray]:
    free = np.random.default_rng(fixed.num_pages).permutation(fixed.num_pages).astype(np.int32)
    counts = [
        pages_for(min(len(one.prompt) + one.budget, fixed.capacity), fixed.page_size)
        for one in requests
    ]
    return np.split(free, np.cumsum(counts))[: len(requests)]


def filled(tree, integer: int = 0x7EADBEEF):
    """The tree with NaN in every float leaf and a wild number in every integer one."""

    def wild(x):
        return jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else integer)

    return jax.tree.map(wild, tree)


def _i32(values, size: int):
    return jnp.asarray(np.pad(np.asarray(values, np.int32), (0, size - len(values))))


# Runs


class Run(NamedTuple):
    """What came out, a list a sequence; the first token of each comes from its prefill."""

    tokens: list[list[int]]
    hashes: list[list[int]]  # u32 hash of the logits behind each token
    accepted: list[list[int]]  # drafts accepted in each step that the sequence took part in
    committed: list[list[int]]
    status: list[Status]
    num_steps: int
    carriers: Carriers


def prefill(
    params: Params, fixed: Fixed, requests: list[Request], at: Carriers, *, bucket=BUCKET, real=None
) -> tuple[list[loop.FirstToken], Carriers]:
    """Prefill every request, `real` tokens a call (by default the whole bucket)."""
    params, real = _for_prefill(params), real or bucket
    firsts = []
    for row, one in enumerate(requests):
        first = None
        for begin in range(0, len(one.prompt), real):
            part = np.zeros(bucket, np.int32)
            ids = one.prompt[begin : begin + real]
            part[: len(ids)] = ids
            following = [*one.prompt[begin + real : begin + real + 1], -1][0]
            where = np.int32(len(ids)), np.int32(row), np.int32(following)
            first, *rest = loop.prefill(params, part, *where, *at, fixed=fixed, options=OPTIONS)
            at = tuple(rest)
        firsts.append(jax.device_get(first))
    return firsts, at


def _for_prefill(params: Params) -> Params:
    """Rule drafters keep no context, so that one prefill executable serves all of them."""
    if isinstance(params.draft, RuleParams) and params.draft.inner is None:
        return lookup(params, max(params.draft.config.max_drafts, 1))
    return params


def start(
    params: Params, fixed: Fixed, requests: list[Request], *, prefilled_by=None, **how
) -> tuple[list[loop.FirstToken], Carriers]:
    """Prefilled carriers; `how` as for `carriers`.

    Args:
      prefilled_by: the same target with another drafter, whose executable does the prefill; it
        must leave the same context, unless this drafter follows a rule and has none.
    """
    if prefilled_by is None:
        return prefill(params, fixed, requests, carriers(params, fixed, requests, **how))
    widened = sizes(
        prefilled_by, fixed.batch, page_size=fixed.page_size, max_context=fixed.capacity
    )
    at = carriers(prefilled_by, widened, requests, **how)
    firsts, (state, buffers, _) = prefill(prefilled_by, widened, requests, at)
    depth = len(fixed.k_pools)
    buffers = buffers.replace(k_pools=buffers.k_pools[:depth], v_pools=buffers.v_pools[:depth])
    return firsts, (state, buffers, init_scratch(params.draft.config, fixed=fixed))


def run(
    params: Params,
    fixed: Fixed,
    requests: list[Request],
    *,
    options: loop.DecodeOptions = OPTIONS,
    decode=loop.decode,
    **how,
) -> Run:
    """Decode a batch to its end by the compiled chunk; `how` as for `carriers`."""
    return finish(params, fixed, *start(params, fixed, requests, **how), options, decode)


def finish(
    params: Params, fixed: Fixed, firsts, at: Carriers, options=OPTIONS, decode=loop.decode
) -> Run:
    """Decode from prefilled carriers to the end."""
    count = len(firsts)
    tokens = [[int(first.token)] for first in firsts]
    hashes = [[int(first.logits_hash)] for first in firsts]
    accepted, committed = [[] for _ in firsts], [[] for _ in firsts]
    steps, idle = 0, 0
    while (np.asarray(at[0].status) == Status.ACTIVE).any():
        out, *rest = decode(params, *at, fixed=fixed, options=options)
        at, out = tuple(rest), jax.device_get(out)
        assert out.num_cycles > 0, "a chunk ran no cycle although a sequence is active"
        steps += int(out.num_cycles)
        for cycle in range(out.num_cycles):
            for row in range(count):
                n = int(out.num_committed[cycle, row])
                tokens[row] += out.tokens[cycle, row, :n].tolist()
                if out.hashes is not None:
                    hashes[row] += out.hashes[cycle, row, :n].tolist()
                if n:
                    committed[row].append(n)
                    accepted[row].append(int(out.num_accepted[cycle, row]))
            idle = 0 if out.num_committed[cycle].any() else idle + 1
            assert idle < 2, "cycles commit nothing although a sequence is active"
    status = [Status(int(x)) for x in at[0].status[:count]]
    return Run(tokens, hashes, accepted, committed, status, steps, at)


def plain(params: Params, fixed: Fixed, requests: list[Request], **kwargs) -> Run:
    """The same executable with no draft kept."""
    return run(params, fixed, requests, keep=0, **kwargs)


def history(done: Run) -> np.ndarray:
    """i32[B, S + 1] tokens by absolute position, for an oracle."""
    return np.asarray(done.carriers[0].tokens)


def committed_kv(at: Carriers, row: int) -> list[np.ndarray]:
    """K and V of every pool at the committed positions of one sequence: [length, K, D] each."""
    state, buffers, _ = at
    page_size = buffers.k_pools[0].shape[2]
    positions = np.arange(int(state.seq_lens[row]))
    page = np.asarray(buffers.meta.block_table)[row, positions // page_size]
    own = [] if buffers.draft is None else [buffers.draft]
    pools = [*buffers.k_pools, *(x.k_pool for x in own)]
    pools += [*buffers.v_pools, *(x.v_pool for x in own)]
    return [np.asarray(pool)[page, :, positions % page_size] for pool in pools]


def poison_unused(at: Carriers) -> Carriers:
    """NaN in every slot that holds no committed token: free pages, tails, rejected rows."""
    state, buffers, scratch = at
    table, lengths = np.asarray(buffers.meta.block_table), np.asarray(state.seq_lens)
    pages, _, page_size, _ = buffers.k_pools[0].shape
    used = np.zeros((pages, page_size), bool)
    for row, length in enumerate(lengths):
        positions = np.arange(length)
        used[table[row, positions // page_size], positions % page_size] = True
    keep = jnp.asarray(used)[:, None, :, None]

    def poisoned(pools):
        return tuple(jnp.where(keep, pool, jnp.full_like(pool, jnp.nan)) for pool in pools)

    buffers = buffers.replace(k_pools=poisoned(buffers.k_pools), v_pools=poisoned(buffers.v_pools))
    if buffers.draft is not None:
        k_pool, v_pool = poisoned((buffers.draft.k_pool, buffers.draft.v_pool))
        buffers = buffers.replace(draft=buffers.draft.replace(k_pool=k_pool, v_pool=v_pool))
    return state, buffers, scratch


class Cycle(NamedTuple):
    """One step seen from outside: the state before it, its records, and the carriers after."""

    before: dj.DecodeState
    out: loop.StepOutput
    after: Carriers


def cycles(params: Params, fixed: Fixed, at: Carriers, *, between=lambda at: at) -> Iterator[Cycle]:
    """Run `loop.step` until nobody is active; `between` may change the carriers before each."""
    while (np.asarray(at[0].status) == Status.ACTIVE).any():
        at = between(at)
        before = jax.device_get(at[0])
        out, *rest = loop.step(params, *at, fixed=fixed, options=OPTIONS)
        at = tuple(rest)
        yield Cycle(before, jax.device_get(out), at)


def by_steps(params: Params, fixed: Fixed, firsts, at: Carriers, *, between=lambda at: at) -> Run:
    """`finish` with a Python loop over `loop.step` in the place of the compiled chunk."""

    def decode(params, *at, fixed, options):
        record, *after = loop.step(params, *between(at), fixed=fixed, options=OPTIONS)
        proposal, verification = record
        out = loop.ChunkOutput(
            tokens=verification.committed,
            num_committed=verification.num_committed,
            num_accepted=verification.num_accepted,
            num_proposed=jnp.maximum(verification.num_rows - 1, 0),
            drafts=proposal.tokens,
            hashes=verification.hashes,
            logprobs=verification.logprobs,
            num_cycles=None,
            status=None,
        )
        out = jax.tree.map(lambda x: x[None], out)
        return out._replace(num_cycles=np.int32(1), status=after[0].status), *after

    return finish(params, fixed, firsts, at, decode=decode)


# Against the reference

# Largest error over the oracle's largest magnitude: two target and two drafter layers in f32
# against f64.
TOLERANCE = 2e-5


def assert_close(got, want, what: str = "", tolerance: float = TOLERANCE):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, wanted {want.shape}"
    assert np.isfinite(got).all(), f"{what}: not finite"
    error, scale = np.abs(got - want).max(initial=0.0), np.abs(want).max(initial=1e-30)
    assert error <= tolerance * scale, f"{what}: error {error:.3g} on a scale of {scale:.3g}"


class Block(NamedTuple):
    """What the reference makes of one propose after `tokens`, the last of which is the anchor."""

    features: np.ndarray  # [P, M*E]
    context: np.ndarray  # [P, E]
    hidden: np.ndarray  # [R, E] final-norm rows
    logits: np.ndarray  # [R-1, V]
    drafts: list[int]
    trace: dict[str, np.ndarray]


def reference_block(pair: Pair, tokens: list[int], rows: int) -> Block:
    """Recompute a block and its context from the text alone; DSpark's rows all draft."""
    taps = pair.drafter.config.target_layer_ids
    features = pair.target.forward(tokens[:-1]).features(taps)
    _, context = pair.drafter.fuse(features)
    trace = {}
    ids = pair.drafter.block_ids(tokens[-1], rows)
    hidden = pair.drafter.forward(ids, context, trace)
    drafting = hidden if isinstance(pair.drafter, DSpark) else hidden[1:]
    drafts = pair.drafter.choose(drafting, tokens[-1])
    return Block(features, context, hidden, pair.drafter.logits(drafting), drafts, trace)


def draft_kv(at: Carriers, row: int, num_layers: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(K, V) of each drafter layer at the committed positions of one sequence."""
    pools = committed_kv(at, row)
    depth = len(pools) // 2
    return list(zip(pools[depth - num_layers : depth], pools[-num_layers:], strict=True))
