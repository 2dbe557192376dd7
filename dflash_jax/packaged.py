"""Drafters that come with the package: whatever folders lie in `assets/drafters`.

A folder is named after its target and its kind, as in `smollm2-dflash2`; adding one is enough for
it to be found by name everywhere.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "assets" / "drafters"


def packaged_drafters() -> tuple[str, ...]:
    """Names that `load_drafter` takes, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/config.json")))


def packaged_folder(name: object) -> Path | None:
    """Where a drafter of that name lies; None if there is none."""
    return FOLDER / str(name) if name in packaged_drafters() else None


def our_drafters(target: str) -> tuple[str, ...]:
    """Kinds of the drafters that were made for a target that has a name."""
    prefix = f"{target}-"
    names = packaged_drafters()
    return tuple(name.removeprefix(prefix) for name in names if name.startswith(prefix))
