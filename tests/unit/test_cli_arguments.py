import pytest

from dflash_jax.cli import build_parser, main
from dflash_jax.prompts import read_jsonl
from dflash_jax.sampling_arguments import options


def lines(capsys):
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.strip().splitlines()


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "COMMAND"),
        (["decode"], "wanted one of a prompt, --prompt-ids and --prompts, got none"),
        (["decode", "x", "--prompt-ids", "1"], "got a prompt and --prompt-ids"),
        (["decode", ""], "the prompt is empty"),
        (["decode", "x", "--max-new-tokens", "0"], "0 is below 1"),
        (["decode", "x", "--max-new-tokens", "-5"], "-5 is below 1"),
        (["decode", "x", "--max-new-tokens", "many"], "'many' is not an integer"),
        (["decode", "x", "--batch", "0"], "--batch: 0 is below 1"),
        (["decode", "x", "--num-drafts", "0"], "--num-drafts: 0 is below 1"),
        (["decode", "x", "--cycles", "0"], "--cycles: 0 is below 1"),
        (["decode", "x", "--page-size", "48"], "48 is not a power of two from 4"),
        (["decode", "x", "--page-size", "2"], "2 is not a power of two from 4"),
        (["decode", "x", "--impl", "cuda"], "invalid choice: 'cuda'"),
        (["decode", "x", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["decode", "x", "--beams", "2"], "unrecognized arguments"),
        (["decode", "x", "--chat", "--raw"], "not allowed with"),
        (["decode", "x", "--raw", "--system", "s"], "--system needs the chat template"),
        (["decode", "--prompt-ids", "1", "--chat"], "--prompt-ids are taken as they are"),
        (["decode", "--prompt-ids", "1", "--raw"], "--prompt-ids are taken as they are"),
        (["decode", "--prompt-ids", "1,-2"], "token id -2 is below 0"),
        (["decode", "--prompt-ids", ","], "no token ids"),
        (["decode", "--prompt-ids", "1,x"], "'x' is not an integer"),
        (["decode", "--prompt-ids", "1,,2"], "'' is not an integer"),
        (["decode", "x", "--drafter", "poison:"], "wanted poison:K"),
        (["decode", "x", "--ignore-eos", "--eos-ids", "2"], "contradict"),
        (["decode", "x", "--verify-widths", "1,x"], "'x' is not an integer"),
        (["decode", "x", "--verify-widths", "0,2"], "0 is below 1"),
        (["decode", "x", "--verify-widths", "1", "--check"], "which --verify-widths lets differ"),
        (["decode", "x", "--verify-widths", "1", "--drafter", "none"], "--drafter none never does"),
        (["decode", "x", "--verify-widths", "1", "--drafter", "oracle"], "cut their drafts"),
        (["decode", "x", "--verify-widths", "1", "--min-confidence", "0"], "0 cuts none"),
        (["check", "x", "--sampling", "--prompt-ids", "1"], "a prompt and --prompt-ids, got both"),
        (["decode", "--prompts", "no-such-file.jsonl"], "no-such-file.jsonl: No such file"),
        (["plan", "x"], "unrecognized arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_command_ends_in_one_sentence_and_code_2(capsys, argv, message):
    assert main(argv) == 2
    (said,) = lines(capsys)
    assert message in said and said.startswith("dflash")


def test_a_wrong_line_of_a_prompts_file_is_named(capsys, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n{"prompt": "x", "heat": 0.5}\n')
    assert main(["decode", "--prompts", str(path)]) == 2
    (said,) = lines(capsys)
    assert "line 2: unknown option 'heat', wanted one of prompt, messages, max_new_tokens" in said


@pytest.mark.parametrize(
    "line, message",
    [
        ('"temperature": "hot"', "sampling: temperature is 'hot', wanted a number"),
        ('"temperature": -1', "sampling: temperature is -1, wanted 0 to 10000"),
        ('"temperature": NaN', "sampling: temperature is nan, wanted a finite number"),
        ('"temperature": 1' + "0" * 400, "0, wanted 0 to 10000"),
        ('"top_k": 5', "sampling: top_k is 5, but temperature 0.0 always takes the best token"),
        ('"temperature": 0, "seed": 1', "sampling: seed is 1, but temperature 0 always"),
        ('"temperature": 1, "top_k": 2.0', "sampling: top_k is 2.0, wanted an integer"),
        ('"logprobs": 1', "sampling: logprobs is 1, wanted True or False"),
        ('"stop": [""]', "sampling: stop has an empty text"),
        ('"stop": 5', "sampling: stop is 5, wanted texts"),
        ('"logit_bias": {"5": "x"}', "sampling: logit_bias is 'x', wanted a number"),
    ],
    ids=lambda text: text[:30],
)
def test_sampling_that_a_line_cannot_have_is_named_before_anything_is_loaded(
    capsys, tmp_path, monkeypatch, line, message
):
    monkeypatch.setattr("dflash_jax.models.load", None)
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "fine"}}\n{{"prompt": "x", {line}}}\n')
    assert main(["decode", "--prompts", str(path), "--drafter", "none"]) == 2
    (said,) = lines(capsys)
    assert f"{path}, line 2: sampling: " in said and message in said


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--seed", "3"], "line 2: sampling: top_p is 0.5, but temperature 0.0 always"),
        (["--temperature", "1", "--top-p", "0.9"], "--top-p is given, but no line of"),
        (["--top-k", "5"], "line 2: sampling: top_p is 0.5, but temperature 0.0 always"),
    ],
)
def test_sampling_for_lines_that_cannot_take_it_is_refused(
    capsys, tmp_path, monkeypatch, flags, message
):
    monkeypatch.setattr("dflash_jax.models.load", None)
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x", "temperature": 0}\n{"prompt": "x", "top_p": 0.5}\n')
    assert main(["decode", "--prompts", str(path), "--drafter", "none", *flags]) == 2
    (said,) = lines(capsys)
    assert message in said


def test_a_line_that_draws_nothing_takes_no_seed_from_the_command_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "x"}\n{"prompt": "x", "temperature": 1}\n')
    args = build_parser().parse_args(["decode", "--prompts", str(path), "--seed", "7"])
    args.requests = read_jsonl(path)
    assert [one.seed for one in options(args)] == [None, 7]
    args.requests = args.requests[:1]
    with pytest.raises(ValueError, match="--seed is given, but no line of .* draws nothing"):
        options(args)


def test_help_shows_defaults(capsys):
    assert main(["decode", "--help"]) == 0
    out = capsys.readouterr().out
    assert "(default: 64)" in out and "(default: smollm2)" in out and "None" not in out
