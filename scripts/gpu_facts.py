"""What every figure is read with, and how scripts write results: at once and in one step."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any


def facts(commit: str | None = None) -> dict[str, Any]:
    """Device, versions and commit of this process."""
    import jax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "backend": jax.default_backend(),
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "torch", "jax-triton")},
        "cuda": getattr(getattr(device, "client", None), "platform_version", "").split("\n")[0],
        "commit": commit or commit_of(Path(__file__).parent),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit_of(folder: Path) -> str:
    """The checkout's commit, with a plus sign if files differ from it; "unknown" outside of one."""
    command = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        head = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip()


def write(folder: Path | None, name: str, report: dict[str, Any]) -> None:
    """Replace a results file in one step, so that a time limit loses no earlier result."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{name}.part"
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, folder / name)
