"""A finished folder takes its place at once: what is there is whole, new or as it was before."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from hivlp.models.errors import TrainingError


class PlaceError(TrainingError):
    """A place where no folder can be put."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def place_folder(target: Path, mark: str, write: Callable[[Path], None]) -> None:
    """Make a folder beside `target` with `write`, then put it in its place.

    A folder that is there is replaced only where it is empty or holds a file named `mark`, which
    says that it is of the same kind. Raises PlaceError; whatever `write` raises leaves what was.
    """
    check_place(target, mark)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder) / "made"
        made.mkdir()
        write(made)
        _swap(made, target, Path(folder) / "before")


def check_place(target: Path, mark: str) -> None:
    """Raise PlaceError where a folder of this kind may not be put."""
    if not target.exists():
        return
    if not target.is_dir():
        raise PlaceError(target, "is a file")
    if any(target.iterdir()) and not (target / mark).is_file():
        raise PlaceError(target, "is a folder of something else; choose another place")


def _swap(made: Path, target: Path, before: Path) -> None:
    """Take the target's place; what was there goes with the temporary folder, or comes back."""
    if target.exists():
        target.rename(before)
    try:
        made.rename(target)
    except BaseException:
        if before.exists():
            before.rename(target)
        raise
