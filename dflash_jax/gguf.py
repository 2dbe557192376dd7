"""GGUF files over the `gguf` package: metadata to a Hugging Face style config, tensors by HF name.

Tensors are dequantised when they are looked up, one at a time, so a model never stands in memory
twice. llama.cpp stores the q and k rows of `llama` models interleaved; that is undone here, so
whoever reads the result sees the layout of the original checkpoint.
"""

import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, quants

ARCHITECTURES = ("llama", "qwen3")

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
# Metadata that changes what the model computes and that no supported architecture of ours has.
_UNSUPPORTED_KEYS = (
    "attention.clamp_kqv",
    "attention.scale",
    "attention.sliding_window",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.scaling.yarn_log_multiplier",
)


class GgufModel(NamedTuple):
    """What a GGUF file holds, under Hugging Face's names."""

    config: dict[str, Any]
    tensors: Mapping[str, np.ndarray]  # HF name -> f32, f16 or bf16, made when looked up
    tokenizer: dict[str, Any]  # the `tokenizer.*` metadata, full keys


def read_gguf(path: str | os.PathLike[str]) -> GgufModel:
    """Read a GGUF file of a supported architecture.

    Raises:
      ValueError: not a GGUF file, truncated, or a key or tensor that does not belong.
      NotImplementedError: an architecture, rope scaling or quantisation that is not supported.
    """
    path = Path(path)
    reader, meta = _open(path)
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise NotImplementedError(
            f"{path}: GGUF architecture {arch!r} is not supported, wanted one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    if meta.get("split.count", 1) > 1:
        raise NotImplementedError(
            f"{path}: part {meta.get('split.no', 0) + 1} of {meta['split.count']}; split GGUF "
            "files are not supported, merge them first"
        )
    config = _hf_config(path, arch, meta, reader)
    tokenizer = {name: value for name, value in meta.items() if name.startswith("tokenizer.")}
    return GgufModel(config, _Tensors(path, arch, config, reader), tokenizer)


class _Reader(GGUFReader):
    """The package's reader, stopped at the end of the file and quick on long arrays.

    Without the first a slice past the end is silently short, and a hostile array length loops for
    years; without the second a vocabulary of 49,152 tokens takes six seconds instead of 0.2.
    """

    def _get(self, offset, dtype, count=1, override_order=None):  # the package gives no types here
        self._require(int(offset) + int(count) * np.dtype(dtype).itemsize)
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs, raw_type):
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, length = GGUFValueType(int(head[0][0])), int(head[1][0])
        start = orig_offs + 12
        if kind == GGUFValueType.STRING:
            end, values = self._strings(start, length)
        elif kind in self.gguf_scalar_to_np:
            values = [self._get(start, self.gguf_scalar_to_np[kind], length)]
            end = start + values[0].nbytes
        else:
            raise ValueError(f"arrays of {kind.name} are not supported")
        indices = list(range(2, 2 + len(values)))
        return end - orig_offs, head + values, indices, [GGUFValueType.ARRAY, kind]

    def _strings(self, start: int, length: int) -> tuple[int, list[np.ndarray]]:
        raw, values = np.asarray(self.data), []
        order = "<Q" if self.byte_order == "I" else ">Q"
        for _ in range(length):
            self._require(start + 8)
            end = start + 8 + struct.unpack_from(order, raw, start)[0]
            self._require(end)
            values.append(raw[start + 8 : end])
            start = end
        return start, values

    def _require(self, end: int) -> None:
        if end > self.data.size:
            raise ValueError(f"byte {end} is wanted, the file has {self.data.size} (truncated?)")


def _open(path: Path) -> tuple[GGUFReader, dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such GGUF file")
    try:
        reader = _Reader(path)
        meta = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        raise ValueError(f"{path}: not a readable GGUF file ({error})") from error
    if reader.byte_order != "I":
        raise NotImplementedError(f"{path}: a GGUF file of the other byte order is not supported")
    return reader, meta


def _hf_config(path: Path, arch: str, meta: dict[str, Any], reader: GGUFReader) -> dict[str, Any]:
    """Build the `config.json` that the original checkpoint would have."""

    def get(name: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{name}", default)
        if value is None:
            raise ValueError(f"{path}: metadata key {arch}.{name} is missing")
        return value

    for name in _UNSUPPORTED_KEYS:
        if meta.get(f"{arch}.{name}"):
            raise NotImplementedError(
                f"{path}: {arch}.{name} = {meta[f'{arch}.{name}']} is not supported"
            )
    shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}
    if "token_embd.weight" not in shapes:
        raise ValueError(f"{path}: tensor 'token_embd.weight' is missing")
    width, heads = int(get("embedding_length")), int(get("attention.head_count"))
    kv_heads = meta.get(f"{arch}.attention.head_count_kv", heads)
    if isinstance(kv_heads, list):
        raise NotImplementedError(f"{path}: kv heads that differ by layer are not supported")
    head_dim = int(get("attention.key_length", width // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if int(get(name, head_dim)) != head_dim:
            raise NotImplementedError(
                f"{path}: {arch}.{name} = {get(name)} is not supported, wanted the head_dim "
                f"{head_dim}"
            )
    config = {
        "model_type": arch,
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]],
        "hidden_size": width,
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(kv_heads),
        "head_dim": head_dim,
        "intermediate_size": int(get("feed_forward_length")),
        "vocab_size": shapes["token_embd.weight"][0],
        "rms_norm_eps": _decimal(get("attention.layer_norm_rms_epsilon")),
        "rope_theta": _decimal(get("rope.freq_base", 10000.0)),
        "max_position_embeddings": int(get("context_length")),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "hidden_act": "silu",
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _eos(meta),
        "dtype": _dtype(reader),
    }
    config["rope_scaling"] = _rope_scaling(path, arch, meta, reader, config)
    return config


def _decimal(value: float) -> float:
    """The decimal that was rounded to the file's f32: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _eos(meta: dict[str, Any]) -> list[int]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({meta[name] for name in names if meta.get(name) is not None})


def _dtype(reader: GGUFReader) -> str:
    """The storage type of a whole float file; bfloat16 for a quantised one."""
    kinds = {t.tensor_type for t in reader.tensors if len(t.shape) > 1}
    if kinds <= {GGMLQuantizationType.F32}:
        return "float32"
    return "float16" if kinds <= {GGMLQuantizationType.F16} else "bfloat16"


def _rope_scaling(
    path: Path, arch: str, meta: dict[str, Any], reader: GGUFReader, config: dict[str, Any]
) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling."
    kind = meta.get(prefix + "type", "none")
    factor = meta.get(prefix + "factor") or meta.get(f"{arch}.rope.scale_linear") or 1.0
    table = next((t for t in reader.tensors if t.name == _ROPE_FREQS), None)
    if table is not None:
        if kind != "none":
            raise NotImplementedError(f"{path}: {_ROPE_FREQS} with rope scaling {kind!r}")
        original = meta.get(prefix + "original_context_length")
        return _llama3_scaling(path, np.asarray(table.data, np.float32), original, config)
    if kind == "linear" or (kind == "none" and factor != 1.0):
        return {"rope_type": "linear", "factor": float(factor)}
    if kind == "yarn":
        return _yarn_scaling(path, prefix, meta, float(factor))
    if kind != "none":
        raise NotImplementedError(
            f"{path}: rope scaling {kind!r} is not supported, wanted none, linear, yarn or a "
            f"{_ROPE_FREQS} table"
        )
    return None


def _yarn_scaling(path: Path, prefix: str, meta: dict[str, Any], factor: float) -> dict[str, Any]:
    """llama.cpp's YaRN; its attention factor multiplies the usual 0.1 ln(factor) + 1."""
    original = meta.get(prefix + "original_context_length")
    if not original:
        raise ValueError(f"{path}: metadata key {prefix}original_context_length is missing")
    if meta.get(prefix + "yarn_ext_factor", 1.0) != 1.0:
        raise NotImplementedError(f"{path}: {prefix}yarn_ext_factor other than 1 is not supported")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": int(original),
        "beta_fast": _decimal(meta.get(prefix + "yarn_beta_fast", 32.0)),
        "beta_slow": _decimal(meta.get(prefix + "yarn_beta_slow", 1.0)),
    }
    attention = meta.get(prefix + "yarn_attn_factor", meta.get(prefix + "attn_factor", 1.0))
    if attention != 1.0:
        scaling["attention_factor"] = float(attention) * (0.1 * float(np.log(factor)) + 1.0)
    return scaling


def _llama3_scaling(
    path: Path, table: np.ndarray, original: int | None, config: dict[str, Any]
) -> dict[str, Any]:
    """Find the Llama 3 parameters that give exactly this table of frequency divisors.

    GGUF keeps only the table; every published Llama 3.x has low 1, high 4 and length 8192.
    """
    dim, theta = config["head_dim"], config["rope_theta"]
    factor = float(table.max())
    wavelength = 2 * np.pi * theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
    for length in (original or 8192, 8192):
        smooth = np.clip((length / wavelength - 1.0) / (4.0 - 1.0), 0.0, 1.0)
        if np.allclose(table, 1.0 / ((1 - smooth) / factor + smooth), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": int(length),
            }
    raise NotImplementedError(
        f"{path}: tensor {_ROPE_FREQS!r} is no table of Llama 3 rope scaling (low 1, high 4)"
    )


def _hf_name(path: Path, name: str) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    match = _LAYER_PATTERN.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise ValueError(f"{path}: tensor {name!r} is not one of a llama or qwen3 model")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"


class _Tensors(Mapping[str, np.ndarray]):
    """HF name -> tensor in the original layout, dequantised at each look-up."""

    def __init__(self, path: Path, arch: str, config: dict[str, Any], reader: GGUFReader) -> None:
        self._path, self._reader = path, reader
        self._tensors = {_hf_name(path, t.name): t for t in reader.tensors if t.name != _ROPE_FREQS}
        self._heads = {}  # rows to put back in order, by the name's ending
        if arch == "llama":
            self._heads = {
                "q_proj": config["num_attention_heads"],
                "k_proj": config["num_key_value_heads"],
            }

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        array = _dequantise(self._path, tensor.name, tensor.tensor_type, tensor.data)
        parts = name.split(".")
        heads = self._heads.get(parts[-2]) if len(parts) > 1 else None
        return array if heads is None else _undo_interleave(array, heads)

    def __contains__(self, name: object) -> bool:  # Mapping's own would dequantise
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _dequantise(path: Path, name: str, kind: GGMLQuantizationType, data: np.ndarray) -> np.ndarray:
    if kind in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        return data
    if kind == GGMLQuantizationType.BF16:
        return data.view(ml_dtypes.bfloat16)
    try:
        return quants.dequantize(data, kind)
    except NotImplementedError:
        raise NotImplementedError(
            f"{path}: tensor {name!r} is {kind.name}, which the gguf package does not dequantise"
        ) from None


def _undo_interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head from (0, D/2, 1, D/2+1, ...) back to (0, 1, ..., D-1)."""
    rows = array.reshape(heads, -1, 2, *array.shape[1:])  # [H, D/2, 2, in]
    return rows.swapaxes(1, 2).reshape(array.shape)
