"""The evaluation prompts that come with the package; importing this imports no jax."""

import json
from importlib import resources

EVAL_SETS = ("gsm8k", "humaneval", "mt_bench")


def eval_prompts(name: str) -> list[dict[str, str]]:
    """The prompts of one evaluation set: dicts with `id` and `prompt`."""
    if name not in EVAL_SETS:
        raise ValueError(f"evaluation set {name!r}, wanted one of {', '.join(EVAL_SETS)}")
    path = resources.files("dflash_jax") / "assets" / "eval_prompts" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
