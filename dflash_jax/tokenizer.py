"""Text to ids and back over the `tokenizers` package, and chat templates over sandboxed jinja2.

A tokenizer comes from a folder (tokenizer.json, tokenizer_config.json, chat_template.jinja) or from
the metadata of a GGUF file. Templates are code from a stranger, so they run in jinja2's immutable
sandbox, under the settings and with the helpers that Hugging Face templates are written for.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from dflash_jax.json_file import read_json
from dflash_jax.json_values import integer, items, mapping

Message = Mapping[str, Any]

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2_PATTERN = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = _QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_PRE_TOKENIZERS = ("gpt-2", "llama-bpe", "qwen2", "smollm")
_REPLACEMENT = "\ufffd"  # what decoding writes for bytes that are no character (yet)
_KEPT_IDS = 8  # ids that the stream decoder keeps as left context


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's tokenizer with its special tokens and chat template.

    `eos_ids` are the tokenizer's own; `eos_ids()` of this module adds those of the configs.
    """

    backend: tokenizers.Tokenizer
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # bos_token, eos_token, ...
    eos_ids: tuple[int, ...] = ()

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Tokenizer":
        """Read the tokenizer of a checkpoint folder or of a GGUF file."""
        if Path(path).is_file():
            from dflash_jax.gguf import read_gguf

            return Tokenizer.from_gguf(read_gguf(path).tokenizer, who=str(path))
        return Tokenizer.from_folder(path)

    @staticmethod
    def from_folder(folder: str | os.PathLike[str]) -> "Tokenizer":
        """Read tokenizer.json and what lies beside it.

        Raises:
          FileNotFoundError: there is no tokenizer.json.
          ValueError: a file that cannot be parsed.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder}: no tokenizer.json; pass prompts as ids, or add it")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises plain Exception
            raise ValueError(f"{path}: {error}") from None
        config_path = folder / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        _add_missing_tokens(backend, config, folder)
        spelled = {
            name: value.get("content") if isinstance(value, Mapping) else value
            for name, value in config.items()
            if name.endswith("_token")  # also add_bos_token, which is true or false
        }
        special = {name: text for name, text in spelled.items() if isinstance(text, str)}
        eos = backend.token_to_id(special["eos_token"]) if "eos_token" in special else None
        return Tokenizer(
            backend=backend,
            chat_template=_folder_template(folder, config),
            special_tokens=special,
            eos_ids=() if eos is None else (eos,),
        )

    @staticmethod
    def from_gguf(meta: Mapping[str, Any], *, who: str = "GGUF") -> "Tokenizer":
        """Build the tokenizer that `tokenizer.*` metadata describes (byte-level BPE only).

        Raises:
          NotImplementedError: another tokenizer model or pre-tokenizer.
          ValueError: a missing key, or a merge of unknown tokens.
        """
        backend = _gguf_backend(meta, who)
        tokens = meta["tokenizer.ggml.tokens"]
        special = {}
        for name in ("bos", "eos", "pad", "unk"):
            key = {"pad": "padding", "unk": "unknown"}.get(name, name)
            index = meta.get(f"tokenizer.ggml.{key}_token_id")
            if index is not None and 0 <= index < len(tokens):
                special[f"{name}_token"] = tokens[index]
        eos = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
        return Tokenizer(
            backend=backend,
            chat_template=meta.get("tokenizer.chat_template"),
            special_tokens=special,
            eos_ids=tuple(sorted({index for index in eos if index is not None})),
        )

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids; special tokens written in the text are parsed as such."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"text to encode holds U+{ord(text[error.start]):04X}, which is no character: "
                "wanted text that was read as UTF-8"
            ) from None
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Ids to text; bytes that are no character become U+FFFD."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Id of one token by its spelling."""
        return self.backend.token_to_id(token)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        enable_thinking: bool | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Write a conversation as the model's chat template does.

        Args:
          messages: dicts with `role` and `content`.
          add_generation_prompt: end with the opening of an assistant turn.
          continue_final: end inside the last message, so that the model goes on writing it;
            excludes the generation prompt.
          enable_thinking: passed to the template when not None; its own default otherwise.
          tools: JSON schemas of tools, for templates that take them.
        """
        if self.chat_template is None:
            raise ValueError("the tokenizer has no chat template; use raw text (--raw)")
        arguments: dict[str, Any] = dict(self.special_tokens)
        if enable_thinking is not None:
            arguments["enable_thinking"] = enable_thinking
        text = _render(
            self.chat_template,
            messages=[dict(message) for message in messages],
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt and not continue_final,
            **arguments,
        )
        return _cut_after(text, messages[-1]["content"]) if continue_final else text

    def encode_chat(self, messages: Sequence[Message], **options: Any) -> list[int]:
        """`render_chat` as ids; the template writes its own special tokens."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that belongs to a target, named as `load_target` takes it.

    Its `eos_ids` are the union with those of the target's configs. FileNotFoundError: none there.
    """
    from dflash_jax.weights import read_configs, resolve_target  # jax, which text does not need

    found = resolve_target(path)
    tokenizer = Tokenizer.load(found)
    return replace(tokenizer, eos_ids=eos_ids(*read_configs(found), tokenizer))


def eos_ids(
    config: Mapping[str, Any] | None,
    generation_config: Mapping[str, Any] | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[int, ...]:
    """Every id that ends a sequence: the union of both configs' and the tokenizer's."""
    found = set(tokenizer.eos_ids if tokenizer is not None else ())
    config = config or {}
    inner = mapping(config, "text_config", "target config")
    for who, source in (
        ("target config", config),
        ("target config", inner),
        ("generation config", generation_config or {}),
    ):
        if isinstance(source.get("eos_token_id"), list | tuple):
            found.update(items(source, "eos_token_id", who, int))
        elif source.get("eos_token_id") is not None:
            found.add(integer(source, "eos_token_id", who))
    return tuple(sorted(found))


class StreamDecoder:
    """Turn ids that arrive bit by bit into text that never ends in half a character.

    The pieces that `push` and `flush` return add up to `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # recent ids: what is not finished, and context on its left
        self._emitted = 0  # characters of their text that were returned already

    def push(self, ids: Iterable[int]) -> str:
        """Add ids and return the text that is final now."""
        self._ids.extend(int(i) for i in ids)
        text = self._text()
        # A character cut in two decodes as U+FFFD at the end; more ids may complete it.
        stable = text.rstrip(_REPLACEMENT)
        piece = stable[self._emitted :]
        self._emitted = max(self._emitted, len(stable))
        if len(stable) == len(text) and len(self._ids) > 2 * _KEPT_IDS:
            self._ids = self._ids[-_KEPT_IDS:]
            self._emitted = len(self._text())
        return piece

    def flush(self) -> str:
        """Return what was held back: at the end no more ids will complete it."""
        piece = self._text()[self._emitted :]
        self._ids, self._emitted = [], 0
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)


def _gguf_backend(meta: Mapping[str, Any], who: str) -> tokenizers.Tokenizer:
    kind = meta.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise NotImplementedError(
            f"{who}: tokenizer.ggml.model {kind!r} is not supported, wanted gpt2 (byte-level BPE)"
        )
    for name in ("tokens", "merges"):
        if f"tokenizer.ggml.{name}" not in meta:
            raise ValueError(f"{who}: metadata key tokenizer.ggml.{name} is missing")
    pre = meta.get("tokenizer.ggml.pre", "gpt-2")
    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{who}: tokenizer metadata: {error}") from None
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(pre, who)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    _add_gguf_tokens(backend, tokens, meta.get("tokenizer.ggml.token_type") or [])
    bos = meta.get("tokenizer.ggml.bos_token_id")
    if meta.get("tokenizer.ggml.add_bos_token") and bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return backend


def _pre_tokenizer(pre: str, who: str) -> pre_tokenizers.PreTokenizer:
    """The word splitter that llama.cpp's name stands for."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("gpt-2", "default"):
        return byte_level
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    patterns = {"qwen2": _QWEN2_PATTERN, "llama-bpe": _LLAMA3_PATTERN}
    if pre not in patterns:
        raise NotImplementedError(
            f"{who}: tokenizer.ggml.pre {pre!r} is not supported, wanted one of "
            f"{', '.join(_PRE_TOKENIZERS)}"
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[pre]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_gguf_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: Sequence[int]
) -> None:
    """Mark control and user-defined tokens, so that text that spells them gives their one id."""
    typed = list(zip(tokens, kinds, strict=False))
    backend.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in typed if kind == _CONTROL]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in typed if k == _USER_DEFINED])


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], folder: Path
) -> None:
    """Add the tokens that only tokenizer_config.json lists, which some exports rely on."""
    listed = mapping(config, "added_tokens_decoder", f"{folder}: tokenizer_config.json")
    for index, token in listed.items():
        content = token.get("content") if isinstance(token, Mapping) else None
        if not (index.isdecimal() and isinstance(content, str)):
            raise ValueError(
                f"{folder}: tokenizer_config.json: added token {index!r} is {str(token)[:80]}, "
                "wanted an id and its content"
            )
    for index, token in sorted(listed.items(), key=lambda item: int(item[0])):
        content = token["content"]
        if backend.token_to_id(content) is None:
            backend.add_tokens([AddedToken(content, special=bool(token.get("special")))])
        if backend.token_to_id(content) != int(index):
            raise ValueError(
                f"{folder}: token {content!r} is {backend.token_to_id(content)} in tokenizer.json "
                f"and {index} in tokenizer_config.json"
            )


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, else the config's template: one, or the one named default."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: not UTF-8 text ({error.reason})") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, Mapping)]
        template = next((e.get("template") for e in named if e.get("name") == "default"), None)
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{folder}: chat_template is {str(template)[:80]!r}, wanted text")
    return template


def _cut_after(text: str, content: str) -> str:
    """Drop what the template wrote after the last message's content."""
    at = text.rfind(content.strip())
    if at < 0:
        raise ValueError("chat template: it changes the last message, which cannot be continued")
    end = at + len(content.strip())
    kept = content.lstrip()  # trailing spaces stay where the template kept them
    return text[: at + len(kept)] if text.startswith(kept, at) else text[:end]


def _render(template: str, **variables: Any) -> str:
    import jinja2

    try:
        return _environment().from_string(template).render(**variables)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None
    except Exception as error:  # a stranger's code: it can raise anything
        raise ValueError(f"chat template: {error}") from None


def _environment() -> Any:
    """jinja2 as Hugging Face templates expect it."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja2's own filter escapes HTML, which no model was trained on
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(form: str) -> str:
        from datetime import datetime

        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _generation_extension()],
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment


def _generation_extension() -> type:
    """`{% generation %}` marks assistant text for training masks; here it only renders it."""
    import jinja2.ext
    import jinja2.nodes

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    return Generation
