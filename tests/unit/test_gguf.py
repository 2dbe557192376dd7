import math

import ml_dtypes
import numpy as np
import pytest

from dflash_jax.gguf import read_gguf
from tests.unit.gguf_files import (
    DIM,
    FFN,
    HEADS,
    KV_HEADS,
    VOCAB,
    WIDTH,
    Kind,
    hf_tensors,
    write_gguf,
)


def dequantised_q8_0(array):
    """32 values share one float16 scale, max |x| / 127."""
    blocks = array.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / 127
    steps = np.round(blocks / scale)
    return (steps * scale.astype(np.float16).astype(np.float32)).reshape(array.shape)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_tensors_come_back_under_their_names_in_the_original_row_order(tmp_path, arch):
    tensors = hf_tensors(np.random.default_rng(0), 2, has_qk_norm=arch == "qwen3")
    model = read_gguf(write_gguf(tmp_path / "m.gguf", tensors, arch))
    assert set(model.tensors) == set(tensors) and len(model.tensors) == len(tensors)
    for name, array in tensors.items():
        assert model.tensors[name].dtype == np.float32
        np.testing.assert_array_equal(model.tensors[name], array, err_msg=name)
    assert "nothing" not in model.tensors


def test_config_is_the_one_of_the_original_checkpoint(tmp_path):
    model = read_gguf(write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(0), 2)))
    assert model.config == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": [2],
        "dtype": "float32",
    }
    assert model.tokenizer["tokenizer.ggml.tokens"][7] == "t7"


def test_a_head_of_its_own_makes_the_model_untied(tmp_path):
    tensors = hf_tensors(np.random.default_rng(0))
    tensors["lm_head.weight"] = np.ones((VOCAB, WIDTH), np.float32)
    model = read_gguf(write_gguf(tmp_path / "m.gguf", tensors))
    assert model.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in model.tensors


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.Q5_0, Kind.F16, Kind.BF16])
def test_quantised_matrices_are_near_the_originals_and_norms_exact(tmp_path, kind):
    tensors = hf_tensors(np.random.default_rng(1))
    model = read_gguf(write_gguf(tmp_path / "m.gguf", tensors, kind=kind))
    # Half a step of a block of 32 normal values, whose largest is below 4.5 here.
    atol = {Kind.Q8_0: 0.02, Kind.Q4_1: 0.3, Kind.Q5_0: 0.3, Kind.F16: 2e-3, Kind.BF16: 2e-2}[kind]
    for name, array in tensors.items():
        found = np.asarray(model.tensors[name], np.float32)
        np.testing.assert_allclose(found, array, atol=atol if array.ndim == 2 else 0, rtol=0)
    assert model.config["dtype"] == ("float16" if kind == Kind.F16 else "bfloat16")
    if kind == Kind.BF16:
        stored = model.tensors["model.embed_tokens.weight"]
        assert stored.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(
            stored, tensors["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
        )


def test_q8_0_equals_the_block_formula(tmp_path):
    tensors = hf_tensors(np.random.default_rng(2))
    model = read_gguf(write_gguf(tmp_path / "m.gguf", tensors, kind=Kind.Q8_0))
    name = "model.layers.0.mlp.down_proj.weight"
    np.testing.assert_array_equal(model.tensors[name], dequantised_q8_0(tensors[name]))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 8.0,
                "llama.rope.scaling.original_context_length": 64,
            },
            {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
        ),
    ],
    ids=["none", "linear", "old linear", "yarn"],
)
def test_rope_scaling_metadata_is_translated(tmp_path, keys, expected):
    tensors = hf_tensors(np.random.default_rng(0))
    config = read_gguf(write_gguf(tmp_path / "m.gguf", tensors, keys=keys)).config
    assert config["rope_scaling"] == expected


def llama3_divisors(factor, low, high, length, theta=1e5):
    """Frequency divisors as Llama 3's rule says them, one frequency at a time."""
    divisors = []
    for j in range(DIM // 2):
        wavelength = 2 * math.pi * theta ** (2 * j / DIM)
        if wavelength < length / high:
            divisors.append(1.0)
        elif wavelength > length / low:
            divisors.append(factor)
        else:
            smooth = (length / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_a_llama3_table_of_divisors_is_recognised(tmp_path):
    extra = {"rope_freqs.weight": llama3_divisors(8.0, 1, 4, 8192)}
    tensors = hf_tensors(np.random.default_rng(0))
    model = read_gguf(write_gguf(tmp_path / "m.gguf", tensors, extra=extra))
    assert model.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert "rope_freqs.weight" not in model.tensors


def test_another_table_of_divisors_is_refused(tmp_path):
    extra = {"rope_freqs.weight": llama3_divisors(8.0, 1, 8, 8192)}
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(0)), extra=extra)
    with pytest.raises(NotImplementedError, match="'rope_freqs.weight' is no table of Llama 3"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama.expert_count": 8}, "llama.expert_count = 8 is not supported"),
        ({"llama.attention.sliding_window": 128}, "sliding_window = 128 is not supported"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0 is not supported"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count = 8 is not supported"),
        ({"split.count": 3, "split.no": 1}, "part 2 of 3"),
    ],
)
def test_metadata_that_cannot_be_honoured_is_refused(tmp_path, keys, message):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(0)), keys=keys)
    with pytest.raises(NotImplementedError, match=message):
        read_gguf(path)


def test_an_unknown_architecture_lists_what_is_supported(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(0)), arch="gemma3")
    with pytest.raises(NotImplementedError, match="'gemma3' is not supported, wanted .*llama, q"):
        read_gguf(path)


def test_an_unknown_tensor_is_named(tmp_path):
    extra = {"blk.0.attn_gate.weight": np.zeros(3, np.float32)}
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(0)), extra=extra)
    with pytest.raises(ValueError, match="m.gguf: tensor 'blk.0.attn_gate.weight'"):
        read_gguf(path)


def test_a_truncated_or_foreign_file_is_one_clear_error(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(0)))
    raw = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in (3, 20, 200, 1500, len(raw) - 40):
        cut.write_bytes(raw[:size])
        with pytest.raises(ValueError, match="cut.gguf: not a readable GGUF file"):
            read_gguf(cut)
    cut.write_bytes(b"PK\x03\x04" + raw[4:])
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        read_gguf(cut)
    with pytest.raises(FileNotFoundError, match="no such GGUF file"):
        read_gguf(tmp_path / "none.gguf")


def test_a_hostile_array_length_does_not_loop(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", hf_tensors(np.random.default_rng(0)))
    raw = path.read_bytes()
    # key, type 9 (array), item type 8 (string), then the length
    at = raw.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    for length in (2**62, 2**64 - 1):
        path.write_bytes(raw[:at] + length.to_bytes(8, "little") + raw[at + 8 :])
        with pytest.raises(ValueError, match="not a readable GGUF file"):
            read_gguf(path)
    # the same for numbers: item type 4 (uint32)
    swapped = raw[: at - 4] + (4).to_bytes(4, "little") + (2**62).to_bytes(8, "little")
    path.write_bytes(swapped + raw[at + 8 :])
    with pytest.raises(ValueError, match="not a readable GGUF file"):
        read_gguf(path)
