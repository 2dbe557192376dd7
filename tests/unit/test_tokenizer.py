import json
import subprocess
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from dflash_jax.download import SMOLLM2, cache_folder
from dflash_jax.gguf import read_gguf
from dflash_jax.tokenizer import StreamDecoder, Tokenizer, eos_ids, load_tokenizer
from scripts.make_tiny import write_tiny_pair

BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "ĠĠ ĠĠ", "Ċ ĠĠĠĠ", "1 0", "Ġ t", "Ġt h"]
TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- bos_token + message.role + '\n' + message.content + eos_token + '\n' }}
{%- endfor %}
{%- if tools %}{{- tools | tojson }}{% endif %}
{%- if add_generation_prompt %}
    {{- bos_token + 'assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""


def metadata(pre="smollm", **changes):
    """GGUF tokenizer metadata: three control tokens, the bytes, six merges, a user-defined one."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = [*SPECIAL, *BYTES, *merged, "<think>"]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    return {**meta, **changes}


def pieces(tokenizer, text):
    return tokenizer.backend.encode(text, add_special_tokens=False).tokens


@pytest.fixture
def tokenizer():
    return Tokenizer.from_gguf(metadata())


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", [":", "ĊĠĠĠĠ", "1", "0"]),  # digits are split off first
        ("gpt-2", [":", "Ċ", "ĠĠ", "Ġ", "Ġ", "10"]),
        ("qwen2", [":", "Ċ", "ĠĠ", "Ġ", "Ġ", "1", "0"]),
        ("llama-bpe", [":", "Ċ", "ĠĠ", "Ġ", "Ġ", "10"]),
    ],
)
def test_each_pre_tokenizer_splits_digits_and_spaces_in_its_own_way(pre, expected):
    assert pieces(Tokenizer.from_gguf(metadata(pre)), ":\n    10") == expected


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2", "llama-bpe"])
def test_any_text_comes_back(pre):
    text = "It's 2026,\r\n\n  naïve 你好 🎉\tthe end \x00"
    tokenizer = Tokenizer.from_gguf(metadata(pre))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_in_text_are_one_id_each_and_are_skipped_in_output(tokenizer):
    ids = tokenizer.encode("<|im_start|>a<think><|im_end|>")
    assert ids[0] == 1 and ids[-1] == 2 and len(ids) == 4
    assert tokenizer.decode(ids) == "a<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<think><|im_end|>"


def test_the_first_token_is_added_only_where_the_file_asks_for_it(tokenizer):
    with_bos = Tokenizer.from_gguf(metadata(**{"tokenizer.ggml.add_bos_token": True}))
    assert tokenizer.encode("a") == with_bos.encode("a", add_special_tokens=False)
    assert with_bos.encode("a") == [1, *tokenizer.encode("a")]


def test_vocabulary_size_counts_added_tokens(tokenizer):
    assert tokenizer.vocab_size == 3 + 256 + len(MERGES) + 1
    assert tokenizer.token_id("<think>") == tokenizer.vocab_size - 1
    assert tokenizer.token_id("nothing") is None


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, NotImplementedError, "'tekken' is not supported, want"),
        ({"tokenizer.ggml.model": "llama"}, NotImplementedError, "'llama' is not supported"),
        ({"tokenizer.ggml.merges": ["q zz"]}, ValueError, "tokenizer metadata: .*zz"),
    ],
)
def test_what_cannot_be_tokenised_is_said_clearly(changes, error, message):
    with pytest.raises(error, match=message):
        Tokenizer.from_gguf(metadata(**changes))


def test_a_missing_key_is_named():
    meta = metadata()
    del meta["tokenizer.ggml.merges"]
    with pytest.raises(ValueError, match="tokenizer.ggml.merges is missing"):
        Tokenizer.from_gguf(meta)


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi <b>&\"' é"}
ASSISTANT = {"role": "assistant", "content": "one, two, "}
OPEN, CLOSE = "<|im_start|>", "<|im_end|>\n"


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({}, f"{OPEN}assistant\n"),
        ({"enable_thinking": True}, f"{OPEN}assistant\n"),
        ({"enable_thinking": False}, f"{OPEN}assistant\n<think>\n\n</think>\n\n"),
        ({"add_generation_prompt": False}, ""),
        ({"add_generation_prompt": False, "tools": [{"x": "é<"}]}, '[{"x": "é<"}]'),
    ],
)
def test_chat_is_rendered_as_the_template_says(tokenizer, options, ending):
    turns = f"{OPEN}system\nBe brief.{CLOSE}{OPEN}user\nHi <b>&\"' é{CLOSE}"
    assert tokenizer.render_chat([SYSTEM, USER], **options) == turns + ending
    ids = tokenizer.encode_chat([SYSTEM, USER], **options)
    assert tokenizer.decode(ids, skip_special_tokens=False) == turns + ending
    assert ids[0] == 1


def test_a_last_message_can_be_continued(tokenizer):
    text = tokenizer.render_chat([USER, ASSISTANT], continue_final=True)
    assert text.endswith(f"{OPEN}assistant\none, two, ")


def test_a_template_that_raises_is_one_clear_error(tokenizer):
    with pytest.raises(ValueError, match="chat template: unknown role robot"):
        tokenizer.render_chat([{"role": "robot", "content": ""}])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template, line 1"),
        ("{{ messages[0].content + 1 }}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: .*unsafe"),
        ("{{ messages.append(1) }}", "chat template: .*unsafe"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{{ range(10**9) }}", "chat template: Range too big"),
    ],
)
def test_templates_run_in_a_sandbox_and_fail_in_one_sentence(template, message):
    tokenizer = Tokenizer.from_gguf(metadata(**{"tokenizer.chat_template": template}))
    with pytest.raises(ValueError, match=message):
        tokenizer.render_chat([USER])


def test_helpers_that_templates_expect_are_there():
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}"
    )
    tokenizer = Tokenizer.from_gguf(metadata(**{"tokenizer.chat_template": template}))
    assert tokenizer.render_chat([ASSISTANT, USER]) == "one, two, 4"


def test_no_template_is_said():
    meta = metadata()
    del meta["tokenizer.chat_template"]
    with pytest.raises(ValueError, match="no chat template"):
        Tokenizer.from_gguf(meta).render_chat([USER])


def test_a_folder_gives_tokens_template_and_special_tokens(tmp_path):
    folder = write_tiny_pair(tmp_path).target
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.vocab_size == 306
    assert tokenizer.eos_ids == (305,)
    assert tokenizer.render_chat([ASSISTANT]).startswith("<|im_start|>assistant\none, two, <|im_e")
    (folder / "chat_template.jinja").write_text("{{ eos_token }}!")
    assert Tokenizer.load(folder).render_chat([USER]) == "<|im_end|>!"


def edit_config(folder, **changes):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_the_default_of_several_templates_is_taken(tmp_path):
    folder = write_tiny_pair(tmp_path).target
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    edit_config(folder, chat_template=named, eos_token={"content": "<|endoftext|>"})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat([USER]) == "d" and tokenizer.eos_ids == (303,)


def test_tokens_that_only_the_config_lists_are_added(tmp_path):
    folder = write_tiny_pair(tmp_path).target
    edit_config(folder, added_tokens_decoder={"306": {"content": "<|mask|>", "special": True}})
    assert Tokenizer.load(folder).encode("<|mask|>") == [306]
    edit_config(folder, added_tokens_decoder={"9": {"content": "<|other|>", "special": True}})
    with pytest.raises(ValueError, match="'<|other|>' is 306 in .* and 9 in"):
        Tokenizer.load(folder)


def test_a_folder_without_a_readable_tokenizer_is_one_clear_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json: "):
        Tokenizer.load(tmp_path)


def test_stop_ids_are_the_union_of_configs_and_tokenizer(tokenizer):
    assert eos_ids({"eos_token_id": 5}, {"eos_token_id": [5, 7]}, tokenizer) == (2, 5, 7)
    assert eos_ids({"text_config": {"eos_token_id": [9]}, "eos_token_id": None}) == (9,)
    assert eos_ids(None) == ()
    both = metadata(**{"tokenizer.ggml.eot_token_id": 0})
    assert eos_ids({}, {}, Tokenizer.from_gguf(both)) == (0, 2)


@pytest.mark.parametrize("value", ["x", [None], {"a": 1}, [[2]], 1.5, True], ids=str)
def test_a_stop_id_that_is_none_is_named(value):
    for configs in ({"eos_token_id": value}, None), (None, {"eos_token_id": value}):
        with pytest.raises(ValueError, match="config: eos_token_id is "):
            eos_ids(*configs)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is .* wanted an object"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added token 'x' is "),
        ({"added_tokens_decoder": {"5": {}}}, "added token '5' is {}, wanted an id and"),
        ({"added_tokens_decoder": {"5": "a"}}, "added token '5' is a, wanted"),
        ({"chat_template": 5}, "chat_template is '5', wanted text"),
        ({"chat_template": [{"name": "default", "template": 5}]}, "chat_template is '5'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_damaged_tokenizer_config_is_one_clear_error(tmp_path, tokenizer, config, message):
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(tmp_path)


def test_a_targets_tokenizer_knows_the_stop_ids_of_its_configs(tmp_path):
    target = write_tiny_pair(tmp_path).target
    assert Tokenizer.load(target).eos_ids == (305,)
    assert load_tokenizer(target).eos_ids == (303, 305)
    with pytest.raises(FileNotFoundError, match="no such folder or file"):
        load_tokenizer(tmp_path / "nothing")


@given(st.lists(st.integers(0, 265), max_size=80), st.data())
def test_streamed_pieces_add_up_to_the_whole_text(ids, data):
    tokenizer = Tokenizer.from_gguf(metadata())
    stream, at, text = StreamDecoder(tokenizer), 0, ""
    while at < len(ids):
        step = data.draw(st.integers(1, 9))
        text += stream.push(ids[at : at + step])
        at += step
    assert text + stream.flush() == tokenizer.decode(ids)


def test_half_a_character_is_never_emitted(tokenizer):
    text = "né 你好 🎉🎉!"
    stream, pieces = StreamDecoder(tokenizer), []
    for i in tokenizer.encode(text):
        pieces.append(stream.push([i]))
        assert "\ufffd" not in pieces[-1]
    assert "".join(pieces) == text and stream.flush() == ""
    assert "" in pieces  # the bytes of a character before its last one


def test_a_stream_that_ends_in_half_a_character_shows_it_when_flushed(tokenizer):
    stream = StreamDecoder(tokenizer)
    assert stream.push(tokenizer.encode("a🎉")[:-1]) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("b")) == "b"  # ready for the next text


def test_importing_the_tokenizer_imports_no_jax():
    code = "import sys, dflash_jax.tokenizer; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


SMOLLM2_FILE = cache_folder() / SMOLLM2.file_name


@pytest.mark.skipif(not SMOLLM2_FILE.is_file(), reason="SmolLM2 is not in the download cache")
def test_smollm2_splits_digits_and_renders_its_system_prompt():
    tokenizer = Tokenizer.from_gguf(read_gguf(SMOLLM2_FILE).tokenizer)
    assert pieces(tokenizer, ":\n    10") == [":", "ĊĠĠĠĠ", "1", "0"]
    assert tokenizer.vocab_size == 49152 and tokenizer.eos_ids == (2,)
    chat = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert chat == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1 and ids.count(1) == 3 and ids.count(2) == 2
