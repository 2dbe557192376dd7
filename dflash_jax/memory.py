"""How many bytes a decode will hold, from configs and sizes alone: before anything is allocated."""

from dflash_jax.config import DraftConfig, TargetConfig
from dflash_jax.fixed import ArraySpec, Fixed, StateTableSpec
from dflash_jax.mtp_config import DrafterConfig, MtpConfig, head_of
from dflash_jax.scratch import scratch_specs


def estimate(target: TargetConfig, draft: DrafterConfig, fixed: Fixed) -> list[tuple[str, int]]:
    """(what, bytes) of everything that lives through a decode; XLA's temporaries come on top."""
    itemsize = ArraySpec((1,), fixed.hidden.dtype).nbytes
    layers, head, depth = draft.backbone, head_of(draft), target.num_attention_layers
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
    if head is not None and fixed.draft is not None:
        own = fixed.draft
        rows.insert(1, ("drafter weights", head_parameters(head) * itemsize))
        rows.insert(3, ("drafter KV pools", own.k_pool.nbytes + own.v_pool.nbytes))
    if layers is not None:
        rows.insert(1, ("drafter weights", draft_parameters(layers) * itemsize))
        rows.insert(3, ("drafter KV pools", sum(pools[depth:])))
    if fixed.verify_wy_tables is not None:
        rows.append(("recurrent states", _state_bytes(fixed.verify_wy_tables)))
    return rows


def _state_bytes(table: StateTableSpec) -> int:
    """Arrays behind a slot table: states, and what waits to be folded into them."""
    arrays = [getattr(layer, name) for layer in table.layers for name in layer.__slots__]
    return sum(spec.nbytes for spec in arrays)


def target_parameters(c: TargetConfig) -> int:
    """Numbers in a target's weights; a tied head counts once.

    Norms and gates that are kept in f32 count as one each, as they are a millionth of the rest.
    """
    layers = sum(_target_layer(c, i) for i in range(c.num_layers))
    return c.vocab * c.width * (1 if c.is_tied else 2) + layers + c.width


def _target_layer(c: TargetConfig, i: int) -> int:
    """Numbers in layer i, whatever its kind."""
    if not c.has_output_gate and i not in c.moe_layers:
        return _layer(c)
    query = c.num_heads * c.head_dim
    if c.gdn is not None and i in c.gdn_layers:
        gdn = c.gdn
        mixer = (gdn.in_width + gdn.value_width) * c.width + gdn.conv_taps * gdn.conv_width
        mixer += 2 * gdn.num_value_heads + gdn.value_dim
    else:
        rows = query * (3 if c.has_output_gate else 2) + 2 * c.num_kv_heads * c.head_dim
        mixer = rows * c.width + 2 * c.head_dim
    if c.moe is not None and i in c.moe_layers:
        moe = c.moe
        inner = 3 * moe.width + moe.num_experts + (moe.shared_ffn > 0)
    else:
        inner = 3 * c.ffn
    return mixer + inner * c.width + 2 * c.width


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
    return joined + _target_layer(layer, 0) + kv * (layer.width + layer.has_attention_bias)


def _layer(c: TargetConfig | DraftConfig) -> int:
    query = c.num_heads * c.head_dim
    qkv = query + 2 * c.num_kv_heads * c.head_dim
    has_qk_norm = isinstance(c, DraftConfig) or c.has_qk_norm
    matrices = (qkv + query + 3 * c.ffn) * c.width
    vectors = 2 * c.width + has_qk_norm * 2 * c.head_dim
    return matrices + vectors + c.has_attention_bias * (qkv + c.width)
