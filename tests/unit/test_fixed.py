"""`plan`: every static size, and what cannot be planned. Nothing compiles here."""

import dataclasses

import pytest

import dflash_jax as dj
from dflash_jax.config import LayerAttention, RopeConfig, TargetConfig
from dflash_jax.fixed import ArraySpec, AttnMetadataSpec, plan
from dflash_jax.params import RuleParams

TARGET = TargetConfig(
    model_type="qwen3",
    vocab=307,
    width=64,
    ffn=96,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_eps=1e-6,
    rope=RopeConfig(),
    max_context=4096,
    is_tied=False,
    has_qk_norm=True,
    has_attention_bias=False,
    real_vocab=307,
)
DRAFT = dj.DraftConfig(
    kind="dflash2",
    vocab=307,
    width=64,
    ffn=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,
    head_dim=32,
    rms_eps=1e-6,
    rope=RopeConfig(),
    max_context=4096,
    has_attention_bias=False,
    block_rows=8,
    mask_id=306,
    target_layer_ids=(0, 1),
    num_target_layers=3,
    attention=(LayerAttention(), LayerAttention()),
)
GOOD = {"batch": 3, "max_context": 100, "page_size": 16, "prefill_chunk": 64}


def test_sizes_follow_from_what_was_asked():
    fixed = plan(TARGET, DRAFT, **GOOD)
    assert (fixed.batch, fixed.num_drafts, fixed.verify_rows, fixed.num_rows) == (3, 7, 8, 24)
    assert (fixed.page_size, fixed.num_pages, fixed.capacity) == (16, 21, 112)
    assert fixed.max_rows == 64
    assert fixed.hidden == fixed.residual == ArraySpec((64, 64), "bfloat16")
    assert fixed.logits == ArraySpec((24, 307), "float32")
    assert fixed.tokens == ArraySpec((64,), "int32")
    assert fixed.verify_batch_tokens == ArraySpec((24,), "int32")
    assert fixed.draft is fixed.verify_wy_tables is fixed.ffn_act_q8 is None


def test_pools_are_the_targets_then_the_drafters():
    fixed = plan(TARGET, DRAFT, **GOOD, dtype="float32")
    shapes = [spec.shape for spec in fixed.k_pools]
    assert shapes == [(21, 2, 16, 16)] * 3 + [(21, 1, 16, 32)] * 2
    assert fixed.k_pools == fixed.v_pools
    assert fixed.cache_stride == 2 * 16 * 16
    assert {spec.dtype for spec in fixed.k_pools} == {"float32"}
    assert fixed.k_pools[0].nbytes == 21 * 2 * 16 * 16 * 4
    assert plan(TARGET, DRAFT, **GOOD).k_pools[0].nbytes == 21 * 2 * 16 * 16 * 2


@pytest.mark.parametrize(
    ("batch", "num_drafts", "name"),
    [(1, 0, "meta"), (3, 0, "batch_meta"), (1, 5, "verify_meta"), (3, 5, "verify_batch_meta")],
)
def test_a_step_has_one_of_four_forms(batch, num_drafts, name):
    fixed = plan(TARGET, DRAFT, **{**GOOD, "batch": batch}, num_drafts=num_drafts)
    assert fixed.step_meta == getattr(fixed, name)
    assert fixed.step_meta == AttnMetadataSpec(batch * (num_drafts + 1), batch, 7)


def test_the_widest_call_is_the_longest_prefill_or_the_step():
    assert plan(TARGET, DRAFT, **{**GOOD, "prefill_chunk": 4}).max_rows == 24
    assert plan(TARGET, DRAFT, **{**GOOD, "prefill_chunk": 32}).max_rows == 32


@pytest.mark.parametrize("drafter", [dj.no_drafter(), dj.prompt_lookup_drafter(num_drafts=5)])
def test_a_rule_drafter_has_no_pools(drafter: RuleParams):
    fixed = plan(TARGET, drafter.config, **GOOD)
    assert len(fixed.k_pools) == TARGET.num_layers
    assert fixed.num_drafts == drafter.config.max_drafts


def test_equal_requests_give_one_key_and_other_ones_another():
    fixed = plan(TARGET, DRAFT, **GOOD)
    assert fixed == plan(TARGET, DRAFT, **GOOD)
    assert hash(fixed) == hash(plan(TARGET, DRAFT, **GOOD))
    # Any context of as many pages is the same plan, so prompts of a bucket share an executable.
    assert fixed == plan(TARGET, DRAFT, **{**GOOD, "max_context": 112})
    assert fixed != plan(TARGET, DRAFT, **{**GOOD, "max_context": 113})
    with pytest.raises(dataclasses.FrozenInstanceError):
        fixed.block_size = 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "batch is 0, wanted at least 1"),
        ({"page_size": 24}, "page_size is 24, wanted a power of two from 4"),
        ({"page_size": 2}, "page_size is 2, wanted a power of two from 4"),
        ({"page_size": 0}, "page_size is 0, wanted a power of two"),
        ({"prefill_chunk": 48}, "prefill_chunk is 48, wanted a power of two"),
        ({"num_drafts": 8}, "num_drafts is 8, the dflash2 drafter offers 0 to 7"),
        ({"num_drafts": -1}, "num_drafts is -1, the dflash2 drafter offers 0 to 7"),
        ({"max_context": 1}, "max_context is 1, wanted at least 2"),
        ({"max_context": 4097}, "max_context is 4097, the target was built for 4096"),
        ({"num_pages": 0}, "num_pages is 0, wanted at least 1"),
    ],
    ids=str,
)
def test_a_size_that_cannot_be_is_one_sentence(changes, message):
    with pytest.raises(ValueError, match=f"^plan: {message}"):
        plan(TARGET, DRAFT, **{**GOOD, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 128}, "hidden_size is 128 for the drafter and 64 for the target"),
        ({"vocab": 320}, "vocab_size is 320 for the drafter and 307 for the target"),
        ({"num_target_layers": 4}, "num_target_layers is 4 for the drafter and 3 for the target"),
        ({"target_layer_ids": (0, 3)}, r"target_layer_ids \[0, 3\] for a target of 3 layers"),
        ({"mask_id": 307}, "mask_token_id 307 is outside the vocabulary of 307"),
    ],
    ids=str,
)
def test_a_pair_that_does_not_fit_is_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(TARGET, dataclasses.replace(DRAFT, **changes), **GOOD)
