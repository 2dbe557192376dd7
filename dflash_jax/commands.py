"""What `dflash decode` and `dflash plan` do once their arguments are checked.

Loading fails with code 1, a request that does not fit the models with code 2, decoding with code 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from dflash_jax import (
    certificate,
    drafters,
    engine,
    memory,
    models,
    sampling_arguments,
    sampling_check,
)
from dflash_jax.config import TargetConfig
from dflash_jax.executable_cache import keep_executables
from dflash_jax.fixed import Fixed
from dflash_jax.job import check_sampling, context_for, sizes_for
from dflash_jax.models import Models
from dflash_jax.mtp_config import DrafterConfig
from dflash_jax.output import Output, sizes
from dflash_jax.params import Params
from dflash_jax.prompts import UsageError
from dflash_jax.sampling import SamplingOptions, with_seed
from dflash_jax.weights import read_configs
from dflash_jax.words import counted
from pallas_kernels import check_impl


def run(args: argparse.Namespace) -> int:
    """Run the command that `cli` parsed and return its exit code."""
    keep_executables()
    try:
        with _fitting():
            check_impl(args.command, args.impl)
        return {"decode": _decode, "check": _check, "plan": _plan}[args.command](args)
    except (UsageError, BrokenPipeError):  # the second: an OSError that `cli` ends
        raise
    except (OSError, RuntimeError, ValueError, NotImplementedError) as error:
        print(f"dflash: {_sentence(error)}", file=sys.stderr)
        return 1


@contextmanager
def _fitting() -> Iterator[None]:
    """What does not fit the models is the request's fault, not theirs."""
    try:
        yield
    except (UsageError, UnicodeEncodeError):  # the second: stdout cannot show an answer
        raise
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UsageError(_sentence(error)) from error


def _sentence(error: BaseException) -> str:
    """The first line of an error; libraries below add pages to it."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def _decode(args: argparse.Namespace) -> int:
    if args.check and args.drafter == "none":
        raise UsageError("decode: --check compares drafting with plain decoding; --drafter is none")
    if args.check and args.verify_widths:
        raise UsageError(
            "decode: --check compares bits, which --verify-widths lets differ; wanted one of them"
        )
    choice = models.choose_drafter(args.drafter, args.target, args.num_drafts)
    if args.verify_widths and _has_no_model(choice):  # an oracle would decode before it is refused
        raise UsageError(
            "decode: --verify-widths are for drafters that cut their drafts, --drafter "
            f"{choice.name} never does"
        )
    if args.verify_widths and args.min_confidence == 0:
        raise UsageError(
            "decode: --verify-widths are for drafts that are cut, and --min-confidence 0 cuts none"
        )
    with _fitting():
        asked = sampling_arguments.options(args)
    pair = models.load(args)
    _check_check(args, asked, pair)
    with _fitting():
        for request, one in zip(args.requests, asked, strict=True):
            who = request.where or "decode"
            check_sampling(one, pair.target.config.real_vocab, pair.tokenizer, who=who)
        prompts = [_ids(index, pair, args) for index in range(len(args.requests))]
        budgets = [request.max_new_tokens or args.max_new_tokens for request in args.requests]
        longest = max(len(ids) + budget for ids, budget in zip(prompts, budgets, strict=True))
        context = args.max_context or context_for(longest, pair.target.config)
        batch = min(args.batch, len(prompts))
        fixed = _sizes(args, pair.target.config, pair.draft_config, context, batch)
    is_one = all(one == asked[0] for one in asked)
    output = Output(args, has_text=pair.tokenizer is not None, sampling=() if is_one else asked)
    output.say(_headline(pair))
    output.say(_memory_line(memory.estimate(pair.target.config, pair.draft_config, fixed)))
    options = {
        "tokenizer": pair.tokenizer,
        "eos_ids": pair.stop_ids,
        "batch": batch,
        "num_drafts": args.num_drafts,
        "page_size": args.page_size,
        "max_context": context,
        "cycles": args.cycles,
        "impl": args.impl,
        "certify": args.check,
        "draft_sampling": args.draft_sampling,
        "markov_top_k": args.markov_top_k,
        "verify_widths": args.verify_widths,
    }
    # Settled here, so that a second run of the same prompts draws the same.
    requests = [with_seed(one) for one in asked]
    try:
        found, proof = _generate(args, pair, prompts, budgets, requests, fixed, options, output)
    finally:
        output.close()
    facts = {
        "target": args.target,
        "drafter": pair.choice.name,
        "mode": pair.mode,
        "plan": sizes(fixed),
        "sampling": asdict(asked[0]) if is_one else None,  # None: beside each answer
    }
    output.finish(found, proof, facts)
    return 0 if proof is None or proof.holds else 1


def _has_no_model(choice: models.DrafterChoice) -> bool:
    """Whether there is no drafter, or one that is told the text."""
    return choice.name == "none" or choice.accepts is not None


def _check_check(args: argparse.Namespace, asked: Sequence[SamplingOptions], pair: Models) -> None:
    """Refuse a comparison of tokens where drafted and plain decoding agree in distribution only."""
    draws = args.draft_sampling
    if draws is None:
        draws = drafters.draws_drafts(pair.draft_config)
    if args.check and draws and any(one.is_random for one in asked):
        raise UsageError(
            f"decode: --check compares tokens, but where the drafts of {pair.choice.name} are "
            "drawn they follow plain decoding in distribution only; add --no-draft-sampling"
        )


def _ids(index: int, pair: Models, args: argparse.Namespace) -> Sequence[int]:
    try:
        return models.prompt_ids(args.requests[index], pair, args.system)
    except ValueError as error:  # of text that is none, or of the chat template
        where = args.requests[index].where or f"prompt {index}"
        raise UsageError(f"decode: {where}: {_sentence(error)}") from error


def _generate(
    args: argparse.Namespace,
    pair: Models,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    requests: Sequence[SamplingOptions],
    fixed: Fixed,
    options: dict[str, Any],
    output: Output,
) -> tuple[list[engine.Generation], certificate.Certificate | None]:
    """Decode all prompts and, with --check, decode them plainly too and compare."""
    found, proofs = [], []
    # An oracle is made anew for every batch, since it knows that batch's text.
    size = fixed.batch if pair.draft is None else len(prompts)
    if pair.draft is None and not args.draft_sampling and any(one.is_random for one in requests):
        options = {**options, "draft_sampling": None}  # refused in a batch of greedy lines
    waited = 0.0
    for number, start in enumerate(range(0, len(prompts), size)):
        part = slice(start, start + size)
        mine = {**options, "max_new_tokens": budgets[part], "sampling": requests[part]}
        with _fitting():
            params = pair.pair() if pair.draft is not None else None
            if params is None:
                output.say("decoding plainly, so that the oracle knows the text")
                params = _oracle(pair, fixed, prompts[part], mine)
            drafted = engine.generate(
                params, prompts[part], **mine, **output.callbacks(first=start)
            )
            if args.check:
                output.say("decoding plainly with the same executable")
                plain = engine.generate(params, prompts[part], plain=True, **mine)
                proofs.append(certificate.compare(drafted, plain))
        found += [_behind(one, number, waited) for one in drafted]
        waited += max(one.stats.ttft_seconds[0] for one in drafted)
        waited += engine.summary(drafted).decode_seconds
    return found, certificate.joined(proofs)


def _behind(one: engine.Generation, batches: int, seconds: float) -> engine.Generation:
    """An answer of a call of its own, as one that waited for those before it."""
    stats = replace(
        one.stats,
        ttft_seconds=tuple(x + seconds for x in one.stats.ttft_seconds),
        queue_seconds=tuple(x + seconds for x in one.stats.queue_seconds),
    )
    return replace(one, batch_index=one.batch_index + batches, stats=stats)


def _oracle(
    pair: Models, fixed: Fixed, prompts: Sequence[Sequence[int]], options: dict[str, Any]
) -> Params:
    """Learn the continuation of one batch from a plain run of the oracle's own executable."""
    known = np.zeros((fixed.batch, fixed.capacity + 1), np.int32)
    blind = pair.oracle_pair(known, fixed.num_drafts)
    plain = engine.generate(blind, prompts, plain=True, **options)
    for row, (prompt, one) in enumerate(zip(prompts, plain, strict=True)):
        ids = [*prompt, *one.ids][: known.shape[1]]
        known[row, : len(ids)] = ids
    return pair.oracle_pair(known, fixed.num_drafts)


def _check(args: argparse.Namespace) -> int:
    """Compare sampled answers with the target's law; code 1 where they do not follow it."""
    choice = models.choose_drafter(args.drafter, args.target, args.num_drafts)
    if _has_no_model(choice):
        raise UsageError(f"check: drafter {choice.name} drafts nothing of its own")
    pair = models.load(args)
    if args.draft_sampling and drafters.draws_drafts(pair.draft_config) is None:
        raise UsageError(
            f"check: --draft-sampling is given, but drafter {choice.name} has no distribution to "
            "draw from"
        )
    with _fitting():
        prompt = list(_ids(0, pair, args))
        context = args.max_context or context_for(len(prompt), pair.target.config)
        _sizes(args, pair.target.config, pair.draft_config, context, args.batch)
        sizes = {
            name: getattr(args, name) for name in ("batch", "page_size", "max_context", "impl")
        }
        trial = sampling_check.prepare(
            pair.pair(),
            prompt,
            temperature=args.temperature,
            vocabulary=args.vocabulary,
            progress=lambda words: print(words, file=sys.stderr),
            **sizes,
        )
        print(f"decoding {counted(args.samples, 'answer')}", file=sys.stderr)
        found = sampling_check.judge(
            trial,
            samples=args.samples,
            seed=args.seed,
            draft_sampling=args.draft_sampling,
            num_drafts=args.num_drafts,
            **sizes,
        )
    print(found)
    facts = {"target": args.target, "drafter": choice.name, "prompt": prompt}
    print(json.dumps({**facts, **found.as_dict()}))
    return 0 if found.holds else 1


def _plan(args: argparse.Namespace) -> int:
    """Print sizes and memory; of the target only the config is read."""
    choice = models.choose_drafter(args.drafter, args.target, args.num_drafts)
    target = TargetConfig.from_hf(read_configs(args.target)[0])
    draft = choice.config(target)
    with _fitting():
        context = args.max_context or target.max_context
        fixed = _sizes(args, target, draft, context, args.batch)
    rows = memory.estimate(target, draft, fixed)
    print(
        f"target {args.target}, drafter {choice.name}, {fixed.hidden.dtype}, kernels {args.impl}\n"
        f"{counted(fixed.batch, 'sequence')} of {fixed.capacity} tokens in pages of "
        f"{fixed.page_size}, {counted(fixed.num_drafts, 'draft')} a cycle, "
        f"{counted(fixed.num_rows, 'row')} a step"
    )
    for what, size in [*rows, ("total", sum(size for _, size in rows))]:
        print(f"{what:<18} {size / 2**20:>10.1f} MiB")
    facts = {"target": args.target, "drafter": choice.name, "bytes": dict(rows)}
    print(json.dumps({**facts, "plan": sizes(fixed)}))
    return 0


def _sizes(
    args: argparse.Namespace,
    target: TargetConfig,
    draft: DrafterConfig,
    context: int,
    batch: int,
) -> Fixed:
    return sizes_for(
        target,
        draft,
        dtype=args.dtype or models.default_dtype(),
        batch=batch,
        num_drafts=args.num_drafts,
        page_size=args.page_size,
        max_context=context,
    )


def _headline(pair: Models) -> str:
    device = next(iter(pair.target.embed.devices()))
    how = {"chat": "chat template", "raw": "raw text", "ids": "token ids"}[pair.mode]
    dtype = pair.target.embed.dtype.name
    return f"drafter {pair.choice.name}, {how}, {dtype} on {device.device_kind}"


def _memory_line(rows: list[tuple[str, int]]) -> str:
    parts = ", ".join(f"{what} {size / 2**20:.0f}" for what, size in rows)
    return f"memory: {sum(size for _, size in rows) / 2**20:.0f} MiB ({parts})"
