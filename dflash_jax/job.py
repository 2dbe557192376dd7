"""A request made ready: prompts as ids, sizes, static options. All checks; nothing compiles here.

What is wrong with a request is said here, in one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from dflash_jax import drafters
from dflash_jax.config import TargetConfig
from dflash_jax.fixed import Fixed, plan
from dflash_jax.mtp_config import DrafterConfig
from dflash_jax.options import DecodeOptions
from dflash_jax.params import Params
from dflash_jax.sampling import GREEDY, SamplingMode, SamplingOptions, mode_of, with_seed
from dflash_jax.shapes import check_integers
from dflash_jax.state import MAX_STOP_IDS
from dflash_jax.tokenizer import StreamDecoder, Tokenizer
from dflash_jax.tracked import Tracked
from dflash_jax.words import counted
from pallas_kernels import check_impl

Prompt = str | Sequence[int]
Sampling = SamplingOptions | Sequence[SamplingOptions] | None

PREFILL_CHUNK = 512  # most prompt tokens a prefill call takes
MIN_BUCKET = 16  # prompts are padded to powers of two from here
MIN_CAPACITY = 512  # tokens a sequence can grow to, powers of two from here: less saves no time


def context_for(longest: int, target: TargetConfig) -> int:
    """A context for sequences of up to `longest` tokens, rounded up so that requests share it."""
    return min(power_of_two(longest, MIN_CAPACITY), target.max_context)


def sizes_for(
    target: TargetConfig,
    draft: DrafterConfig,
    *,
    max_context: int,
    dtype: str,
    batch: int,
    num_drafts: int | None,
    page_size: int,
) -> Fixed:
    """`plan` with the prefill chunk that a context asks for."""
    return plan(
        target,
        draft,
        batch=batch,
        max_context=max_context,
        num_drafts=num_drafts,
        page_size=page_size,
        prefill_chunk=min(PREFILL_CHUNK, power_of_two(max_context, MIN_BUCKET)),
        dtype=dtype,
    )


@dataclass(slots=True)
class Report:
    """What compiling left behind, and when it was done."""

    compile_seconds: float = 0.0
    executable: str | None = None  # fingerprint of prefill and decode, if certified
    arrival: float = 0.0  # when all of it was compiled, from where waiting counts


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A checked request: sequences, sizes and static options."""

    params: Params
    sequences: list[Tracked]
    fixed: Fixed
    options: DecodeOptions
    max_context: int
    stop_ids: tuple[int, ...]
    plain: bool
    progress: Callable[[str], None]
    report: Report


def prepare(
    params: Params,
    prompts: Sequence[Prompt],
    *,
    tokenizer: Tokenizer | None,
    max_new_tokens: int | Sequence[int],
    batch: int,
    options: DecodeOptions,
    num_drafts: int | None = None,
    page_size: int = 64,
    max_context: int | None = None,
    eos_ids: Sequence[int] | None = None,
    plain: bool = False,
    sampling: Sampling = None,
    draft_sampling: bool | None = None,
    progress: Callable[[str], None] | None = None,
    fixed: Fixed | None = None,
) -> Job:
    """Check a request and choose its sizes; nothing is compiled or put on the device.

    With `fixed` the sizes are settled: `num_drafts`, `page_size` and `max_context` are its own, and
    so is what `options.sampling` can do.
    """
    target = params.target.config
    if fixed is not None:
        max_context = min(fixed.capacity, target.max_context)
    sizes = {"num_drafts": num_drafts, "page_size": page_size, "max_context": max_context}
    check_integers("generate", batch=batch, cycles=options.cycles, **sizes)
    check_impl("generate", options.impl)
    drafters.check_options(params.draft.config, options)
    if batch < 1:
        raise ValueError(f"generate: batch is {batch}, wanted at least 1")
    if options.cycles < 1:
        raise ValueError(f"generate: cycles is {options.cycles}, wanted at least 1")
    if max_context is not None and max_context < 2:
        raise ValueError(f"generate: max_context is {max_context}, wanted at least 2")
    # NumPy's integers pass the checks, but have no bit_length, and JSON does not take them.
    batch, options = int(batch), replace(options, cycles=int(options.cycles))
    max_context = None if max_context is None else int(max_context)
    budgets = _budgets(max_new_tokens, len(prompts))
    requests = _requests(sampling, len(prompts), target.real_vocab, tokenizer)
    mode = mode_of(requests, samples_drafts=_samples_drafts(params, requests, draft_sampling))
    if fixed is None:
        options = replace(options, sampling=mode)
    _check_mode(mode, options.sampling)
    limit = min(max_context or target.max_context, target.max_context)
    sequences = [
        Tracked(
            index,
            _prompt_ids(prompt, tokenizer, f"prompt {index}", target.real_vocab, limit),
            min(budget, limit),  # more than the context holds, and it fits the device's i32
            StreamDecoder(tokenizer) if tokenizer is not None else None,
            request,
            batch_index=index // batch,
        )
        for index, (prompt, budget, request) in enumerate(
            zip(prompts, budgets, requests, strict=True)
        )
    ]
    longest = max((len(one.prompt) + one.budget for one in sequences), default=2)
    if fixed is None:
        fixed = sizes_for(
            target,
            params.draft.config,
            dtype=params.target.embed.dtype.name,
            batch=batch,
            num_drafts=num_drafts,
            page_size=page_size,
            max_context=context_for(longest, target) if max_context is None else max_context,
        )
        _check_widths(params, options, plain)
    options.widths(fixed)
    if eos_ids is None:
        eos_ids = tokenizer.eos_ids if tokenizer is not None else ()
    elif isinstance(eos_ids, str) or np.ndim(eos_ids) != 1:
        raise TypeError(f"generate: eos_ids is {eos_ids!r}, wanted a list of token ids")
    return Job(
        params=params,
        sequences=sequences,
        fixed=fixed,
        options=options,
        max_context=limit,
        stop_ids=_stop_ids(eos_ids, target.vocab),
        plain=plain,
        progress=progress or (lambda words: None),
        report=Report(),
    )


def _requests(
    sampling: Sampling, count: int, vocab: int, tokenizer: Tokenizer | None
) -> list[SamplingOptions]:
    """One SamplingOptions a prompt, those that draw with a seed; without one each gets its own."""
    if sampling is None or isinstance(sampling, SamplingOptions):
        given = [sampling or GREEDY] * count
    else:
        given = list(sampling)
    if len(given) != count:
        raise ValueError(
            f"generate: {counted(len(given), 'sampling option')} for {counted(count, 'prompt')}"
        )
    for one in given:
        if not isinstance(one, SamplingOptions):
            raise TypeError(f"generate: sampling is {one!r}, wanted SamplingOptions")
        check_sampling(one, vocab, tokenizer, who="generate")
    return [with_seed(one) for one in given]


def check_sampling(
    one: SamplingOptions, vocab: int, tokenizer: Tokenizer | None, *, who: str
) -> None:
    """Raise ValueError for what a target of `vocab` ids and its tokenizer cannot give."""
    outside = [index for index in dict(one.logit_bias) if not 0 <= index < vocab]
    if outside:
        raise ValueError(
            f"{who}: logit_bias has token id {outside[0]}, outside the vocabulary of {vocab}"
        )
    if one.stop and tokenizer is None:
        raise ValueError(f"{who}: stop is {one.stop}, texts need a tokenizer")


def _samples_drafts(
    params: Params, requests: Sequence[SamplingOptions], wanted: bool | None
) -> bool:
    """Whether the drafter draws its drafts: as wanted, else by its kind."""
    if wanted is not None and not isinstance(wanted, bool):
        raise TypeError(f"generate: draft_sampling is {wanted!r}, wanted True, False or None")
    default = drafters.draws_drafts(params.draft.config)
    if wanted and default is None:
        raise ValueError(
            f"generate: draft_sampling is True, but drafter {params.draft.config.kind!r} has no "
            "distribution to draw from"
        )
    if wanted is not None and not any(one.is_random for one in requests):
        raise ValueError(f"generate: draft_sampling is {wanted}, but no temperature is above 0")
    return bool(default if wanted is None else wanted)


def _check_widths(params: Params, options: DecodeOptions, plain: bool) -> None:
    """Refuse narrower widths where every cycle but the last would run in the full one."""
    if options.verify_widths and not plain and not drafters.cuts_drafts(params.draft):
        raise ValueError(
            f"generate: verify_widths are {list(options.verify_widths)}, but the "
            f"{params.draft.config.kind} drafter always proposes every draft, wanted one that cuts "
            "them: DSpark with a confidence policy (a threshold of 0 cuts none), or prompt_lookup"
        )


def _check_mode(needed: SamplingMode | None, given: SamplingMode | None) -> None:
    """Refuse requests that ask for what the compiled step leaves out."""
    if needed is None:
        return
    names = [name for name in needed.__slots__ if getattr(needed, name)]
    missing = [name for name in names if not (given and getattr(given, name))]
    if "samples_drafts" in missing and given is not None:  # a drafter may draw or not
        missing.remove("samples_drafts")
    if missing:
        raise ValueError(
            f"start: sampling asks for {', '.join(missing)}, which options.sampling leaves out; "
            f"wanted {needed}"
        )


def _budgets(max_new_tokens: int | Sequence[int], count: int) -> list[int]:
    if np.ndim(max_new_tokens) == 0:
        given = [cast(int, max_new_tokens)] * count
    else:
        given = list(cast(Sequence[int], max_new_tokens))
    if len(given) != count:
        raise ValueError(f"generate: {len(given)} max_new_tokens for {counted(count, 'prompt')}")
    for budget in given:
        if not isinstance(budget, int | np.integer):
            raise TypeError(f"generate: max_new_tokens is {budget!r}, wanted an integer")
        if budget < 0:
            raise ValueError(f"generate: max_new_tokens is {budget}, wanted 0 or more")
    return [int(budget) for budget in given]


def _prompt_ids(
    prompt: Prompt, tokenizer: Tokenizer | None, who: str, vocab: int, limit: int
) -> np.ndarray:
    """i32[T], checked against vocabulary and context."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(f"generate: {who} is text, but no tokenizer was given")
        prompt = tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        raise TypeError(
            f"generate: {who} is {str(prompt)[:80]}, wanted text or a list of token ids"
        ) from None
    if ids.size == 0:
        raise ValueError(f"generate: {who} is empty")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TypeError(
            f"generate: {who} is {ids.dtype}{list(ids.shape)}, wanted text or a list of token ids"
        )
    outside = ids[(ids < 0) | (ids >= vocab)]
    if outside.size:
        raise ValueError(
            f"generate: {who} has token id {outside[0]}, outside the vocabulary of {vocab}"
        )
    if ids.size >= limit:
        raise ValueError(
            f"generate: {who} has {ids.size} tokens, wanted at most {limit - 1}: the context holds "
            f"{limit}, the answer's included"
        )
    return ids.astype(np.int32)


def _stop_ids(eos_ids: Sequence[int], vocab: int) -> tuple[int, ...]:
    for index in eos_ids:
        check_integers("generate", eos_ids=index)
    ids = tuple(sorted({int(index) for index in eos_ids}))
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(f"generate: {len(ids)} eos_ids, supported: up to {MAX_STOP_IDS}")
    outside = [index for index in ids if not 0 <= index < vocab]
    if outside:
        raise ValueError(f"generate: eos id {outside[0]} is outside the vocabulary of {vocab}")
    return ids


def chunks(job: Job, one: Tracked) -> Iterator[tuple[np.ndarray, int, int]]:
    """A prompt in padded chunks: full ones, then the rest's bucket.

    Yields i32[size], how many of them are real, and the token behind them, -1 behind the last.
    """
    most = min(PREFILL_CHUNK, 1 << (job.fixed.max_rows.bit_length() - 1))
    for start in range(0, len(one.prompt), most):
        part = one.prompt[start : start + most]
        size = min(power_of_two(len(part), MIN_BUCKET), most)
        behind = one.prompt[start + most : start + most + 1]
        yield np.pad(part, (0, size - len(part))), len(part), int(behind[0]) if behind.size else -1


def power_of_two(value: int, least: int) -> int:
    """The smallest power of two from `least` that is not below `value`."""
    return max(least, 1 << (max(value, 1) - 1).bit_length())
