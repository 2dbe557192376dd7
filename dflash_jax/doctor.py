"""What a target and a drafter are to each other, before anything is compiled.

Every finding is green, amber or red, with its reason; amber and red say what to do. Configs, the
headers of files and the tokenizer are read, weights are not: red is what loading or planning would
refuse, amber what would run and may draft badly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dflash_jax import memory
from dflash_jax.config import DraftConfig, LayerAttention, TargetConfig, default_taps
from dflash_jax.draft_weights import (
    check_tensors,
    drafter_folder,
    read_draft_config,
    read_draft_form,
)
from dflash_jax.fixed import plan
from dflash_jax.json_file import read_json
from dflash_jax.mask_embedding import NAME as MASK_EMBEDDING
from dflash_jax.mtp_config import MtpConfig
from dflash_jax.pairs import misfits
from dflash_jax.tokenizer import Tokenizer
from dflash_jax.weights import PathLike, read_configs, resolve_target
from dflash_jax.words import counted

GREEN, AMBER, RED = "green", "amber", "red"
_CONTEXT = 4096  # tokens that memory is reckoned for, unless the caller says
_FAILURES = (OSError, ValueError, NotImplementedError)


class Finding(NamedTuple):
    """One answer; `mend` is empty where there is nothing to do."""

    topic: str
    level: str
    reason: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What memory is reckoned for; `device_bytes` None compares it with nothing."""

    batch: int = 1
    max_context: int | None = None
    num_drafts: int | None = None
    dtype: str | None = None
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    target: TargetConfig
    draft: DraftConfig
    hf: dict[str, Any]  # of the target
    facts: dict[str, Any]  # of the drafter, under flat keys
    publisher: str
    names_family: bool  # in its config
    says_theta: bool
    has_mask_embedding: bool
    tokenizer: Tokenizer | None
    sizes: Sizes


def verdict(findings: Sequence[Finding]) -> str:
    """The worst level of all."""
    levels = {finding.level for finding in findings}
    return next(level for level in (RED, AMBER, GREEN) if level in levels)


def examine(
    target: PathLike,
    drafter: PathLike,
    sizes: Sizes = Sizes(),  # noqa: B008 (frozen)
) -> list[Finding]:
    """Explain a pair.

    Args:
      target: as `load_target` takes it.
      drafter: as `load_drafter` takes it.
      sizes: what memory is reckoned for.
    """
    try:
        hf = read_configs(target)[0]
        target_config = TargetConfig.from_hf(hf)
    except _FAILURES as error:
        return [Finding("target", RED, _sentence(error), "pass a target that loads")]
    found = [Finding("target", GREEN, _target(target_config, hf))]
    try:
        draft = read_draft_config(drafter, num_target_layers=target_config.num_layers)
        config = read_json(drafter_folder(drafter) / "config.json")
    except _FAILURES as error:
        return [*found, Finding("drafter", RED, _sentence(error), "pass a drafter that loads")]
    tokenizer = _tokenizer(target)
    reds = [Finding(m.topic, RED, m.reason, m.mend) for m in misfits(target_config, draft)]
    if isinstance(draft, MtpConfig):
        return found + (reds or _head(target_config, draft, drafter, tokenizer, sizes))
    form = read_draft_form(drafter, num_target_layers=target_config.num_layers)
    pair = _Pair(
        target=target_config,
        draft=draft,
        hf=hf,
        facts=form.facts,
        names_family=bool(config.get("architectures")),
        says_theta="rope_theta" in _keys(config),
        publisher=form.publisher,
        has_mask_embedding=(drafter_folder(drafter) / MASK_EMBEDDING).exists(),
        tokenizer=tokenizer,
        sizes=sizes,
    )
    found += _drafter(pair, drafter)
    for topic, look in _TOPICS.items():
        mine = [finding for finding in reds if finding.topic == topic]
        found += mine or [finding._replace(topic=topic) for finding in look(pair)]
    return found + ([] if reds else _memory(target_config, draft, sizes))


def _keys(config: Mapping[str, Any]) -> set[str]:
    """Names of what a config says, at any depth."""
    nested = [_keys(value) for value in config.values() if isinstance(value, Mapping)]
    return {name for name, value in config.items() if value is not None}.union(*nested)


def _sentence(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _green(reason: str) -> Finding:
    return Finding("", GREEN, reason)


def _amber(reason: str, mend: str) -> Finding:
    return Finding("", AMBER, reason, mend)


def _tokenizer(target: PathLike) -> Tokenizer | None:
    try:
        return Tokenizer.load(resolve_target(target))
    except FileNotFoundError:
        return None


def _target(config: TargetConfig, hf: dict[str, Any]) -> str:
    stored = hf.get("dtype") or hf.get("torch_dtype") or "dtype not said"
    return (
        f"{config.model_type}, {counted(config.num_layers, 'layer')} of width {config.width}, "
        f"vocabulary {config.vocab}, {stored}"
    )


def _drafter(pair: _Pair, path: PathLike) -> list[Finding]:
    """Family and form, and whether the file has the tensors that its config asks for."""
    draft = pair.draft
    layers = counted(draft.num_layers, "layer")
    what = f"{draft.kind} in {pair.publisher} form, {layers} of {draft.width}"
    try:
        count = check_tensors(path, pair.target)
    except _FAILURES as error:
        mend = "fetch it again, or mend its config"
        return [Finding("drafter", RED, f"{what}; {_sentence(error)}", mend)]
    found = [Finding("drafter", GREEN, f"{what}; all {count} tensors are there, none too many")]
    if not pair.names_family:
        reason = "its config names no architecture; the tensors were taken for the family's"
        found.append(Finding("drafter", AMBER, reason, "write `architectures` into its config"))
    return found


def _width(pair: _Pair) -> Iterator[Finding]:
    yield _green(f"{pair.draft.width}, the target's")


def _taps(pair: _Pair) -> Iterator[Finding]:
    taps, depth = pair.draft.target_layer_ids, pair.target.num_layers
    said = ", ".join("the embedding" if tap < 0 else str(tap) for tap in taps)
    reason = f"reads what layers {said} of 0..{depth - 1} put out"
    usual = default_taps(depth, len(taps)) if depth > 4 else ()
    if taps[-1] == depth - 1:
        yield _amber(
            f"{reason}; the last one is read before the final norm, where some trainers took it "
            "after, and most train on none",
            "compare acceptance, or take a drafter with other taps",
        )
    elif taps == tuple(tap + 1 for tap in usual):
        yield _amber(
            f"{reason}: the usual layers {', '.join(map(str, usual))}, each plus one",
            "if the ids were speculators' `aux_hidden_state_layer_ids`, subtract 1",
        )
    else:
        yield _green(reason)
    if pair.facts.get("target_layer_ids") is None:
        yield _amber("its config names no layers; the formula's were taken", "write them into it")


def _mask(pair: _Pair) -> Iterator[Finding]:
    token = pair.draft.mask_id
    if pair.has_mask_embedding:
        yield _green(f"token {token}, with an embedding of its own in {MASK_EMBEDDING}")
        return
    whose = "its own" if pair.draft.has_embed else "the target's"
    reason = f"token {token}, a row of {whose} embedding"
    text = pair.tokenizer.decode([token]) if pair.tokenizer is not None else ""
    if text:
        yield _amber(
            f"{reason}, but text uses it: {text!r}",
            "check `mask_token_id` against the training configuration",
        )
    else:
        yield _green(f"{reason} that no text uses")


def _vocabulary(pair: _Pair) -> Iterator[Finding]:
    draft, target = pair.draft, pair.target
    if draft.draft_vocab is not None:
        yield _green(f"drafts {draft.draft_vocab} of {draft.vocab} ids, mapped by d2t")
    elif draft.vocab == target.vocab:
        yield _green(f"{draft.vocab} ids, the target's")
    else:
        yield _green(f"{draft.vocab} ids, {draft.vocab - target.vocab} more than the target has")
    own = [name for name, has in (("embedding", draft.has_embed), ("head", draft.has_head)) if has]
    if own:
        yield _green(f"the file has its own {' and '.join(own)}; copies of the target's are shared")
    if pair.tokenizer is not None and pair.tokenizer.vocab_size > target.vocab:
        yield _amber(
            f"the tokenizer has {pair.tokenizer.vocab_size} ids, the target {target.vocab}",
            "use the tokenizer that belongs to the target",
        )


def _rope(pair: _Pair) -> Iterator[Finding]:
    rope = pair.draft.rope
    reason = f"{rope.kind}, theta {rope.theta:g}"
    if rope.kind != "default":
        reason += f", factor {rope.factor:g} over {rope.original_context} positions"
    if not pair.says_theta and rope.theta != pair.target.rope.theta:
        yield _amber(
            f"{reason}, assumed: its config has no rope_theta, and the target's is "
            f"{pair.target.rope.theta:g}",
            "write the theta that it was trained with into its config",
        )
    else:
        yield _green(reason)
    if pair.draft.max_context < pair.target.max_context:
        yield _amber(
            f"made for {pair.draft.max_context} positions, the target for "
            f"{pair.target.max_context}",
            "expect worse drafts beyond; the text stays right",
        )


def _windows(pair: _Pair) -> Iterator[Finding]:
    def said(layer: LayerAttention) -> str:
        return "all keys" if layer.window is None else f"the last {layer.window}"

    yield _green(_by_layer(pair.draft.attention, said))
    kinds = pair.facts.get("layer_types") or ()
    windows = [layer.window for layer in pair.draft.attention]
    if "sliding_attention" in kinds and windows == [None] * len(windows):
        written = pair.facts.get("sliding_window")
        yield _amber(
            f"layers are called sliding, but no window counts (sliding_window is {written}, "
            "use_sliding_window is not true): Hugging Face drops it, and so do we",
            "set use_sliding_window to true if it was trained with one",
        )


def _causality(pair: _Pair) -> Iterator[Finding]:
    def said(layer: LayerAttention) -> str:
        return "causal in the block" if layer.is_causal else "rows see the whole block"

    reason = _by_layer(pair.draft.attention, said)
    is_said = pair.facts.get("is_causal") is not None or pair.facts.get("causal") is not None
    if (
        pair.publisher != "speculators"
        and not is_said
        and any(layer.is_causal for layer in pair.draft.attention)
    ):
        yield _amber(
            f"{reason}; its config does not say, and a sliding layer then counts as causal",
            "write is_causal into its config if you know how it was trained",
        )
    else:
        yield _green(reason)


def _block(pair: _Pair) -> Iterator[Finding]:
    draft = pair.draft
    if draft.drafts_from_anchor:
        how = "every row drafts the token behind its own (next-token rows)"
    else:
        how = "the anchor's row drafts nothing, each other row its own position (fill-in rows)"
    yield _green(f"{counted(draft.block_rows, 'row')}, {counted(draft.max_drafts, 'draft')}; {how}")


def _template(pair: _Pair) -> Iterator[Finding]:
    yield from _template_of(pair.tokenizer)


def _template_of(tokenizer: Tokenizer | None) -> Iterator[Finding]:
    if tokenizer is None:
        yield _amber("the target comes without a tokenizer", "pass token ids (--prompt-ids)")
    elif tokenizer.chat_template is None:
        yield _amber("the tokenizer has no chat template", "prompts are taken as plain text")
    elif "enable_thinking" in tokenizer.chat_template:
        yield _amber(
            "the chat template has a thinking mode, and a drafter is trained in one of the two",
            "compare acceptance with enable_thinking true and false",
        )
    else:
        yield _green("a chat template without a thinking mode")


_TOPICS: dict[str, Callable[[_Pair], Iterator[Finding]]] = {
    "width": _width,
    "taps": _taps,
    "mask": _mask,
    "vocabulary": _vocabulary,
    "rope": _rope,
    "windows": _windows,
    "causality": _causality,
    "block": _block,
    "template": _template,
}


def _memory(target: TargetConfig, draft: DraftConfig | MtpConfig, sizes: Sizes) -> list[Finding]:
    """What a decode of `sizes` would hold, without XLA's temporaries."""
    context = sizes.max_context or min(_CONTEXT, target.max_context)
    try:
        fixed = plan(
            target,
            draft,
            batch=sizes.batch,
            max_context=context,
            num_drafts=sizes.num_drafts,
            dtype=sizes.dtype or "bfloat16",
        )
    except (TypeError, *_FAILURES) as error:
        return [Finding("memory", RED, _sentence(error), "ask for sizes that can be planned")]
    rows = memory.estimate(target, draft, fixed)
    total = sum(size for _, size in rows)
    parts = ", ".join(f"{what} {_mebibytes(size)}" for what, size in rows)
    reason = f"{_mebibytes(total)} for {sizes.batch} x {context} tokens in {fixed.hidden.dtype}"
    limit = sizes.device_bytes
    if limit is not None and total > limit:
        mend = "ask for fewer sequences or a shorter context, or a smaller target"
        reason += f", the device has {_mebibytes(limit)}"
        return [Finding("memory", RED, f"{reason} ({parts})", mend)]
    if limit is not None and total > 0.85 * limit:
        mend = "leave room for XLA's temporaries: a shorter context, or fewer sequences"
        reason += f", nearly all of {_mebibytes(limit)}"
        return [Finding("memory", AMBER, f"{reason} ({parts})", mend)]
    return [Finding("memory", GREEN, f"{reason} ({parts})")]


def _head(
    target: TargetConfig,
    head: MtpConfig,
    path: PathLike,
    tokenizer: Tokenizer | None,
    sizes: Sizes,
) -> list[Finding]:
    """A multi-token-prediction head: of the target's own kind, so that little can disagree."""
    try:
        check_tensors(path, target)
    except _FAILURES as error:
        return [Finding("drafter", RED, f"mtp; {_sentence(error)}", "fetch it again")]
    kinds = [config.model_type.removesuffix("_text") for config in (head.layer, target)]
    drafter = Finding("drafter", GREEN, "mtp, one layer of the target's own kind")
    if kinds[0] != kinds[1]:
        reason = f"mtp, a layer of {kinds[0]} for a target of {kinds[1]}"
        drafter = Finding("drafter", AMBER, reason, "take the head of the target's own checkpoint")
    which = "before" if head.reads_residual else "after"
    template = [finding._replace(topic="template") for finding in _template_of(tokenizer)]
    return [
        drafter,
        Finding("taps", GREEN, f"reads the target's hidden rows {which} the final norm"),
        Finding("vocabulary", GREEN, f"{head.layer.vocab} ids, the target's tables"),
        Finding("block", GREEN, f"{counted(head.max_drafts, 'draft')}, one after another"),
        *template,
        *_memory(target, head, sizes),
    ]


def _by_layer(layers: Sequence[LayerAttention], said: Callable[[LayerAttention], str]) -> str:
    """What is said of each layer, runs of equal ones together."""
    runs: list[tuple[int, int, str]] = []
    for i, layer in enumerate(layers):
        words = said(layer)
        if runs and runs[-1][2] == words:
            runs[-1] = (runs[-1][0], i, words)
        else:
            runs.append((i, i, words))
    if len(runs) == 1:
        return f"all layers: {runs[0][2]}"
    return ", ".join(
        f"layer {a}: {words}" if a == b else f"layers {a}-{b}: {words}" for a, b, words in runs
    )


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"
