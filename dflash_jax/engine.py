"""`generate`: prompts to pages to prefill to decode to tokens and text. The host side of a decode.

`start` stops after the prefill and hands over the carriers, for whoever steps by hand.

The device is kept one chunk ahead: chunk n+1 is launched before chunk n is read. Whatever can be
wrong with a request is refused before anything compiles, and compiling is timed apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, cast

import jax
import numpy as np

from dflash_jax.fixed import Fixed, plan
from dflash_jax.job import Job, Prompt, Sampling, prepare
from dflash_jax.loop import FirstToken
from dflash_jax.options import DecodeOptions
from dflash_jax.params import Params
from dflash_jax.run import DecodeError, fresh_carriers, prefill_batch, run
from dflash_jax.scratch import DflashScratch
from dflash_jax.state import Buffers, DecodeState, Status
from dflash_jax.stats import Stats
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.tracked import Tracked
from dflash_jax.words import counted

__all__ = ["DecodeError", "Generation", "generate", "start", "stream", "summary"]

_STATIC = (
    "cycles",
    "impl",
    "certify",
    "markov_top_k",
    "verify_widths",
)  # arguments of `generate` that are DecodeOptions
_FINISH_REASONS = {Status.STOP: "stop", Status.LENGTH: "length", Status.CONTEXT: "context"}


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What came out for one prompt.

    `ids` hold the stop token that ended it, or all tokens up to the one that completes a stop
    string; `text` holds neither.
    """

    ids: tuple[int, ...]
    text: str | None  # None without a tokenizer
    finish_reason: str  # "stop", "length" or "context"
    stats: Stats
    hashes: tuple[int, ...] | None  # u32 hash of the logits behind each id, if certified
    batch_index: int  # which batch of the call it was part of
    logprobs: tuple[float, ...] | None = None  # of each id under the model itself, if asked for
    seed: int | None = None  # that gives the same answer again; None if nothing was drawn
    stop_string: str | None = None  # the one that ended it


def generate(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    batch: int = 1,
    num_drafts: int | None = None,
    page_size: int = 64,
    max_context: int | None = None,
    eos_ids: Sequence[int] | None = None,
    plain: bool = False,
    sampling: Sampling = None,
    draft_sampling: bool | None = None,
    markov_top_k: int = 0,
    verify_widths: Sequence[int] = (),
    certify: bool = False,
    cycles: int = 8,
    impl: str = "auto",
    on_text: Callable[[int, str], None] | None = None,
    on_finish: Callable[[int, Generation], None] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Generation]:
    """Decode every prompt and return one Generation each, in order.

    Args:
      params: the pair.
      prompts: texts (with a tokenizer) or token ids; one prompt or many.
      tokenizer: for prompts and for `text`; its stop tokens are the default `eos_ids`.
      max_new_tokens: budget, one for all or one each; 0 gives an empty answer without model work.
      batch: sequences decoded together; with fewer prompts the rest of a batch stays empty.
      num_drafts: drafts a cycle; by default what the drafter was made for.
      page_size: tokens a KV page.
      max_context: most tokens of a sequence, prompt and answer; by default what the prompts need,
        rounded up to a power of two, so that prompts of a bucket share an executable.
      eos_ids: tokens that end an answer; an empty list ignores the tokenizer's.
      plain: keep no draft: the same executable, one token a cycle.
      sampling: how tokens are picked, one SamplingOptions for all or one each; by default greedily.
        Options with a seed give every prompt that seed, so an answer does not depend on the others.
      draft_sampling: draw the drafts too, from the drafter's distribution, or take its best tokens;
        by default what suits the drafter. The answers follow the target's distribution either way;
        without it they are, for one seed, those of `plain`.
      markov_top_k: let DSpark draft among so many best base logits of a row: quicker, and other
        drafts; the answers stay the target's. 0: among all.
      verify_widths: compile the target for so many rows a sequence too, ascending, and let each
        cycle take the narrowest that holds the anchor and kept drafts of every sequence of its
        batch. For drafters that cut their drafts (a confidence policy, prompt lookup). Faster, and
        outside the bitwise law: another width may round a near tie of the target the other way, so
        it cannot be certified; the law of the answers is the same.
      certify: hash each row's logits.
      cycles: cycles a dispatch to the device.
      impl: which form of each kernel.
      on_text: called with a prompt's index and the text that was accepted; needs a tokenizer.
      on_finish: called with a prompt's index and its Generation as soon as that is complete.
      progress: called with a few words before a slow phase.

    Raises:
      ValueError, TypeError: a request that cannot be met; nothing has been compiled.
      DecodeError: the target's logits were not finite.

    Warns:
      RuntimeWarning: the drafter's numbers were not finite, so that it drafted less.
    """
    if on_text is not None and tokenizer is None:
        raise ValueError("generate: on_text needs a tokenizer, none was given")
    job = prepare(
        params,
        _as_list(prompts),
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        batch=batch,
        num_drafts=num_drafts,
        page_size=page_size,
        max_context=max_context,
        eos_ids=eos_ids,
        plain=plain,
        sampling=sampling,
        draft_sampling=draft_sampling,
        options=DecodeOptions(
            cycles=cycles,
            impl=impl,
            certify=certify,
            markov_top_k=markov_top_k,
            verify_widths=verify_widths,
        ),
        progress=progress,
    )
    with closing(run(job)) as sequences:
        for sequence in sequences:
            piece = sequence.take_text()
            if on_text is not None and piece:
                on_text(sequence.index, piece)
            if on_finish is not None and sequence.status != Status.ACTIVE:
                on_finish(sequence.index, _generation(job, sequence))
    return [_generation(job, sequence) for sequence in job.sequences]


def stream(
    params: Params, prompt: Prompt, *, tokenizer: Tokenizer, **options: Any
) -> Iterator[str]:
    """Yield the text of one answer as it is accepted; `options` are those of `generate`.

    A request that cannot be met raises at the call, before the first piece is asked for.
    """
    if tokenizer is None:
        raise ValueError("stream: it yields text, which needs a tokenizer; none was given")
    static = {name: options.pop(name) for name in _STATIC if name in options}
    job = prepare(
        params,
        [prompt],
        tokenizer=tokenizer,
        options=DecodeOptions(**static),
        **{"max_new_tokens": 128, "batch": 1, **options},
    )
    return (piece for sequence in run(job) if (piece := sequence.take_text()))


def start(
    params: Params,
    prompts: Prompt | Sequence[Prompt],
    *,
    fixed: Fixed,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int | Sequence[int] = 128,
    eos_ids: Sequence[int] | None = None,
    plain: bool = False,
    sampling: Sampling = None,
    options: DecodeOptions = DecodeOptions(),  # noqa: B008 (frozen)
) -> tuple[list[FirstToken], DecodeState, Buffers, DflashScratch]:
    """Give one batch its pages and run its prompts, ready for `step` or `decode`.

    Args:
      params: the pair.
      prompts: at most `fixed.batch`, texts or token ids; the rest of the batch stays empty.
      fixed: sizes from `plan`, for this pair and its dtype.
      tokenizer, max_new_tokens, eos_ids, plain: as for `generate`, the budget at least 1.
      sampling: as for `generate`, but for stop strings, which only `generate` looks for.
      options: as for `step`; `cycles` is not used here. What `sampling` asks for must be in
        `options.sampling` (see `sampling.mode_of`).
    Returns:
      The first token of each prompt, which is its anchor, then the carriers.

    Raises:
      ValueError, TypeError: a request that cannot be met; nothing has been compiled.
      OutOfPages: `fixed.num_pages` are too few for the prompts and their budgets.
    """
    _check_fixed(params, fixed)
    job = prepare(
        params,
        _as_list(prompts),
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        batch=fixed.batch,
        eos_ids=eos_ids,
        plain=plain,
        sampling=sampling,
        options=options,
        fixed=fixed,
    )
    if len(job.sequences) > fixed.batch:
        count = counted(len(job.sequences), "prompt")
        raise ValueError(f"start: {count} for a batch of {fixed.batch}")
    if any(one.budget < 1 for one in job.sequences):
        raise ValueError("start: max_new_tokens is 0, wanted at least 1: prefill samples a token")
    if any(one.sampling.stop for one in job.sequences):
        raise ValueError("start: stop strings are given, which only generate looks for")
    firsts, carriers = prefill_batch(job, job.sequences, fresh_carriers(job))
    return firsts, *carriers


def _check_fixed(params: Params, fixed: Fixed) -> None:
    """Refuse sizes that were planned for another pair or dtype."""
    target = params.target.config
    needed = plan(
        target,
        params.draft.config,
        batch=fixed.batch,
        max_context=min(fixed.capacity, target.max_context),
        num_drafts=fixed.num_drafts,
        page_size=fixed.page_size,
        num_pages=fixed.num_pages,
        dtype=params.target.embed.dtype.name,
    )
    for what, of_fixed, of_pair in (
        ("MTP heads", fixed.draft, needed.draft),
        ("recurrent states", fixed.verify_wy_tables, needed.verify_wy_tables),
    ):
        if (of_fixed is None) != (of_pair is None):
            has, needs = ("none", "one") if of_fixed is None else ("one", "none")
            raise ValueError(
                f"start: fixed was planned for another pair: of {what} it has {has}, this pair "
                f"needs {needs}"
            )
    if (needed.k_pools, needed.logits) != (fixed.k_pools, fixed.logits):
        raise ValueError(
            f"start: fixed was planned for another pair: it has {_pools(fixed)}, this pair needs "
            f"{_pools(needed)}"
        )


def _pools(fixed: Fixed) -> str:
    first, vocab = fixed.k_pools[0], fixed.logits.shape[1]
    shape = list(first.shape)
    return (
        f"{counted(len(fixed.k_pools), 'pool')} of {first.dtype}{shape} and a vocabulary of {vocab}"
    )


def summary(generations: Sequence[Generation]) -> Stats:
    """One Stats over all of a call: sequences of a batch share its time, batches add up."""
    seconds: dict[int, float] = {}
    for one in generations:
        longest = seconds.get(one.batch_index, 0.0)
        seconds[one.batch_index] = max(longest, one.stats.decode_seconds)
    return Stats.merged([one.stats for one in generations], decode_seconds=sum(seconds.values()))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text, or one flat list of ids, is a list of one prompt."""
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence | np.ndarray | jax.Array):
        raise TypeError(f"generate: prompts is {prompts!r}, wanted texts or lists of token ids")
    if isinstance(prompts, jax.Array):
        prompts = cast(Sequence[int], np.asarray(prompts))
    is_one = isinstance(prompts, str) or (
        len(prompts) > 0 and all(isinstance(item, int | np.integer) for item in prompts)
    )
    return cast(list[Prompt], [prompts] if is_one else list(prompts))


def _generation(job: Job, one: Tracked) -> Generation:
    num_drafts = 0 if job.plain else job.fixed.num_drafts
    empty = {
        "accepted": np.zeros(0, np.int32),
        "committed": np.zeros(0, np.int32),
        "proposed": np.zeros(0, np.int32),
        "drafted": np.zeros((0, job.fixed.num_drafts), np.int32),
        "widths": np.zeros(0, np.int32),
    }
    joined = {
        name: np.concatenate([none, *(c[name] for c in one.cycles)]) for name, none in empty.items()
    }
    reason = _FINISH_REASONS[Status(one.status)]
    stats = Stats(
        drafter="none" if job.plain else job.params.draft.config.kind,
        num_drafts=num_drafts,
        num_tokens=(len(one.ids),),
        finish_reasons=(reason,),
        prompt_tokens=(len(one.prompt),),
        ttft_seconds=(one.ttft,) if one.ids else (),
        queue_seconds=(one.queued,) if one.ids else (),
        decode_seconds=one.decode_seconds,
        compile_seconds=job.report.compile_seconds if one.index == 0 else 0.0,
        settings=_settings(job),
        **{name: (array,) for name, array in joined.items()},
    )
    return Generation(
        ids=tuple(one.ids),
        text=one.text if one.decoder is not None else None,
        finish_reason=reason,
        stats=stats,
        hashes=tuple(one.hashes) if job.options.certify else None,
        batch_index=one.batch_index,
        logprobs=tuple(one.logprobs) if one.sampling.logprobs else None,
        seed=one.sampling.seed,
        stop_string=one.stop_string,
    )


def _settings(job: Job) -> dict[str, Any]:
    """What a figure depends on, for the record."""
    device = next(iter(job.params.target.embed.devices()))
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "dtype": job.params.target.embed.dtype.name,
        "batch": job.fixed.batch,
        "page_size": job.fixed.page_size,
        "capacity": job.fixed.capacity,
        "verify_rows": job.fixed.verify_rows,
        "verify_widths": list(job.options.widths(job.fixed)),
        "cycles_a_dispatch": job.options.cycles,
        "impl": job.options.impl,
        "plain": job.plain,
        "sampling": None if job.options.sampling is None else asdict(job.options.sampling),
        "executable": job.report.executable,
    }
