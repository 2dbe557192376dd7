"""Importing is cheap and touches neither devices nor settings (known fault: it grabs both)."""

import subprocess
import sys
import time

import pytest


def python(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


@pytest.mark.parametrize("arguments", [["--help"], ["decode", "--help"]], ids=" ".join)
def test_help_answers_in_under_a_second_without_jax(arguments):
    code = (
        "import sys; from dflash_jax import cli\n"
        f"assert cli.main({arguments!r}) == 0\n"
        "assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    # The best of three: another process on the machine is no fault of ours.
    times = []
    for _ in range(3):
        start = time.perf_counter()
        python(code)
        times.append(time.perf_counter() - start)
    assert min(times) < 1.0


def test_importing_every_module_starts_no_backend_and_changes_no_setting():
    code = """
import importlib, pkgutil
import jax
before = dict(jax.config.values)
import dflash_jax, pallas_kernels
of_an_extra = {"pallas_kernels._skinny_triton"}  # jax-triton, imported on demand
for package in (dflash_jax, pallas_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name not in of_an_extra:
            importlib.import_module(module.name)
for name in getattr(dflash_jax, "__all__", ()):
    getattr(dflash_jax, name)
assert dict(jax.config.values) == before
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
"""
    assert python(code) == "False"
