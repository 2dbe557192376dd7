import pytest

from dflash_jax.prompts import Request, read_jsonl


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
        ('{"prompt": "x", "temperature": 1}', "unknown option 'temperature'"),
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
