"""Find golden cases in a manifest, and say which of them are not built yet.

A case runs unless its kind or its target's family is named in a table below. What is nowhere named
runs and fails, which is louder than a skip. A new folder of cases of the same kinds needs nothing
here.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.reference.checkpoint import read_config, read_safetensors

NOT_BUILT_KINDS: dict[str, str] = {}

NOT_BUILT_FAMILIES = {
    "gemma3_text": "Gemma targets are not built yet",
}


@dataclass(frozen=True)
class Case:
    """One golden case: its entry of the manifest and its folder."""

    meta: dict
    folder: Path

    @property
    def name(self):
        """The test id."""
        return self.meta["name"]

    @property
    def kind(self):
        """What sort of arrays it holds."""
        return self.meta["kind"]

    @property
    def is_bf16(self):
        """Whether weights and arithmetic of the recorded run were bf16."""
        return self.meta.get("weights_dtype") == "bfloat16"

    @property
    def target_folder(self):
        """The target's checkpoint: the case's own or the one that it shares; None without one."""
        own = self.folder / "target"
        if own.is_dir():
            return own
        shared = self.meta.get("target_ckpt")
        return (self.folder / shared).resolve() if shared else None

    @property
    def draft_folder(self):
        """The drafter's checkpoint."""
        return self.folder / "draft"

    @property
    def family(self):
        """The target's `model_type`, None for a case without a target."""
        folder = self.target_folder
        return read_config(folder)["model_type"] if folder else None

    def arrays(self):
        """{name: array}; bf16 arrays come back widened to f32."""
        return read_safetensors(self.folder / "io.safetensors")

    def atol(self, group, default=None):
        """The manifest's tolerance for a group of arrays ("logits", "hidden", ...)."""
        return self.meta.get("suggested_atol", {}).get(group, default)

    def reason_to_skip(self):
        """Why this case cannot run yet, None if it must."""
        if self.kind in NOT_BUILT_KINDS:
            return NOT_BUILT_KINDS[self.kind]
        return NOT_BUILT_FAMILIES.get(self.family) if self.family else None


def check_of(case, checks):
    """The check in {kind: check} for a case; a kind without one fails by its name."""
    if case.kind not in checks:
        pytest.fail(f"{case.name}: no check for golden cases of kind {case.kind!r}")
    return checks[case.kind]


def discover(root):
    """Every case below a folder with a manifest.json, in the manifest's order."""
    root = Path(root)
    manifest = json.loads((root / "manifest.json").read_text())
    return [Case(meta, root / "cases" / meta["name"]) for meta in manifest["cases"]]


def parametrize_cases(metafunc):
    """Give a test's `case` argument every golden case, those not built yet skipped by name."""
    if "case" not in metafunc.fixturenames:
        return
    root = metafunc.config.getoption("--golden-dir")
    if root is None:
        skip = pytest.mark.skip(reason="golden vectors: --golden-dir was not given")
        metafunc.parametrize("case", [pytest.param(None, marks=skip, id="no-golden-dir")])
        return
    metafunc.parametrize("case", [_as_parameter(case) for case in discover(root)])


def _as_parameter(case):
    reason = case.reason_to_skip()
    marks = () if reason is None else (pytest.mark.skip(reason=f"{case.name}: {reason}"),)
    return pytest.param(case, id=case.name, marks=marks)
