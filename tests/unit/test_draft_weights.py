"""Drafters with tables of their own, in every publisher's form; what is wrong is named."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dflash_jax.mask_embedding import NAME, write_mask_embedding
from dflash_jax.memory import draft_parameters
from dflash_jax.safetensors_io import read_file, write_file
from dflash_jax.weights import load_drafter, load_target, read_draft_config
from scripts.make_tiny import write_tiny_pair

MODEL = "model.safetensors"
V, E, REDUCED = 307, 64, 100


@pytest.fixture
def pair(tmp_path):
    return write_tiny_pair(tmp_path / "pair", drafter="dflash")


@pytest.fixture
def target(pair):
    return load_target(pair.target)


def tensors_of(folder):
    return {name: np.array(x) for name, x in read_file(folder / MODEL).items()}


def add(folder, **tensors):
    """Keyword names use __ for a dot; None removes."""
    named = {name.replace("__", "."): x for name, x in tensors.items()}
    kept = tensors_of(folder) | named
    write_file(folder / MODEL, {name: x for name, x in kept.items() if x is not None})


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def write_config(folder, config):
    (folder / "config.json").write_text(json.dumps(config))


def as_speculators(folder, **changes):
    """Rewrite config.json as speculators does, reduced to REDUCED ids by default."""
    hf = config_of(folder)
    nested = hf.pop("dflash_config")
    outer = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [i + 1 for i in nested["target_layer_ids"]],
        "block_size": hf.pop("block_size"),
        "draft_vocab_size": REDUCED,
        "mask_token_id": nested["mask_token_id"],
        "sample_from_anchor": False,
        "transformer_layer_config": {
            k: v for k, v in hf.items() if k not in ("architectures", "num_target_layers")
        },
    }
    write_config(folder, outer | changes)


def reduced_tables(seed=0):
    """A head of REDUCED rows, with the target ids that they stand for."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(V)[:REDUCED])
    selected = np.zeros(V, bool)
    selected[ids] = True
    head = rng.standard_normal((REDUCED, E)).astype(np.float32)
    return ids, {"lm_head__weight": head, "d2t": ids - np.arange(REDUCED), "t2d": selected}


def test_speculators_tables_are_loaded_and_the_map_made_absolute(pair, target):
    ids, tables = reduced_tables()
    embed = np.random.default_rng(1).standard_normal((V, E)).astype(np.float32)
    add(pair.drafter, embed_tokens__weight=embed, **tables)
    as_speculators(pair.drafter)
    draft = load_drafter(pair.drafter, target)
    assert np.array_equal(draft.embed, embed)
    assert np.array_equal(draft.head, tables["lm_head__weight"])
    assert draft.d2t.dtype == jnp.int32 and np.array_equal(draft.d2t, ids)
    assert draft.config.draft_vocab == REDUCED and draft.config.num_draft_ids == REDUCED
    assert draft.config.has_embed and draft.config.has_head
    assert read_draft_config(pair.drafter, num_target_layers=3) == draft.config
    floats = [x for x in jax.tree.leaves(draft) if x.dtype == np.float32]
    assert draft_parameters(draft.config) == sum(x.size for x in floats)


def test_a_drafter_without_tables_uses_its_targets(pair, target):
    draft = load_drafter(pair.drafter, target)
    assert draft.embed is draft.head is draft.d2t is draft.mask_embed is None
    assert not draft.config.has_embed and not draft.config.has_head


def test_copies_of_the_targets_tables_are_shared_and_others_are_kept(pair, target):
    """Known fault A28."""
    t = tensors_of(pair.target)
    embed, head = t["model.embed_tokens.weight"], t["lm_head.weight"]
    add(pair.drafter, embed_tokens__weight=embed, lm_head__weight=head)
    shared = load_drafter(pair.drafter, target)
    assert shared.embed is shared.head is None and not shared.config.has_head
    add(pair.drafter, lm_head__weight=head + 1)
    own = load_drafter(pair.drafter, target)
    assert own.embed is None and np.array_equal(own.head, head + 1)
    assert own.config.has_head and not own.config.has_embed
    alone = load_drafter(pair.drafter)  # without a target nothing tells that they are copies
    assert np.array_equal(alone.embed, embed) and alone.config.has_embed


def test_a_larger_input_vocabulary_needs_an_embedding_of_its_own(pair, target):
    embed = np.ones((320, E), np.float32)
    hf = config_of(pair.drafter) | {"vocab_size": 320}
    hf["dflash_config"]["mask_token_id"] = 319
    write_config(pair.drafter, hf)
    with pytest.raises(ValueError, match="vocab_size is 320 for the drafter and 307 for the tar"):
        load_drafter(pair.drafter, target)
    add(pair.drafter, embed_tokens__weight=embed)
    assert load_drafter(pair.drafter, target).embed.shape == (320, E)


DAMAGES = [
    ({"lm_head__weight": None}, "tensor 'lm_head.weight' is missing"),
    ({"d2t": None}, "tensor 'd2t' is missing"),
    ({"d2t": np.zeros(7, np.int64)}, r"'d2t' is int64\[7\], wanted integers \[100\]"),
    ({"d2t": np.zeros(REDUCED, np.float32)}, r"'d2t' is float32\[100\], wanted integers"),
    ({"d2t": np.full(REDUCED, 208)}, "'d2t' maps draft id 99 to 307, outside the target's voca"),
    ({"d2t": np.full(REDUCED, -1)}, "'d2t' maps draft id 0 to -1, outside the target's vocabul"),
    ({"d2t": -np.arange(REDUCED)}, "'d2t' maps 100 draft ids to 0"),
    ({"t2d": np.ones(V, bool)}, "'t2d' does not select the ids that 'd2t' maps to"),
    ({"lm_head__weight": np.ones((V, E), np.float32)}, r"'lm_head.weight' has shape \[307, 64\]"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[m for _, m in DAMAGES])
def test_tables_that_contradict_each_other_are_named(pair, target, damage, message):
    _, tables = reduced_tables()
    add(pair.drafter, **tables)
    as_speculators(pair.drafter)
    load_drafter(pair.drafter, target)
    add(pair.drafter, **damage)
    with pytest.raises(ValueError, match=message) as caught:
        load_drafter(pair.drafter, target)
    assert str(caught.value).startswith(str(pair.drafter))


def test_a_map_over_the_whole_vocabulary_counts_if_it_maps_anything(pair, target):
    head = np.random.default_rng(0).standard_normal((V, E)).astype(np.float32)
    add(pair.drafter, lm_head__weight=head, d2t=np.zeros(V, np.int64))
    assert load_drafter(pair.drafter, target).d2t is None
    permuted = np.random.default_rng(0).permutation(V)
    add(pair.drafter, d2t=permuted - np.arange(V))
    assert np.array_equal(load_drafter(pair.drafter, target).d2t, permuted)
    add(pair.drafter, lm_head__weight=None)
    with pytest.raises(ValueError, match="'d2t' maps ids of a head, but 'lm_head.weight' is miss"):
        load_drafter(pair.drafter, target)


@pytest.mark.parametrize("mask_id", [306, None])
def test_a_mask_embedding_is_read_beside_the_weights(pair, target, mask_id):
    row = np.arange(E).astype(np.float32)
    write_mask_embedding(pair.drafter / NAME, row, 306)
    hf = config_of(pair.drafter)
    hf["dflash_config"]["mask_token_id"] = mask_id
    write_config(pair.drafter, hf)
    draft = load_drafter(pair.drafter, target, dtype="bfloat16")
    assert np.array_equal(draft.mask_embed, row.astype(ml_dtypes.bfloat16))
    assert draft.config.mask_id == 306


def test_a_mask_embedding_of_another_token_or_width_is_refused(pair, target):
    write_mask_embedding(pair.drafter / NAME, np.zeros(E, np.float32), 5)
    with pytest.raises(ValueError, match="mask_embedding.pt is of token 5, but mask_token_id"):
        load_drafter(pair.drafter, target)
    write_mask_embedding(pair.drafter / NAME, np.zeros(9, np.float32), 306)
    with pytest.raises(ValueError, match="mask_embedding.pt: 9 numbers, wanted hidden_size, 64"):
        load_drafter(pair.drafter, target)


RANK = 8


def spark_tensors(kind, rank, reads_markov, has_confidence, seed=0):
    rng = np.random.default_rng(seed)
    shapes = {}
    if rank:
        shapes |= {
            "markov_head.markov_w1.weight": (V, rank),
            "markov_head.markov_w2.weight": (V, rank),
        }
    if kind == "gated":
        shapes |= {"markov_head.gate_proj.weight": (rank, E + rank)}
        shapes |= {"markov_head.gate_proj.bias": (rank,)}
    if kind == "rnn":
        shapes |= {"markov_head.joint_proj.weight": (3 * rank, 2 * rank + E)}
        shapes |= {"markov_head.joint_proj.bias": (3 * rank,)}
    if has_confidence:
        shapes |= {"confidence_head.proj.weight": (1, E + rank * reads_markov)}
        shapes |= {"confidence_head.proj.bias": (1,)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


SPARKS = [
    ("vanilla", RANK, True, True),
    ("gated", RANK, False, True),
    ("rnn", RANK, False, False),
    ("vanilla", 0, False, True),
    ("vanilla", 0, False, False),
]


@pytest.mark.parametrize(("kind", "rank", "reads_markov", "has_confidence"), SPARKS)
@pytest.mark.parametrize("form", ["deepspec", "specforge", "short names"])
def test_dspark_heads_are_loaded_in_every_form(
    pair, target, kind, rank, reads_markov, has_confidence, form
):
    """B20, as far as loading goes: rank 0 and a confidence head without Markov input too."""
    extra = spark_tensors(kind, rank, reads_markov, has_confidence)
    hf = config_of(pair.drafter)
    heads = {
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": has_confidence,
    }
    heads["confidence_head_with_markov"] = reads_markov
    nested = hf.pop("dflash_config") | heads
    if form == "deepspec":
        write_config(pair.drafter, hf | nested | {"architectures": ["Qwen3DSparkModel"]})
    else:
        nested["projector_type"] = "dspark"
        arch = {"architectures": ["DSparkDraftModel"]}
        write_config(pair.drafter, hf | arch | {"dspark_config": nested})
    stored = extra
    if form == "short names":
        short = {"markov_head.markov": "markov", "confidence_head.proj": "confidence_proj"}
        for long, name in short.items():
            stored = {k.replace(long, name): x for k, x in stored.items()}
    write_file(pair.drafter / MODEL, tensors_of(pair.drafter) | stored)
    draft = load_drafter(pair.drafter, target)
    assert draft.config.kind == "dspark" and draft.config.drafts_from_anchor
    assert draft.config.max_drafts == draft.config.block_rows == 8
    found = {}
    if draft.markov is not None:
        found["markov_head.markov_w1.weight"] = draft.markov.embed
        found["markov_head.markov_w2.weight"] = draft.markov.out
        mix = {"gated": "gate_proj", "rnn": "joint_proj"}.get(kind)
        if mix:
            found[f"markov_head.{mix}.weight"] = draft.markov.mix
            found[f"markov_head.{mix}.bias"] = draft.markov.mix_bias
    if draft.confidence is not None:
        found["confidence_head.proj.weight"] = draft.confidence.weight
        found["confidence_head.proj.bias"] = draft.confidence.bias
    assert found.keys() == extra.keys()
    assert all(np.array_equal(found[name], x) for name, x in extra.items())


def test_a_drafter_is_recognised_by_its_tensors_if_its_config_is_silent(pair, target):
    hf = config_of(pair.drafter)
    del hf["architectures"]
    write_config(pair.drafter, hf | {"markov_rank": RANK})
    assert load_drafter(pair.drafter, target).config.kind == "dflash"
    write_file(
        pair.drafter / MODEL,
        tensors_of(pair.drafter) | spark_tensors("vanilla", RANK, False, False),
    )
    assert load_drafter(pair.drafter, target).config.kind == "dspark"


def test_an_unknown_markov_type_and_a_head_without_its_tensors_are_named(pair, target):
    hf = config_of(pair.drafter)
    hf |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK}
    write_config(pair.drafter, hf | {"markov_head_type": "lstm"})
    with pytest.raises(NotImplementedError, match="markov_head_type 'lstm' is not supported, wan"):
        load_drafter(pair.drafter, target)
    write_config(pair.drafter, hf)
    with pytest.raises(ValueError, match="tensor 'markov_head.markov_w1.weight' is missing"):
        load_drafter(pair.drafter, target)
    write_config(pair.drafter, config_of(pair.drafter) | {"architectures": ["DFlashDraftModel"]})
    markov = np.zeros((V, RANK), np.float32)
    add(pair.drafter, markov_head__markov_w1__weight=markov)
    with pytest.raises(ValueError, match="no place for: 'markov_head.markov_w1.weight'"):
        load_drafter(pair.drafter, target)
