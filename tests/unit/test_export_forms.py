"""A drafter written in another publisher's form comes back with equal bits, or is refused."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash_jax.config import DraftConfig, LayerAttention
from dflash_jax.convert import convert_drafter
from dflash_jax.draft_forms import draft_form
from dflash_jax.export import save_drafter
from dflash_jax.export_forms import drafter_to_hf
from dflash_jax.mask_embedding import NAME
from dflash_jax.safetensors_io import read_file
from dflash_jax.weights import load_drafter, load_tables, load_target
from scripts.make_tiny import write_tiny_pair

KINDS = ("dflash", "dflash2", "dspark")
V, E = 307, 64


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Folders and params of a tiny pair a kind; nobody writes to them."""
    made = {}
    for kind in KINDS:
        at = write_tiny_pair(tmp_path_factory.mktemp(kind), drafter=kind, dtype="bfloat16")
        target = load_target(at.target)
        made[kind] = at, target, load_drafter(at.drafter, target)
    return made


def drawn(*shape):
    return np.random.default_rng(1).standard_normal(shape).astype(jnp.bfloat16)


def same_bits(a, b):
    a, b = jax.tree.flatten(a), jax.tree.flatten(b)
    same = [x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a[0], b[0], strict=True)]
    return a[1] == b[1] and all(same)


ANCHORLESS = "dspark, filled in"  # vLLM's sample_from_anchor false: rows 1.. draft, as DFlash's do
DEEPSPEC_DFLASH = "dflash, from the anchor"  # DeepSpec's dflash_*_block7
VARIANTS = {
    "dflash": ("dflash", {}, {}),
    "dflash2": ("dflash2", {}, {}),
    "dspark": ("dspark", {}, {}),
    DEEPSPEC_DFLASH: (
        "dspark",
        {"markov": None, "confidence": None},
        {"markov_rank": 0, "has_confidence": False, "confidence_reads_markov": False},
    ),
    "dspark, unsure": (
        "dspark",
        {"confidence": None},
        {"has_confidence": False, "confidence_reads_markov": False},
    ),
    ANCHORLESS: ("dspark", {}, {"drafts_from_anchor": False}),
}
HOLDS = {
    "dflash": ("zlab", "speculators"),
    "dflash2": ("zlab",),
    ANCHORLESS: ("speculators",),
}
WHY_NOT = {
    "dflash": "DeepSpec's form cannot say this dflash drafter's rows: .*supported: zlab and spec",
    "dflash2": "form has no dflash2 drafter, only dflash and dspark: .*supported: zlab",
    ANCHORLESS: "form cannot say this dspark drafter's rows: .*supported: speculators",
}
PUBLISHERS = {
    "zlab": ("z-lab", "SpecForge"),
    "deepspec": ("DeepSpec",),
    "speculators": ("speculators",),
}


def variant(pairs, name):
    """Folder, target and params of one of `VARIANTS`."""
    kind, heads, settings = VARIANTS[name]
    at, target, params = pairs[kind]
    return at, target, params.replace(**heads, config=replace(params.config, **settings))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_form_gives_a_drafter_to_every_other_bit_for_bit_or_says_why_not(
    tmp_path, pairs, name
):
    at, target, params = variant(pairs, name)
    forms = HOLDS.get(name, tuple(PUBLISHERS))
    for form in forms:
        source = tmp_path / form
        save_drafter(params, source, form=form, target=target)
        assert same_bits(load_drafter(source, target), params)
        for other in PUBLISHERS:
            new = tmp_path / f"{form}-{other}"
            if other not in forms:
                with pytest.raises(ValueError, match=WHY_NOT[name]):
                    convert_drafter(source, new, form=other, target=at.target)
                assert not new.exists()
                continue
            convert_drafter(source, new, form=other, target=at.target)
            assert same_bits(load_drafter(new, target), params)
            said = json.loads((new / "config.json").read_text())
            assert draft_form(said).publisher in PUBLISHERS[other]
            assert len({path.stat().st_mode for path in new.iterdir()}) == 1
    kept = read_file(tmp_path / f"{forms[-1]}-zlab" / "model.safetensors") if len(forms) > 1 else {}
    assert not kept.keys() & {"embed_tokens.weight", "lm_head.weight"}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_mtp_head_has_one_form(tmp_path):
    at = write_tiny_pair(tmp_path / "mtp", drafter="mtp")
    for form in PUBLISHERS:
        with pytest.raises(NotImplementedError, match="an MTP head has the form of its target's"):
            convert_drafter(at.drafter, tmp_path / "new", form=form, target=at.target)
    assert not (tmp_path / "new").exists()


def test_copies_of_a_wider_targets_tables_are_recognised_again(tmp_path):
    """A bf16 drafter of an f32 target: its copies must not be rounded."""
    wide = write_tiny_pair(tmp_path / "wide", drafter="dspark", dtype="float32")
    narrow = write_tiny_pair(tmp_path / "narrow", drafter="dspark", dtype="bfloat16")
    convert_drafter(narrow.drafter, tmp_path / "new", form="deepspec", target=wide.target)
    for dtype in ("float32", "bfloat16"):
        draft = load_drafter(tmp_path / "new", load_target(wide.target, dtype=dtype))
        assert draft.embed is draft.head is None


WINDOW, CAUSAL_WINDOW = LayerAttention(False, 32), LayerAttention(True, 32)
FULL, CAUSAL = LayerAttention(False, None), LayerAttention(True, None)


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("speculators", {"attention": (WINDOW, FULL)}, True),
        ("speculators", {"attention": (CAUSAL_WINDOW, CAUSAL_WINDOW)}, True),
        ("speculators", {"attention": (CAUSAL_WINDOW, WINDOW)}, False),
        ("speculators", {"attention": (CAUSAL, FULL)}, False),
        ("speculators", {"drafts_from_anchor": False}, True),
        ("speculators", {"draft_vocab": 100}, True),
        ("speculators", {"input_embedding_scale": 2.0}, False),
        ("speculators", {"soft_cap": 20.0}, False),
        ("deepspec", {"attention": (WINDOW, FULL)}, False),
        ("deepspec", {"output_multiplier": 0.5}, False),
        ("deepspec", {"draft_vocab": 100}, False),
        ("zlab", {"draft_vocab": 100}, False),
        ("zlab", {"attention": (WINDOW, FULL), "soft_cap": 20.0}, True),
    ],
)
def test_what_a_form_cannot_say_is_refused_by_name(pairs, form, changes, said):
    config = replace(pairs["dspark"][2].config, **changes)
    if said:
        assert DraftConfig.from_hf(drafter_to_hf(config, form)) == config
        return
    with pytest.raises(ValueError, match=f"keys cannot say {next(iter(changes))} "):
        drafter_to_hf(config, form)


@pytest.mark.parametrize("kind", ["gated", "rnn"])
@pytest.mark.parametrize("form", ["zlab", "deepspec", "speculators"])
def test_every_markov_head_survives_every_form(tmp_path, pairs, kind, form):
    _, target, params = pairs["dspark"]
    rank = params.config.markov_rank
    shape = {"gated": (rank, E + rank), "rnn": (3 * rank, 2 * rank + E)}[kind]
    mix = drawn(*shape)
    markov = params.markov.replace(mix=mix, mix_bias=mix[:, 0])
    changed = params.replace(markov=markov, config=replace(params.config, markov_kind=kind))
    save_drafter(changed, tmp_path / "new", form=form, target=target)
    assert same_bits(load_drafter(tmp_path / "new", target), changed)


def with_own_tables(params, reduced=True):
    ids = np.sort(np.random.default_rng(0).permutation(V)[:100]).astype(np.int32)
    table = drawn(V, E)
    rows = ids if reduced else slice(None)
    config = replace(
        params.config, has_embed=True, has_head=True, draft_vocab=100 if reduced else None
    )
    own = {"embed": table, "head": -table[rows], "config": config}
    return params.replace(**own, d2t=jnp.asarray(ids) if reduced else None)


def test_a_vocabulary_of_its_own_survives_speculators_form(tmp_path, pairs):
    _, target, params = pairs["dflash"]
    own = with_own_tables(params)
    save_drafter(own, tmp_path / "new", form="speculators", target=target)
    assert same_bits(load_drafter(tmp_path / "new", target), own)
    stored = read_file(tmp_path / "new" / "model.safetensors")
    assert stored["t2d"].sum() == 100 and stored["d2t"].dtype == np.int64
    with pytest.raises(ValueError, match="z-lab's keys cannot say draft_vocab 100"):
        save_drafter(own, tmp_path / "other")


def test_tables_of_its_own_have_no_place_in_zlabs_form(tmp_path, pairs):
    _, target, params = pairs["dspark"]
    own = with_own_tables(params, reduced=False)
    with pytest.raises(ValueError, match="z-lab's form has no place for an embedding of the draf"):
        save_drafter(own, tmp_path / "new")
    save_drafter(own, tmp_path / "new", form="deepspec")
    assert same_bits(load_drafter(tmp_path / "new", target), own)
    assert same_bits(load_drafter(tmp_path / "new"), own)


def test_deepspecs_form_needs_tables_and_a_target_that_has_them(tmp_path, pairs):
    at = pairs["dspark"][0]
    with pytest.raises(ValueError, match="DeepSpec's form keeps what this drafter shares"):
        convert_drafter(at.drafter, tmp_path / "new", form="deepspec")
    assert not list(tmp_path.iterdir())


def test_a_mask_embedding_goes_beside_the_weights_or_into_the_table(tmp_path, pairs):
    at, target, params = pairs["dspark"]
    row = drawn(E)
    masked = params.replace(mask_embed=row)
    save_drafter(masked, tmp_path / "zlab")
    assert (tmp_path / "zlab" / NAME).is_file()
    assert same_bits(load_drafter(tmp_path / "zlab", target), masked)
    save_drafter(masked, tmp_path / "deepspec", form="deepspec", target=target)
    folded = load_drafter(tmp_path / "deepspec", target)
    table = np.array(target.embed)
    table[params.config.mask_id] = row
    assert folded.mask_embed is None and np.array_equal(folded.embed, table)
    with pytest.raises(ValueError, match="speculators' form keeps what this drafter shares"):
        save_drafter(masked, tmp_path / "speculators", form="speculators")


def test_int8_is_ours_alone(tmp_path, pairs):
    with pytest.raises(ValueError, match="int8 is stored in z-lab's form alone"):
        save_drafter(pairs["dflash"][2], tmp_path / "new", form="speculators", int8=True)


def test_a_shipped_drafter_is_converted_in_the_dtype_it_was_made_from(tmp_path):
    written = convert_drafter("smollm2-dflash", tmp_path / "new", form="speculators")
    back = load_drafter(tmp_path / "new")
    assert same_bits(back, written) and back.fc.dtype == jnp.bfloat16
    assert same_bits(back, load_drafter("smollm2-dflash"))


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, pairs):
    at = pairs["dflash"][0]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").touch()
    with pytest.raises(FileExistsError, match="new: it exists, wanted a new folder"):
        convert_drafter(at.drafter, tmp_path / "new", form="speculators")
    with pytest.raises(ValueError, match="form 'gguf', wanted one of zlab, deepspec, speculators"):
        convert_drafter(at.drafter, tmp_path / "other", form="gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_tables_are_the_targets_without_its_layers(pairs):
    at, target, _ = pairs["dflash"]
    tables = load_tables(at.target)
    assert tables.layers == () and tables.config == target.config
    assert np.array_equal(tables.embed, target.embed)
    assert np.array_equal(tables.lm_head, target.lm_head)
