"""Fixed and the three carriers: their names, shapes, donation, and what a step leaves in them.

About 35 CPU seconds.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dflash_jax as dj
from dflash_jax import loop
from dflash_jax.fixed import ArraySpec, Fixed, StateTableSpec
from dflash_jax.scratch import DflashScratch, init_scratch, scratch_specs
from dflash_jax.state import init_buffers, init_state
from tests import kit
from tests.reference import dflash2, dspark, layers

pytestmark = pytest.mark.usefixtures("strict_dtypes")

FIXED_NAMES = """
    hidden residual logits tokens meta batch_meta verify_meta verify_batch_meta draft
    verify_wy_tables verify_batch_tokens ffn_act_q8 k_pools v_pools block_size cache_stride
""".split()
SCRATCH_NAMES = """
    stream_buf norm_buf q_buf k_buf v_buf attn_out mlp_intermediate mlp_up stream_acc
    fc_proj fused_kv_out slot_mapping_dev precompute_in
    option_b_indirect_args_dev position_ids
    draft_tokens_host_pinned draft_tokens_event draft_tokens_dev logits
    markov_embed markov_bias conf_out
    conv_dyn conv_tmp sel_vals sel_idx sel_hproj
""".split()
OF_THE_TOKENS = set(SCRATCH_NAMES[13:18])
OF_DFLASH = set(SCRATCH_NAMES[:19])
OF_DSPARK = set(SCRATCH_NAMES[:22])
OF_DFLASH2 = OF_DFLASH | set(SCRATCH_NAMES[22:])
OF_MTP = OF_THE_TOKENS | {"norm_buf", "logits"}


def pairs():
    """Params of every drafter."""
    params = kit.pair(kind="dflash").params
    inner = dj.oracle_drafter(kit.UNKNOWN, num_drafts=7, inner=params.draft)
    return {
        "dflash": params,
        "dflash2": kit.pair(kind="dflash2").params,
        "dspark": kit.pair(kind="dspark").params,
        "mtp": kit.pair(kind="mtp", layers="one").params,
        "prompt_lookup": kit.lookup(params),
        "oracle": kit.oracle(params, kit.UNKNOWN),
        "oracle-with-inner": kit.with_rule(params, inner),
        "none": kit.with_rule(params, dj.no_drafter()),
    }


DRAFTERS = [*kit.KINDS, "prompt_lookup", "oracle", "oracle-with-inner", "none"]


PRESENT = {
    "dflash": OF_DFLASH,
    "dflash2": OF_DFLASH2,
    "dspark": OF_DSPARK,
    "mtp": OF_MTP,
    "oracle-with-inner": OF_DFLASH,
}


def prefill_arguments(rows=kit.BUCKET):
    return np.zeros(rows, np.int32), np.int32(rows), np.int32(0), np.int32(-1)


def test_fixed_has_its_sixteen_names_and_the_scratch_its_twenty_seven():
    assert [field.name for field in dataclasses.fields(Fixed)] == FIXED_NAMES
    assert len(FIXED_NAMES) == 16
    assert sorted(DflashScratch.__dataclass_fields__) == sorted(SCRATCH_NAMES)
    assert len(SCRATCH_NAMES) == 27


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fields_without_a_head_are_none_and_no_others(drafter):
    params = pairs()[drafter]
    scratch = init_scratch(params.draft.config, fixed=kit.standard(params))
    present = {name for name in SCRATCH_NAMES if getattr(scratch, name) is not None}
    assert present == PRESENT.get(drafter, OF_THE_TOKENS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_carriers_come_back_with_the_shapes_dtypes_and_types_they_had(drafter, dtype):
    params = pairs()[drafter]
    to = partial(jax.tree.map, lambda x: x.astype(dtype) if x.dtype == np.float32 else x)
    params = to(params)
    fixed = kit.standard(params)
    at = kit.carriers(params, fixed, [kit.Request((1, 2), 3)])
    static = {"fixed": fixed, "options": kit.OPTIONS}
    for call, arguments in (
        (loop.prefill, prefill_arguments()),
        (loop.step, ()),
        (loop.decode, ()),
    ):
        _, *after = call.eval_shape(params, *arguments, *at, **static)
        for before, now in zip(at, after, strict=True):
            assert jax.tree.structure(before) == jax.tree.structure(now)
            for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(now), strict=True):
                assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)


def test_donated_carriers_are_gone_and_params_are_not():
    params = pairs()["dflash2"]
    fixed = kit.standard(params)
    at = kit.carriers(params, fixed, [kit.Request((1, 2), 9)])
    static = {"fixed": fixed, "options": kit.OPTIONS}
    for call, arguments in (
        (loop.prefill, prefill_arguments()),
        (loop.step, ()),
        (loop.decode, ()),
    ):
        _, *after = call(params, *arguments, *at, **static)
        left = [
            jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(at)
            if not leaf.is_deleted()
        ]
        assert not left, call
        at = after
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((params, at)))


class Recording(Fixed):
    """A Fixed that remembers which fields were read; equal only to itself."""

    def __getattribute__(self, name):
        if name in FIXED_NAMES:
            READ.add(name)
        return object.__getattribute__(self, name)

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


READ: set[str] = set()


def test_every_field_of_fixed_is_read_by_what_allocates_or_steps():
    READ.clear()
    params = pairs()["dflash2"]
    for batch in (1, 3):
        for num_drafts in (0, 7):
            plain = kit.with_rule(params, dj.no_drafter())
            pair = params if num_drafts else plain
            planned = kit.sizes(pair, batch, num_drafts=num_drafts)
            facts = {name: getattr(planned, name) for name in FIXED_NAMES}
            fixed = Recording(**facts)
            at = (
                init_state(fixed),
                init_buffers(fixed),
                init_scratch(pair.draft.config, fixed=fixed),
            )
            static = {"fixed": fixed, "options": kit.OPTIONS}
            loop.decode.eval_shape(pair, *at, **static)
            loop.prefill.eval_shape(pair, *prefill_arguments(), *at, **static)
    assert set(FIXED_NAMES) - READ == set()


def test_buffers_are_live_twins_of_what_fixed_describes():
    fixed = kit.standard(pairs()["dflash2"])
    tables = StateTableSpec((3,), "int32", num_slots=3, layers=())
    activations = ArraySpec((2, 8), "int8")
    fixed = dataclasses.replace(fixed, verify_wy_tables=tables, ffn_act_q8=activations)
    buffers = init_buffers(fixed)
    for name in FIXED_NAMES:
        spec = getattr(fixed, name)
        if isinstance(spec, ArraySpec):
            twin = getattr(buffers, name)
            assert (twin.shape, twin.dtype.name) == (spec.shape, spec.dtype), name
    for specs, twins in ((fixed.k_pools, buffers.k_pools), (fixed.v_pools, buffers.v_pools)):
        assert [spec.shape for spec in specs] == [twin.shape for twin in twins]
    assert fixed.cache_stride == buffers.k_pools[0][0].size


def test_a_prefill_longer_than_the_plan_is_refused():
    params = pairs()["dflash2"]
    fixed = kit.standard(params)
    at = kit.carriers(params, fixed, [])
    with pytest.raises(ValueError, match="prefill: 128 tokens in a call, Fixed is planned for 64"):
        loop.prefill(params, *prefill_arguments(128), *at, fixed=fixed, options=kit.OPTIONS)


def test_a_fixed_that_cannot_be_allocated_is_refused():
    fixed = kit.standard(pairs()["dflash2"])
    with pytest.raises(ValueError, match="cache_stride is 5, wanted 128 elements a page"):
        init_buffers(dataclasses.replace(fixed, cache_stride=5))


# One step from a scratch full of NaN, every field against the reference.

VERIFY_ROWS = 8


def reference_scratch(pair, text):
    """Every field of the drafter's scratch after one step from `text`, by name.

    The last layer is computed again from the reference's parts, since its own forward keeps only
    what leaves a layer.
    """
    draft = pair.drafter
    config, weights = draft.config, draft.weights
    rows = config.block_rows
    block = kit.reference_block(pair, text, rows)
    last = config.num_layers - 1
    name = f"layers.{last}"
    positions = len(text) - 1 + np.arange(rows)
    x = block.trace[f"layer{last - 1}.out"]
    attention_in, finish_attention = draft._conv(last, "attention")(draft._norm(x, name, "input"))
    q = layers.rotate(draft._heads(attention_in, f"{name}.self_attn", "q"), positions, *draft.rope)
    k, v = block.trace[f"layer{last}.k_cache"], block.trace[f"layer{last}.v_cache"]
    everything = np.arange(len(text) - 1 + rows)
    allowed = layers.visible(positions, everything, config.is_causal[last], config.windows[last])
    mixed = layers.attention(q, k, v, allowed)
    x = x + finish_attention(layers.linear(mixed, weights, f"{name}.self_attn.o_proj"))
    normed = draft._norm(x, name, "post_attention")
    mlp_in, finish_mlp = draft._conv(last, "mlp")(normed)
    up = layers.linear(mlp_in, weights, f"{name}.mlp.up_proj")
    inner = layers.silu(layers.linear(mlp_in, weights, f"{name}.mlp.gate_proj")) * up
    added = finish_mlp(layers.linear(inner, weights, f"{name}.mlp.down_proj"))

    # The context that the step left: features of the block that the target verified.
    verified = [*text, *block.drafts]
    features = pair.target.forward(verified).features(config.target_layer_ids)[len(text) - 1 :]
    _, context = draft.fuse(features)
    fused = [
        context @ weights[f"layers.{i}.self_attn.{part}_proj.weight"].T
        for i in range(config.num_layers)
        for part in ("k", "v")
    ]
    fields = {
        "stream_buf": block.trace[f"layer{last}.out"],
        "norm_buf": block.hidden,
        "q_buf": q.reshape(rows, -1),
        "k_buf": k[-rows:].reshape(rows, -1),
        "v_buf": v[-rows:].reshape(rows, -1),
        "attn_out": mixed,
        "mlp_intermediate": inner,
        "mlp_up": up,
        "stream_acc": added,
        "fc_proj": context,
        "fused_kv_out": np.concatenate(fused, axis=1),
        "precompute_in": features,
        "position_ids": positions,
        "option_b_indirect_args_dev": np.array([[len(text) - 1 + rows, *[len(text) - 1] * 2]]),
        "draft_tokens_dev": np.array([text[-1], *block.drafts]),
        "draft_tokens_host_pinned": np.array([text[-1], *block.drafts]),
        "logits": block.logits,
    }
    if isinstance(draft, dspark.DSpark):
        chain = draft.chain(block.hidden, text[-1])
        return fields | {
            "markov_embed": chain.latents[-1:],
            "markov_bias": chain.bias[-1:],
            "conf_out": draft.confidence_logits(block.hidden, chain.latents)[None],
        }
    if not isinstance(draft, dflash2.DFlash2):
        return fields
    walk = draft.walk(block.hidden[1:], text[-1])
    projection = weights[f"{name}.mlp_conv.kernel_projection.weight"]
    return fields | {
        "conv_dyn": normed @ projection.T,
        "conv_tmp": added,
        "sel_vals": walk.unary,
        "sel_idx": walk.candidates,
        "sel_hproj": block.hidden[1:] @ draft.selector["hidden_projection"].T,
    }


def head_scratch(pair, text):
    """The same of an MTP head, whose rows are drafts."""
    hidden = pair.target.forward(text[:-1]).normed
    drafts, outs, logits = pair.drafter.draft(hidden, text, VERIFY_ROWS - 1)
    positions = len(text) - 2 + np.arange(VERIFY_ROWS - 1)
    block = np.array([text[-1], *drafts])
    return {
        "norm_buf": outs,
        "logits": logits,
        "position_ids": positions,
        "option_b_indirect_args_dev": np.array([[positions[-1] + 1, *[positions[-1]] * 2]]),
        "draft_tokens_dev": block,
        "draft_tokens_host_pinned": block,
    }


@pytest.mark.parametrize("kind", kit.KINDS)
def test_one_step_fills_every_field_of_a_scratch_of_nan(kind):
    pair = kit.pair(kind=kind, layers="one" if kind == "mtp" else "mixed")
    fixed = kit.sizes(pair.params, 3, max_context=160, prefill_chunk=16)
    assert fixed.max_rows == fixed.num_rows  # so that a step fills the context rows whole
    requests = [kit.Request(kit.prompt(n), 20) for n in (3, 21, 40)]
    at = kit.carriers(pair.params, fixed, requests)
    firsts, (state, buffers, scratch) = kit.prefill(pair.params, fixed, requests, at, bucket=16)
    texts = [[*one.prompt, int(f.token)] for one, f in zip(requests, firsts, strict=True)]
    scratch = kit.filled(scratch).replace(draft_tokens_event=jnp.uint32(41))
    out, _, buffers, scratch = loop.step(
        pair.params, state, buffers, scratch, fixed=fixed, options=kit.OPTIONS
    )
    counts = np.asarray(out.verification.num_committed)
    reference = head_scratch if kind == "mtp" else reference_scratch
    want = [reference(pair, text) for text in texts]
    table = np.asarray(buffers.meta.block_table)
    slots = np.full((3, VERIFY_ROWS), -1)
    for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
        positions = len(text) - 1 + np.arange(count)
        slots[row, :count] = table[row, positions // 4] * 4 + positions % 4
    left = {name for name, spec in scratch_specs(pair.params.draft.config, fixed).items() if spec}
    for name in sorted(left):
        got = np.asarray(getattr(scratch, name))
        if name == "draft_tokens_event":
            assert got == 42
        elif name == "slot_mapping_dev":
            np.testing.assert_array_equal(got, slots.reshape(-1))
        elif np.issubdtype(got.dtype, np.integer):
            np.testing.assert_array_equal(got, np.concatenate([w[name] for w in want]), name)
        else:
            for row, part in enumerate(np.split(got, 3)):
                kit.assert_close(part, want[row][name], f"{name} of sequence {row}")
    assert left == PRESENT[kind]
