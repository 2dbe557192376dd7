"""The pair that a command line names: which drafter goes with a target, how text becomes ids."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax.config import RuleConfig, TargetConfig
from dflash_jax.drafters import no_drafter, oracle_drafter, prompt_lookup_drafter
from dflash_jax.drafters.confidence import with_threshold
from dflash_jax.mtp_config import DrafterConfig
from dflash_jax.packaged import our_drafters
from dflash_jax.params import DrafterParams, Params, TargetParams
from dflash_jax.prompts import Request, UsageError
from dflash_jax.reports.progress import bar
from dflash_jax.tokenizer import Tokenizer, eos_ids
from dflash_jax.weight_layout import laid_out
from dflash_jax.weights import (
    DEFAULT_TARGET,
    load_drafter,
    load_target,
    read_configs,
    read_draft_config,
    resolve_target,
)

RULE_DRAFTS = 7  # drafts a cycle of drafters without weights, unless --num-drafts says
BEST_DRAFTER = "dflash2"  # of ours for the default target


@dataclass(frozen=True, slots=True)
class DrafterChoice:
    """A drafter by name; `accepts` is how many drafts an oracle gets accepted, None for others."""

    name: str
    num_drafts: int | None
    accepts: int | None = None

    def load(self, target: TargetParams | None) -> DrafterParams | None:
        """The drafter's params; None for an oracle, which must know the text first."""
        if self.accepts is not None:
            return None
        if self.name == "none":
            return no_drafter()
        if self.name == "prompt_lookup":
            return prompt_lookup_drafter(num_drafts=self.most)
        return load_drafter(self.path, target)

    def config(self, target: TargetConfig) -> DrafterConfig:
        """The drafter's config, without its weights."""
        if not self.has_weights:
            params = self.load(None)
            return RuleConfig("oracle", self.most) if params is None else params.config
        return read_draft_config(self.path, num_target_layers=target.num_layers)

    @property
    def most(self) -> int:
        """Drafts a cycle of a drafter without weights."""
        return self.num_drafts or RULE_DRAFTS

    @property
    def has_weights(self) -> bool:
        return self.name not in ("none", "prompt_lookup") and self.accepts is None

    @property
    def path(self) -> str:
        is_ours = self.name in our_drafters(DEFAULT_TARGET)
        return f"{DEFAULT_TARGET}-{self.name}" if is_ours else self.name


def choose_drafter(drafter: str | None, target: str, num_drafts: int | None) -> DrafterChoice:
    """Settle what `--drafter` means for a target; what contradicts itself is refused."""
    if drafter is None:
        drafter = BEST_DRAFTER if target == DEFAULT_TARGET else "prompt_lookup"
    if drafter in our_drafters(DEFAULT_TARGET) and target != DEFAULT_TARGET:
        raise UsageError(
            f"--drafter {drafter} names our drafter for {DEFAULT_TARGET}, but the target is "
            f"{target}; pass the folder of one that was made for it"
        )
    if drafter == "none" and num_drafts is not None:
        raise UsageError("--num-drafts is given, but --drafter none proposes nothing")
    most = num_drafts or RULE_DRAFTS
    kind, colon, count = drafter.partition(":")
    if drafter == "oracle":
        return DrafterChoice(drafter, num_drafts, accepts=most)
    if kind == "poison":
        if colon and not (count.isdecimal() and int(count) <= most):
            raise UsageError(f"--drafter {drafter}: wanted poison:K with K from 0 to {most}")
        return DrafterChoice(drafter, num_drafts, accepts=int(count or most // 2))
    return DrafterChoice(drafter, num_drafts)


@dataclass(frozen=True, slots=True)
class Models:
    """What a decode works with."""

    target: TargetParams
    draft: DrafterParams | None  # None: an oracle, made once the text is known
    choice: DrafterChoice
    tokenizer: Tokenizer | None
    stop_ids: tuple[int, ...]
    mode: str  # "chat", "raw" or "ids"

    @property
    def draft_config(self) -> DrafterConfig:
        return self.choice.config(self.target.config) if self.draft is None else self.draft.config

    def pair(self) -> Params:
        assert self.draft is not None
        return Params(target=self.target, draft=self.draft)

    def oracle_pair(self, known: np.ndarray, num_drafts: int) -> Params:
        """The target with an oracle that knows i32[B, S] tokens by absolute position."""
        drafter = oracle_drafter(
            jnp.asarray(known), num_drafts=num_drafts, poison_at=self.choice.accepts
        )
        return Params(target=self.target, draft=drafter)


def load(args: argparse.Namespace) -> Models:
    """Load what the arguments name, the cheap and the fallible parts first."""
    choice = choose_drafter(args.drafter, args.target, args.num_drafts)
    path = resolve_target(args.target)
    try:
        tokenizer = Tokenizer.load(path)
    except FileNotFoundError:
        if any(request.ids is None for request in args.requests):
            raise
        tokenizer = None  # token ids need none
    mode = _mode(args, tokenizer)
    config, generation = read_configs(path)
    stops = args.eos_ids or eos_ids(config, generation, tokenizer)
    with bar(f"loading target {args.target}") as progress:
        target = load_target(
            path,
            dtype=args.dtype or default_dtype(),
            real_vocab=None if tokenizer is None else tokenizer.vocab_size,
            progress=progress,
        )
    draft = choice.load(target)
    if args.min_confidence is not None:
        draft = _with_threshold(draft, args.min_confidence)
    return Models(
        target=laid_out(target, args.impl),
        draft=None if draft is None else laid_out(draft, args.impl),
        choice=choice,
        tokenizer=tokenizer,
        stop_ids=() if args.ignore_eos else stops,
        mode=mode,
    )


def _with_threshold(draft: DrafterParams | None, threshold: float) -> DrafterParams:
    try:
        return with_threshold(draft, threshold)
    except ValueError as error:
        raise UsageError(f"--min-confidence: {error}") from None


def default_dtype() -> str:
    """bfloat16 is emulated on a CPU, and slow there."""
    return "bfloat16" if jax.default_backend() == "gpu" else "float32"


def _mode(args: argparse.Namespace, tokenizer: Tokenizer | None) -> str:
    """How prompts become ids; what the tokenizer cannot do is refused."""
    if args.prompt_ids is not None:
        return "ids"
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    mode = args.mode or ("chat" if has_template else "raw")
    has_chats = any(request.messages is not None for request in args.requests)
    if not has_template and (mode == "chat" or args.system is not None or has_chats):
        has_system = args.system is not None
        what = "--chat" if mode == "chat" else "--system" if has_system else '"messages"'
        raise UsageError(f"{what} needs a chat template, and the target's tokenizer has none")
    return mode


def prompt_ids(request: Request, models: Models, system: str | None) -> Sequence[int]:
    """A request as token ids, in the mode that `models` says."""
    if request.ids is not None:
        return request.ids
    assert models.tokenizer is not None  # `load` has raised without one
    if models.mode == "raw":
        return models.tokenizer.encode(request.text or "")
    messages = request.messages or ({"role": "user", "content": request.text or ""},)
    if system is not None:
        if messages[0]["role"] == "system":
            raise UsageError("it has a system message, and --system is given")
        messages = ({"role": "system", "content": system}, *messages)
    return models.tokenizer.encode_chat(messages)
