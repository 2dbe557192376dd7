"""How many bytes a decode will hold, from configs and sizes alone: before anything is allocated."""

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.fixed import ArraySpec, Fixed
from dflash_jax.mtp_config import DrafterConfig, MtpConfig
from dflash_jax.scratch import scratch_specs


def estimate(target: TargetConfig, draft: DrafterConfig, fixed: Fixed) -> list[tuple[str, int]]:
    """(what, bytes) of everything that lives through a decode; XLA's temporaries come on top."""
    itemsize = ArraySpec((1,), fixed.hidden.dtype).nbytes
    layers, depth = draft.backbone, target.num_layers
    pools = [2 * spec.nbytes for spec in fixed.k_pools]  # keys and values have one shape
    scratch = scratch_specs(draft, fixed).values()
    history = ArraySpec((fixed.batch, fixed.capacity + 1), "int32")
    step = (fixed.hidden, fixed.residual, fixed.logits, fixed.tokens, history)
    rows = [
        ("target weights", target_parameters(target) * itemsize),
        ("target KV pools", sum(pools[:depth])),
        ("step arrays", sum(spec.nbytes for spec in step)),
        ("drafter scratch", sum(spec.nbytes for spec in scratch if spec is not None)),
    ]
    if isinstance(draft, MtpConfig) and fixed.draft is not None:
        own = fixed.draft
        rows.insert(1, ("drafter weights", head_parameters(draft) * itemsize))
        rows.insert(3, ("drafter KV pools", own.k_pool.nbytes + own.v_pool.nbytes))
    if layers is not None:
        rows.insert(1, ("drafter weights", draft_parameters(layers) * itemsize))
        rows.insert(3, ("drafter KV pools", sum(pools[depth:])))
    return rows


def target_parameters(c: TargetConfig) -> int:
    """Numbers in a target's weights; a tied head counts once."""
    return c.vocab * c.width * (1 if c.is_tied else 2) + c.num_layers * _layer(c) + c.width


def draft_parameters(c: DraftConfig) -> int:
    """Numbers in a drafter's weights, and the second copy of key and value rows in `fused_kv`."""
    kv = 2 * c.num_kv_heads * c.head_dim
    count = len(c.target_layer_ids) * c.width * c.width + 2 * c.width  # fc and two norms
    count += c.num_layers * (_layer(c) + kv * (c.width + c.has_attention_bias))
    if c.kind == "dflash2":
        conv = 2 * c.conv_taps * (c.width + c.num_conv_groups * c.width)
        count += c.num_layers * 2 * conv
        count += c.selector_rank * (c.width + 2 * c.vocab)
    if c.markov_rank:
        rank = c.markov_rank
        mix = {"vanilla": 0, "gated": c.width + rank + 1, "rnn": 3 * (2 * rank + c.width + 1)}
        count += rank * (c.vocab + c.num_draft_ids + mix[c.markov_kind])
    if c.has_confidence:
        count += c.width + 1 + (c.markov_rank if c.confidence_reads_markov else 0)
    return count + c.width * (c.has_embed * c.vocab + c.has_head * c.num_draft_ids)


def head_parameters(c: MtpConfig) -> int:
    """Numbers in an MTP head's weights, and the second copy of its key and value rows."""
    layer = c.layer
    kv = 2 * layer.num_kv_heads * layer.head_dim
    joined = 2 * layer.width * layer.width + 3 * layer.width
    return joined + _layer(layer) + kv * (layer.width + layer.has_attention_bias)


def _layer(c: TargetConfig | DraftConfig) -> int:
    query = c.num_heads * c.head_dim
    qkv = query + 2 * c.num_kv_heads * c.head_dim
    has_qk_norm = isinstance(c, DraftConfig) or c.has_qk_norm
    matrices = (qkv + query + 3 * c.ffn) * c.width
    vectors = 2 * c.width + has_qk_norm * 2 * c.head_dim
    return matrices + vectors + c.has_attention_bias * (qkv + c.width)
