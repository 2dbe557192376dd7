"""Rewrite a drafter in another publisher's form, all of it or nothing."""

import os
import shutil
from pathlib import Path
from typing import Any

from dflash_jax.draft_weights import stored_dtype
from dflash_jax.export import save_drafter
from dflash_jax.params import DraftParams
from dflash_jax.weights import PathLike, load_drafter, load_tables


def convert_drafter(
    source: PathLike,
    destination: PathLike,
    *,
    form: str,
    target: PathLike | None = None,
    dtype: Any = None,
) -> DraftParams:
    """Write a drafter as z-lab, DeepSpec or speculators would, and return its params.

    Args:
      source: a drafter's folder in any form that loads, or the name of one of ours.
      destination: a folder that does not exist yet, or is empty.
      form: zlab (DSpark as SpecForge writes it), deepspec or speculators.
      target: the drafter's target: copies of its embedding and head are recognised in `source`,
        and written where the form keeps them.
      dtype: float32 or bfloat16; by default the source's own.

    Raises:
      ValueError, NotImplementedError: a damaged source, or what the form cannot say.
      FileExistsError: `destination` has something in it.
    """
    destination = Path(destination)
    if destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise FileExistsError(f"{destination}: it exists, wanted a new folder")
    dtype = stored_dtype(source) if dtype is None else dtype
    tables = None if target is None else load_tables(target)  # exact, whatever `dtype` is
    params = load_drafter(source, tables, dtype=dtype)
    if not isinstance(params, DraftParams):
        raise NotImplementedError(
            f"{source}: an MTP head has the form of its target's checkpoint alone, wanted a "
            "DFlash, DFlash2 or DSpark drafter"
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.part")
    try:
        save_drafter(params, temporary, form=form, target=tables)
        os.replace(temporary, destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return params
