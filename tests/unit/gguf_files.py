"""Write tiny GGUF files from tensors under Hugging Face names."""

import gguf
import numpy as np

Kind = gguf.GGMLQuantizationType
HEADS, KV_HEADS, DIM, WIDTH, FFN, VOCAB = 4, 2, 16, 64, 96, 40


def hf_tensors(rng, num_layers=1, has_qk_norm=False):
    """A tiny model under Hugging Face names, in Hugging Face layout."""

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(VOCAB, WIDTH), "model.norm.weight": normal(64)}
    for i in range(num_layers):
        at = f"model.layers.{i}."
        tensors |= {
            f"{at}input_layernorm.weight": normal(WIDTH),
            f"{at}post_attention_layernorm.weight": normal(WIDTH),
            f"{at}self_attn.q_proj.weight": normal(HEADS * DIM, WIDTH),
            f"{at}self_attn.k_proj.weight": normal(KV_HEADS * DIM, WIDTH),
            f"{at}self_attn.v_proj.weight": normal(KV_HEADS * DIM, WIDTH),
            f"{at}self_attn.o_proj.weight": normal(WIDTH, HEADS * DIM),
            f"{at}mlp.gate_proj.weight": normal(FFN, WIDTH),
            f"{at}mlp.up_proj.weight": normal(FFN, WIDTH),
            f"{at}mlp.down_proj.weight": normal(WIDTH, FFN),
        }
        if has_qk_norm:
            tensors |= {
                f"{at}self_attn.q_norm.weight": normal(DIM),
                f"{at}self_attn.k_norm.weight": normal(DIM),
            }
    return tensors


def gguf_name(name):
    for old, new in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
    ):
        name = name.replace(old, new)
    return name


def interleaved(array, heads):
    """llama.cpp's order of a llama model's q and k rows: 0, D/2, 1, D/2 + 1, ... in every head."""
    order = [
        head * DIM + half * (DIM // 2) + j
        for head in range(heads)
        for j in range(DIM // 2)
        for half in (0, 1)
    ]
    return array[order]


def write_gguf(path, tensors, arch="llama", kind=Kind.F32, keys=(), extra=(), tokens=None):
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(sum("input_layernorm" in name for name in tensors))
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_key_length(DIM)
    for name, value in dict(keys).items():
        add = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool}
        add.get(type(value), writer.add_uint32)(name, value)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens or [f"t{i}" for i in range(VOCAB)])
    writer.add_eos_token_id(2)
    for name, array in tensors.items():
        if arch == "llama" and "q_proj" in name:
            array = interleaved(array, HEADS)
        if arch == "llama" and "k_proj" in name:
            array = interleaved(array, KV_HEADS)
        stored = kind if array.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(array, stored)
        writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    for name, array in dict(extra).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
