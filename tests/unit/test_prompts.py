from dataclasses import fields

import pytest

from dflash_jax.prompts import SAMPLING, Request, read_jsonl
from dflash_jax.sampling import SamplingOptions


def write(tmp_path, text, mode="w"):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text) if mode == "b" else path.write_text(text, encoding="utf-8")
    return path


def test_a_file_may_mix_texts_and_chats(tmp_path):
    path = write(
        tmp_path,
        '{"prompt": "Hi", "max_new_tokens": 9, "id": "a"}\n\n'
        '{"messages": [{"role": "user", "content": "Grüße"}], "id": 7}',
    )
    assert read_jsonl(path) == [
        Request(text="Hi", max_new_tokens=9, id="a"),
        Request(messages=({"role": "user", "content": "Grüße"},), id=7),
    ]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "x", "heat": 1}', "unknown option 'heat', wanted one of prompt, messages"),
        ('{"prompt": "x", "num_drafts": 3}', "num_drafts is 3, but .* wanted --num-drafts; a line"),
        ('{"prompt": "x", "eos_ids": [3]}', r"eos_ids is \[3\], but it is one for all prompts"),
        ('{"prompt": "x", "logit_bias": [[1, 2]]}', r"logit_bias is \[\[1, 2\]\], wanted"),
        ('{"prompt": "x", "logit_bias": {"a": 2}}', "logit_bias has 'a', wanted a token id"),
        ('{"prompt": "x", "logit_bias": {"07": 2}}', "logit_bias has '07', wanted a token id"),
        ('{"prompt": "x", "logit_bias": {"-1": 2}}', "logit_bias has '-1', wanted a token id"),
        ('{"prompt": "x", "logit_bias": {"1": 2, "1": 3}}', "'1' is given twice"),
        ('{"prompt": "x", "stop": ["\\ud800"]}', "U\\+D800, half of a surrogate pair"),
        ('{"prompt": ', "not JSON"),
        ('["x"]', "a JSON list, wanted an object"),
        ('{"id": "x"}', "exactly one of"),
        ('{"prompt": "x", "messages": []}', "exactly one of"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 5}', "prompt is 5"),
        ('{"prompt": null}', "prompt is None"),
        ('{"prompt": "x", "max_new_tokens": 0}', "max_new_tokens is 0"),
        ('{"prompt": "x", "max_new_tokens": -1}', "max_new_tokens is -1"),
        ('{"prompt": "x", "max_new_tokens": 1.5}', "max_new_tokens is 1.5"),
        ('{"prompt": "x", "max_new_tokens": true}', "max_new_tokens is True"),
        ('{"prompt": "x", "id": [1]}', "id is"),
        ('{"messages": []}', "at least one"),
        ('{"messages": [{"role": "user"}]}', "messages must be"),
        ('{"messages": "hi"}', "messages must be"),
        ('{"prompt": "x", "prompt": "y"}', "'prompt' is given twice"),
        ('{"prompt": "\\ud800"}', "U\\+D800, half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": "\\udfff"}]}', "U\\+DFFF"),
        ("[" * 100_000, "not JSON .*recursion"),
        ('{"prompt": "x", "max_new_tokens": ' + "1" * 5000 + "}", "not JSON .*digits"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line, message):
    path = write(tmp_path, '{"prompt": "fine"}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read_jsonl(path)
    assert "prompts.jsonl, line 3" in str(error.value) and "\n" not in str(error.value)


def test_a_line_may_say_how_it_is_sampled(tmp_path):
    line = (
        '{"prompt": "x", "temperature": 0.5, "top_k": null, "logit_bias": {"7": -1}, "stop": "y"}'
    )
    (found,) = read_jsonl(path := write(tmp_path, line))
    assert found.sampling == {"temperature": 0.5, "logit_bias": {7: -1}, "stop": "y"}
    assert found.where == f"{path}, line 1"
    assert set(SAMPLING) == {field.name for field in fields(SamplingOptions)}


def test_a_chat_is_refused_when_decoding_is_raw(tmp_path):
    path = write(tmp_path, '{"messages": [{"role": "user", "content": "x"}]}')
    with pytest.raises(ValueError, match="line 1: .*decoding is raw"):
        read_jsonl(path, allow_messages=False)


def test_an_empty_file_and_bytes_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no prompts in it"):
        read_jsonl(write(tmp_path, "\n\n"))
    with pytest.raises(ValueError, match="prompts.jsonl, line 2: not UTF-8"):
        read_jsonl(write(tmp_path, b'{"prompt": "x"}\n\xff\xfe\x00', mode="b"))
    with pytest.raises(OSError):
        read_jsonl(tmp_path / "missing.jsonl")
