"""Write a tiny random target and drafter in public checkpoint formats, for tests and notebooks.

The target is a Qwen3 or Llama folder, or one of `tiny_hybrid`'s, with a byte-level tokenizer and a
chat template; the drafter is a DFlash, DFlash2 or DSpark folder for it, or one with an MTP head.
NumPy only: no jax, no network, a few hundred kB.

Example:
    python scripts/make_tiny.py /tmp/tiny --target qwen3 --drafter dflash2
    dflash decode "Hello" --target /tmp/tiny/target --drafter /tmp/tiny/drafter
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, `scripts` is no package

from dflash_jax.safetensors_io import write_file
from scripts import tiny_hybrid

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "dspark": "DSparkDraftModel",
    "mtp": "MtpDraftModel",
}
TARGETS = ("qwen3", "llama", *tiny_hybrid.ARCHITECTURES)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Frequent English pairs, so that some tokens have two letters: 47 of them, 256 bytes, three special
# tokens and the mask make an odd vocabulary of 307.
MERGES = (
    "t h,i n,e r,a n,o n,r e,h e,e n,a t,o r,e s,i s,i t,n d,s t,o u,a r,a l,l e,e d,t i,o f,"
    "v e,a s,n g,s e,m e,c o,r o,l l,d e,l i,r i,i o,i c,n e,e a,r a,c e,c h,b e,m a,s i,o m,"
    "u r,n t,w i"
).split(",")


class TinyPair(NamedTuple):
    """Where the two checkpoints are."""

    target: Path
    drafter: Path


def write_tiny_pair(
    folder: str | Path,
    *,
    target: str = "qwen3",
    drafter: str = "dflash2",
    seed: int = 0,
    dtype: str = "float32",
    num_layers: int = 3,
    tied: bool = False,
    block_size: int = 8,
    draft_config: Mapping[str, Any] | None = None,
) -> TinyPair:
    """Write `folder/target` and `folder/drafter`.

    Args:
      folder: made if it does not exist.
      target: "qwen3", "llama", "qwen3_moe", "qwen3_next" or "qwen3_5".
      drafter: "dflash", "dflash2", "dspark" or "mtp".
      seed: of all weights.
      dtype: "float32" or "bfloat16".
      num_layers: of the target; the drafter has two and taps all but the last, three at most.
      tied: whether the head is the embedding.
      block_size: rows of a verification, the anchor included; one more than the drafts.
      draft_config: keys that replace those of the drafter's config.json; `dflash_config` is merged.
    """
    folder = Path(folder)
    pair = TinyPair(folder / "target", folder / "drafter")
    rng = np.random.default_rng(seed)
    hf = target_config(target, num_layers, tied, dtype)
    _write_model(pair.target, hf, _target_tensors(hf, rng), dtype)
    _write_tokenizer(pair.target)
    _write_json(pair.target / "generation_config.json", {"eos_token_id": [305, 303]})
    # An MTP head is of the target's kind; other drafters are dense, whatever the target is.
    is_own_kind = drafter == "mtp" or target not in tiny_hybrid.ARCHITECTURES
    base = hf if is_own_kind else target_config("qwen3", num_layers, tied, dtype)
    draft = drafter_config(drafter, base, block_size)
    changes = dict(draft_config or {})
    if drafter == "mtp":
        draft |= changes
        tensors = _mtp_tensors(draft, rng)
    else:
        draft["dflash_config"] |= changes.pop("dflash_config", {})
        draft |= changes
        tensors = _drafter_tensors(draft, base["hidden_size"], rng)
    _write_model(pair.drafter, draft, tensors, dtype)
    return pair


def target_config(kind: str, num_layers: int, tied: bool, dtype: str) -> dict[str, Any]:
    """config.json of the target: width 64, four query and two kv heads of 16, vocabulary 307."""
    if kind in tiny_hybrid.ARCHITECTURES:
        return tiny_hybrid.config_of(kind, target_config("qwen3", num_layers, tied, dtype))
    architectures = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
    if kind not in architectures:
        raise ValueError(f"target {kind!r}, wanted one of {', '.join(TARGETS)}")
    return {
        "architectures": [architectures[kind]],
        "model_type": kind,
        "vocab_size": 307,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6 if kind == "qwen3" else 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": 303,
        "eos_token_id": 305,
        "dtype": dtype,
    }


def drafter_config(kind: str, target: Mapping[str, Any], block_size: int) -> dict[str, Any]:
    """config.json of a two-layer drafter for `target`, the first layer sliding for DFlash2.

    An MTP head has one layer, the target's own kind.
    """
    if kind not in ARCHITECTURES:
        raise ValueError(f"drafter {kind!r}, wanted one of {', '.join(ARCHITECTURES)}")
    if kind == "mtp":
        own = {"mtp_num_hidden_layers": 1, "num_speculative_tokens": block_size - 1}
        return {**target, "architectures": [ARCHITECTURES[kind]]} | own
    taps = list(range(target["num_hidden_layers"] - 1))[-3:]
    nested: dict[str, Any] = {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": taps}
    config = {**target, "architectures": [ARCHITECTURES[kind]], "model_type": "qwen3"}
    for name in ("bos_token_id", "eos_token_id"):
        del config[name]
    config |= {
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_target_layers": target["num_hidden_layers"],
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention", "full_attention"],
        "use_sliding_window": False,
        "sliding_window": None,
        "dflash_config": nested,
    }
    if kind == "dflash":
        return config | {"block_size": block_size}
    if kind == "dspark":
        nested |= {
            "block_size": block_size - 1,  # the anchor's row drafts as well
            "markov_rank": 16,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
        return config
    nested |= {
        "block_size": block_size,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 16,
        "selector_top_k": 16,
    }
    window = {"use_sliding_window": True, "sliding_window": 32, "is_causal": False}
    return config | window | {"layer_types": ["sliding_attention", "full_attention"]}


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    return rng.standard_normal((rows, columns)) / np.sqrt(columns)


def _gain(rng: np.random.Generator, size: int) -> np.ndarray:
    return 1.0 + 0.1 * rng.standard_normal(size)


def _layer(config: Mapping[str, Any], rng: np.random.Generator, has_qk_norm: bool) -> dict:
    width, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    layer = {
        "input_layernorm.weight": _gain(rng, width),
        "self_attn.q_proj.weight": _matrix(rng, query, width),
        "self_attn.k_proj.weight": _matrix(rng, kv, width),
        "self_attn.v_proj.weight": _matrix(rng, kv, width),
        "self_attn.o_proj.weight": _matrix(rng, width, query),
        "post_attention_layernorm.weight": _gain(rng, width),
        "mlp.gate_proj.weight": _matrix(rng, ffn, width),
        "mlp.up_proj.weight": _matrix(rng, ffn, width),
        "mlp.down_proj.weight": _matrix(rng, width, ffn),
    }
    if has_qk_norm:
        # Gains of about two make attention pick a few keys, so that a wrong key changes tokens.
        layer["self_attn.q_norm.weight"] = 2.0 * _gain(rng, dim)
        layer["self_attn.k_norm.weight"] = 2.0 * _gain(rng, dim)
    return layer


def _target_tensors(hf: Mapping[str, Any], rng: np.random.Generator) -> dict:
    config = tiny_hybrid.text_of(hf)
    vocab, width = config["vocab_size"], config["hidden_size"]
    at = "model.language_model." if "text_config" in hf else "model."
    tensors = {f"{at}embed_tokens.weight": rng.standard_normal((vocab, width))}
    last = config["num_hidden_layers"] - 1
    for i in range(last + 1):
        layer = _target_layer(config, rng, is_full_attention=i == last)
        tensors |= {f"{at}layers.{i}.{name}": x for name, x in layer.items()}
    tensors[f"{at}norm.weight"] = _gain(rng, width)
    tensors |= tiny_hybrid.outer_tensors(hf)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = 4.0 * _matrix(rng, vocab, width)
    return tensors


def _target_layer(config: Mapping[str, Any], rng, *, is_full_attention: bool) -> dict:
    """A layer of the target's kind; in a dense one every layer is full attention."""
    if config["model_type"] in ("qwen3", "llama"):
        return _layer(config, rng, has_qk_norm=config["model_type"] == "qwen3")
    is_full_attention |= config["model_type"] == "qwen3_moe"
    return tiny_hybrid.layer_tensors(config, rng, is_full_attention)


def _drafter_tensors(config: Mapping[str, Any], target_width: int, rng) -> dict:
    width, nested = config["hidden_size"], config["dflash_config"]
    tensors = {
        "fc.weight": _matrix(rng, width, len(nested["target_layer_ids"]) * target_width),
        "hidden_norm.weight": _gain(rng, width),
        "norm.weight": _gain(rng, width),
    }
    has_second = config["architectures"] == ["DFlash2DraftModel"]
    for i in range(config["num_hidden_layers"]):
        layer = _layer(config, rng, has_qk_norm=True)
        if has_second:
            layer |= _conv("attention_conv.", width, nested, rng)
            layer |= _conv("mlp_conv.", width, nested, rng)
        tensors |= {f"layers.{i}.{name}": x for name, x in layer.items()}
    if has_second:
        vocab, rank = config["vocab_size"], nested["selector_rank"]
        tensors |= {
            "candidate_selector.hidden_projection.weight": _matrix(rng, rank, width),
            "candidate_selector.predecessor_codebook": rng.standard_normal((vocab, rank)),
            "candidate_selector.successor_codebook": rng.standard_normal((vocab, rank)),
        }
    if config["architectures"] == ["DSparkDraftModel"]:
        tensors |= _spark_heads(config["vocab_size"], width, nested, rng)
    return tensors


def _spark_heads(vocab: int, width: int, nested: Mapping[str, Any], rng) -> dict:
    """Markov head, its biases about half as large as the logits, and confidence head."""
    rank, heads = nested["markov_rank"], {}
    if rank:
        heads["markov_head.markov_w1.weight"] = rng.standard_normal((vocab, rank))
        heads["markov_head.markov_w2.weight"] = 2.0 * _matrix(rng, vocab, rank)
    mixes = {"gated": ("gate_proj", 1, 1), "rnn": ("joint_proj", 3, 2)}
    if rank and nested["markov_head_type"] in mixes:
        name, parts, latents = mixes[nested["markov_head_type"]]
        mix = _matrix(rng, parts * rank, width + latents * rank)
        heads[f"markov_head.{name}.weight"] = mix
        heads[f"markov_head.{name}.bias"] = 0.1 * rng.standard_normal(parts * rank)
    if nested["enable_confidence_head"]:
        columns = width + (rank if nested["confidence_head_with_markov"] else 0)
        heads["confidence_head.proj.weight"] = 2.0 * _matrix(rng, 1, columns)
        heads["confidence_head.proj.bias"] = np.ones(1)
    return heads


def _mtp_tensors(hf: Mapping[str, Any], rng: np.random.Generator) -> dict:
    config = tiny_hybrid.text_of(hf)
    width = config["hidden_size"]
    tensors = {"fc.weight": _matrix(rng, width, 2 * width)}
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"{name}.weight"] = _gain(rng, width)
    layer = _target_layer(config, rng, is_full_attention=True)
    tensors |= {f"layers.0.{name}": x for name, x in layer.items()}
    return {f"mtp.{name}": x for name, x in tensors.items()}


def _conv(at: str, width: int, nested: Mapping[str, Any], rng: np.random.Generator) -> dict:
    taps, groups = nested["conv_kernel_size"], width // nested["conv_group_size"]
    base = 0.1 * rng.standard_normal((2, taps, width))
    base[:, 0] += 1.0  # near the identity, where training starts
    projection = 0.3 * _matrix(rng, 2 * taps * groups, width)
    return {f"{at}base_kernel": base, f"{at}kernel_projection.weight": projection}


def _write_model(folder: Path, config: Mapping[str, Any], tensors: Mapping, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}, wanted one of {', '.join(DTYPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: x.astype(np.float32).astype(DTYPES[dtype]) for name, x in tensors.items()}
    write_file(folder / "model.safetensors", stored, {"format": "pt"})
    _write_json(folder / "config.json", config)


def _write_tokenizer(folder: Path) -> None:
    """256 bytes, two-letter merges, three special tokens: ids 0 to 305; 306 is the mask's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    merges: list[tuple[str, str]] = [(merge[0], merge[2]) for merge in MERGES]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    _write_json(folder / "tokenizer_config.json", config)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Write a tiny random target and drafter.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="gets the folders target and drafter")
    parser.add_argument("--target", choices=TARGETS, default="qwen3")
    parser.add_argument("--drafter", choices=tuple(ARCHITECTURES), default="dflash2")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--block-size", type=int, default=8, help="rows of a verification")
    parser.add_argument("--tied", action="store_true", help="no head of its own")
    parser.add_argument("--seed", type=int, default=0)
    args = vars(parser.parse_args(argv))
    pair = write_tiny_pair(args.pop("folder"), **args)
    print(f"target:  {pair.target}\ndrafter: {pair.drafter}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
