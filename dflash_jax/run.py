"""Drive the device through a job: pages, prefill, chunks launched one ahead of the one read."""

from __future__ import annotations

import hashlib
import re
import time
import warnings
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import loop
from dflash_jax.fixed import Fixed
from dflash_jax.job import Job, chunks
from dflash_jax.mtp_config import DrafterConfig
from dflash_jax.pages import PageAllocator, block_table, pages_for
from dflash_jax.sampling import SamplingMode, sampling_state
from dflash_jax.scratch import DflashScratch, init_scratch
from dflash_jax.state import MAX_STOP_IDS, Buffers, DecodeState, Status, init_buffers, init_state
from dflash_jax.tracked import Tracked

_METADATA = re.compile(r", metadata=\{[^}]*\}")
_NUMBERED = re.compile(r"([A-Za-z_][\w-]*)\.\d+\b")
Carriers = tuple[DecodeState, Buffers, DflashScratch]


class DecodeError(RuntimeError):
    """The device reported a condition that no answer can come out of."""


def run(job: Job) -> Generator[Tracked, None, None]:
    """Decode batch after batch; yield a sequence whenever new ids of it have arrived."""
    working = [one for one in job.sequences if one.budget > 0]
    for one in job.sequences:
        if one.budget == 0:
            one.status = Status.LENGTH
            yield one
    if not working:
        return
    carriers = fresh_carriers(job)
    _compile(job, working, carriers)
    job.report.arrival = time.perf_counter()
    for start in range(0, len(working), job.fixed.batch):
        members = working[start : start + job.fixed.batch]
        for one in members:
            one.batch_index = start // job.fixed.batch
        carriers = yield from _run_batch(job, members, carriers)
    faulty = [str(one.index) for one in working if one.has_draft_fault]
    if faulty:
        warnings.warn(
            f"decode: the {job.params.draft.config.kind} drafter's numbers were not finite in "
            f"{'prompt' if len(faulty) == 1 else 'prompts'} {', '.join(faulty)}; nothing was "
            "drafted from them, and the answers are the target's",
            RuntimeWarning,
            stacklevel=2,
        )


def fresh_carriers(job: Job) -> Carriers:
    """Fresh carriers where the weights are, so that all calls see arrays of one placement."""
    fresh = _init_carriers(
        draft=job.params.draft.config, fixed=job.fixed, sampling=job.options.sampling
    )
    return jax.device_put(fresh, job.params.target.embed.sharding)


@partial(jax.jit, static_argnames=("draft", "fixed", "sampling"))
def _init_carriers(
    *, draft: DrafterConfig, fixed: Fixed, sampling: SamplingMode | None
) -> Carriers:
    """All of them by one program: filling a hundred arrays one by one costs a second."""
    return init_state(fixed, sampling), init_buffers(fixed), init_scratch(draft, fixed=fixed)


def _compile(job: Job, sequences: Sequence[Tracked], carriers: Carriers) -> None:
    """Compile every executable the job needs; `jit` finds them again when it is called."""
    start = time.perf_counter()
    static = {"fixed": job.fixed, "options": job.options}
    compiled = []
    for size in sorted({len(chunk) for one in sequences for chunk, *_ in chunks(job, one)}):
        job.progress(f"compiling prefill of {size} tokens")
        chunk = _prefill_arguments(np.zeros(size, np.int32), 1, 0, -1)
        compiled.append(loop.prefill.lower(job.params, *chunk, *carriers, **static).compile())
    if any(one.budget > 1 for one in sequences):
        job.progress("compiling decode")
        compiled.append(loop.decode.lower(job.params, *carriers, **static).compile())
    # What a batch is put together with is many small programs, which would count as waiting.
    state, _ = _load_batch(job, sequences[: job.fixed.batch], carriers[1])
    if any(one.sampling.stop for one in sequences):
        _end.lower(state, np.zeros(job.fixed.batch, bool)).compile()
    job.report.compile_seconds = time.perf_counter() - start
    if job.options.certify:
        job.report.executable = _fingerprint(compiled)


def _fingerprint(compiled: Sequence[jax.stages.Compiled]) -> str:
    """Names executables by their optimised HLO: equal names mean the same instructions."""
    digest = hashlib.sha256()
    for executable in compiled:
        digest.update(_instructions(executable.as_text() or "").encode())
    return digest.hexdigest()[:16]


def _instructions(text: str) -> str:
    """HLO without its sources, which change with every edit, names numbered as they come.

    Interpreted kernels are lowered a second time to other numbers, and to the same program.
    """
    starts = ("HloModule", "%", "ENTRY", " ", "}")
    kept = "\n".join(line for line in text.splitlines() if line.startswith(starts))
    seen: dict[str, str] = {}

    def renumbered(name: re.Match[str]) -> str:
        return seen.setdefault(name[0], f"{name[1]}.{len(seen)}")

    return _NUMBERED.sub(renumbered, _METADATA.sub("", kept))


def _load_batch(
    job: Job, members: Sequence[Tracked], buffers: Buffers
) -> tuple[DecodeState, Buffers]:
    """Give the sequences pages; a fresh state, and buffers with the new block table."""
    fixed = job.fixed
    allocator = PageAllocator(fixed.num_pages)
    pages, limits, budgets = [], [0] * fixed.batch, [0] * fixed.batch
    for row, one in enumerate(members):
        length = min(len(one.prompt) + one.budget, job.max_context)
        pages.append(allocator.alloc(pages_for(length, fixed.page_size)))
        # The last token never goes through the target, so its K/V needs no place.
        limits[row] = min(len(pages[-1]) * fixed.page_size, job.max_context - 1)
        budgets[row] = one.budget
    empty = [np.zeros(0, np.int32)] * (fixed.batch - len(members))
    table = block_table([*pages, *empty], fixed.capacity // fixed.page_size)
    stops = np.full((fixed.batch, MAX_STOP_IDS), -1, np.int32)
    stops[:, : len(job.stop_ids)] = job.stop_ids
    keep = 0 if job.plain else fixed.num_drafts
    state = init_state(fixed).replace(
        remaining=jnp.asarray(budgets, jnp.int32),
        max_lens=jnp.asarray(limits, jnp.int32),
        keep=jnp.full((fixed.batch,), keep, jnp.int32),
        stop_ids=jnp.asarray(stops),
    )
    if job.options.sampling is not None:
        requests = [one.sampling for one in members]
        sizes = {"batch": fixed.batch, "vocab": fixed.logits.shape[1]}
        state = state.replace(sampling=sampling_state(job.options.sampling, requests, **sizes))
    state, table = jax.device_put((state, jnp.asarray(table)), job.params.target.embed.sharding)
    return state, buffers.replace(meta=buffers.meta.replace(block_table=table))


def _prefill_arguments(tokens: np.ndarray, count: int, row: int, following: int) -> tuple[Any, ...]:
    return tokens, np.int32(count), np.int32(row), np.int32(following)


def _run_batch(
    job: Job, members: Sequence[Tracked], carriers: Carriers
) -> Generator[Tracked, None, Carriers]:
    """Prefill each member, then decode chunks, one launched ahead of the one being read."""
    static = {"fixed": job.fixed, "options": job.options}
    firsts, carriers = prefill_batch(job, members, carriers)
    under_way: Any = firsts
    try:
        free = job.report.arrival  # when the device was done with the prompt before
        for one, first in zip(members, firsts, strict=True):
            first = jax.device_get(first)
            one.queued = max(one.started, free) - job.report.arrival
            free = time.perf_counter()
            one.ttft = free - job.report.arrival
            _record_first(one, first)
            yield one
        start = time.perf_counter()
        launched = None
        while launched is not None or _any_active(members):
            reading = launched
            out, *rest = loop.decode(job.params, *carriers, **static)
            launched = under_way = _start_copy(out)
            carriers = tuple(rest)
            if reading is None:
                continue
            reading = jax.device_get(reading)
            yield from _record_chunk(members, reading, start)
            if not _any_active(members):  # nothing of the chunk under way is wanted
                break
            ended = _ended_here(members, reading.status)
            if ended.any():
                ended = np.pad(ended, (0, job.fixed.batch - len(ended)))
                carriers = (_end(carriers[0], ended), *carriers[1:])
    except BaseException:
        # A process that ends while the CPU computes is aborted, whatever code it meant to leave.
        jax.block_until_ready(under_way)
        raise
    return carriers


def prefill_batch(
    job: Job, members: Sequence[Tracked], carriers: Carriers
) -> tuple[list[loop.FirstToken], Carriers]:
    """Give the members pages and run their prompts: a first token each, and the carriers."""
    _, buffers, scratch = carriers
    carriers = *_load_batch(job, members, buffers), scratch
    firsts = []
    for row, one in enumerate(members):
        one.started = time.perf_counter()
        for tokens, count, following in chunks(job, one):
            first, *rest = loop.prefill(
                job.params,
                *_prefill_arguments(tokens, count, row, following),
                *carriers,
                fixed=job.fixed,
                options=job.options,
            )
            carriers = tuple(rest)
        firsts.append(_start_copy(first))
    return firsts, carriers


def _ended_here(members: Sequence[Tracked], status: np.ndarray) -> np.ndarray:
    """bool[members]: sequences that a stop string has ended, which the device goes on with."""
    has_stop = np.array([one.stop_string is not None for one in members])
    return has_stop & (status[: len(members)] == Status.ACTIVE)


@partial(jax.jit, donate_argnames="state", keep_unused=True)
def _end(state: DecodeState, ended: jax.Array) -> DecodeState:
    """Take bool[B] sequences out of the cycles to come."""
    stopped = jnp.where(ended & state.is_active, jnp.int32(Status.STOP), state.status)
    return state.replace(status=stopped)


def _any_active(members: Sequence[Tracked]) -> bool:
    return any(one.status == Status.ACTIVE for one in members)


def _start_copy(arrays):
    """Begin copying to the host; the device goes on meanwhile."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()
    return arrays


def _record_first(one: Tracked, first: loop.FirstToken) -> None:
    one.ids.append(int(first.token))
    if first.logits_hash is not None:
        one.hashes.append(int(first.logits_hash))
    if first.logprob is not None:
        one.logprobs.append(float(first.logprob))
    _set_status(one, int(first.status))
    one.read()


def _record_chunk(
    members: Sequence[Tracked], out: loop.ChunkOutput, start: float
) -> Generator[Tracked, None, None]:
    """Add a chunk's records to the sequences that were still running; yield those."""
    seconds = time.perf_counter() - start
    for row, one in enumerate(members):
        if one.status != Status.ACTIVE:
            continue
        counts = out.num_committed[: int(out.num_cycles), row]
        ran = np.flatnonzero(counts)
        if ran.size == 0 and out.status[row] == Status.ACTIVE:
            raise DecodeError(f"decode: prompt {one.index} is active but no longer advances")
        taken = np.arange(out.tokens.shape[2]) < counts[ran, None]  # [cycles, R]
        one.ids.extend(out.tokens[ran, row][taken].tolist())
        if out.hashes is not None:
            one.hashes.extend(out.hashes[ran, row][taken].tolist())
        if out.logprobs is not None:
            one.logprobs.extend(out.logprobs[ran, row][taken].tolist())
        if out.draft_faults is not None and out.draft_faults[row]:
            one.has_draft_fault = True
        one.cycles.append(_cycle_records(out, ran, row))
        one.decode_seconds = seconds
        _set_status(one, int(out.status[row]))
        one.read()
        yield one


def _cycle_records(out: loop.ChunkOutput, ran: np.ndarray, row: int) -> dict[str, np.ndarray]:
    committed = np.asarray(out.num_committed[ran, row])
    full = np.full(len(ran), out.tokens.shape[2], np.int32)
    proposed, drafts = np.asarray(out.num_proposed[ran, row]), np.asarray(out.drafts[ran, row])
    return {
        # Behind a stop token or the end of a budget accepted drafts are dropped: not counted.
        "accepted": np.minimum(out.num_accepted[ran, row], committed),
        "committed": committed,
        "proposed": proposed,
        "drafted": np.where(np.arange(drafts.shape[1]) < proposed[:, None], drafts, -1),
        "widths": full if out.widths is None else np.asarray(out.widths[ran]),
    }


def _set_status(one: Tracked, status: int) -> None:
    one.status = status
    if status == Status.NON_FINITE:
        raise DecodeError(
            f"decode: prompt {one.index}: the target's logits are not finite after "
            f"{len(one.prompt) + len(one.ids)} tokens; weights or dtype are not fit for it"
        )
