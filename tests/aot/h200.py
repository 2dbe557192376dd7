"""Compile for an H200 on a machine without a GPU, and read what the compiler decided.

The CUDA plugin of JAX compiles without a device when it is told about one; the target is described
by `tests/data/h200_target_config.txtpb`. Use it from a process of its own, since the variable that
lets the plugin load without CUDA libraries must be set before jax starts a backend.
Limits: GEMMs get default configurations, since nothing can be tuned without a device.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

TARGET_CONFIG = Path(__file__).parents[1] / "data" / "h200_target_config.txtpb"
_WHEELS = ("jax_plugins.xla_cuda12", "jax_cuda12_plugin", "nvidia.cuda_nvcc")
_CORES = 132
# Fields of the target config that the compiler of jax 0.10 does not know and rejects.
_SINCE_JAX_0_11 = (
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
    "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
)


def missing_reason() -> str | None:
    """Why nothing can be compiled for an H200 here; None if it can. Imports no jax."""
    for name in _WHEELS:
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # a parent package is missing
            found = None
        if found is None:
            return f"{name} is missing: pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt ..."
    return None


class H200(NamedTuple):
    """An H200 that can be compiled for."""

    sharding: Any
    mesh: Any

    def specs(self, tree: Any) -> Any:
        """ShapeDtypeStructs on this device for a pytree of anything with shape and dtype."""
        import jax

        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.sharding), tree
        )

    def compile(self, jitted: Any, *args: Any, **static: Any) -> Any:
        """The compiled executable of a jitted function; `args` are pytrees of shapes."""
        import jax

        with jax.sharding.use_abstract_mesh(self.mesh):
            lowered = jitted.lower(*self.specs(args), **static)
        return lowered.compile()


def _target_config(jax_version: tuple[int, ...]) -> str:
    """The device's description, without what this jax does not know."""
    lines = TARGET_CONFIG.read_text().splitlines()
    if jax_version < (0, 11):
        lines = [line for line in lines if not line.strip().startswith(_SINCE_JAX_0_11)]
    return "\n".join(lines)


def h200() -> H200:
    """Describe the device to the compiler; call it before anything starts a backend."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="h200",
        target_config=_target_config(jax.__version_info__),
        topology="1x1x1",
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    device = AbstractDevice("NVIDIA H200", _CORES, platform="gpu")
    return H200(NamedSharding(mesh, PartitionSpec()), AbstractMesh((), (), abstract_device=device))


class Instruction(NamedTuple):
    """One instruction of scheduled HLO that leaves an array."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    op: str
    computation: str
    text: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES.get(self.dtype, 4)

    @property
    def sorts(self) -> bool:
        """Whether it is a sort or a top-k, as an instruction or as a call of a library."""
        return self.op in ("sort", "topk") or bool(re.search(r'target="\S*(TopK|Sort)', self.text))

    @property
    def operands(self) -> list[str]:
        """Names of what it reads."""
        arguments = self.text.split(f" {self.op}(", 1)[1].split("), ", 1)[0]
        return re.findall(r"%([\w.\-]+)", arguments)


_ITEM_BYTES = {"bf16": 2, "f16": 2, "s16": 2, "u16": 2, "pred": 1, "u8": 1, "s8": 1}
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = \(?(\w+)\[([\d,]*)\].*? ([\w\-]+)\(")
_NO_KERNEL = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple", "iota", "while"}


def instructions(hlo: str) -> list[Instruction]:
    """Instructions of a module's text; one that leaves a tuple counts by its first array."""
    found, computation = [], ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _INSTRUCTION.match(line):
            shape = tuple(int(size) for size in match[3].split(",") if size)
            found.append(Instruction(match[1], match[2], shape, match[4], computation, line))
    return found


def top_level(hlo: str) -> list[Instruction]:
    """Instructions that leave a buffer in memory: those outside of fusions that do some work."""
    inlined = set(re.findall(r"(?:calls|to_apply)=%([\w.\-]+)", hlo))
    return [
        instruction
        for instruction in instructions(hlo)
        if instruction.computation not in inlined and instruction.op not in _NO_KERNEL
    ]


def kernels(hlo: str) -> Counter[str]:
    """How many of each kernel a module has, by name without numbers."""
    return Counter(re.sub(r"[.\d]+$", "", instruction.name) for instruction in top_level(hlo))
