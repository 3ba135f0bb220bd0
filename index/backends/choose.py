"""Which backend searches a level: the one place that knows, and the one that imports faiss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hivlp.index.backends.exact import ExactLevel
from hivlp.index.backends.rows import LevelRows
from hivlp.index.level_index import LevelIndex
from hivlp.models.errors import MissingExtra

if TYPE_CHECKING:
    from types import ModuleType

Backend = Literal["faiss-cpu", "numpy"]
"""`faiss-cpu` opens what is stored as FAISS indexes; `numpy` uses the rows alone."""
BACKENDS: tuple[Backend, ...] = ("faiss-cpu", "numpy")


def open_level(
    level: int, rows: LevelRows, faiss_file: Path | None, backend: Backend
) -> LevelIndex:
    """Open one level: its FAISS file where there is one and the backend is FAISS, else its rows.

    Raises MissingExtra where faiss is wanted and absent, ValueError for an unreadable file.
    """
    if backend == "numpy" or faiss_file is None:
        return ExactLevel(level, rows)
    opened: LevelIndex = _faiss_cpu().open_flat(faiss_file, level)
    return opened


def write_level(path: Path, rows: LevelRows) -> None:
    """Write a level's unit vectors as a plain FAISS index. Raises MissingExtra."""
    _faiss_cpu().write_flat(path, rows)


def faiss_version() -> str:
    """The installed faiss's version. Raises MissingExtra."""
    return str(_faiss_cpu().VERSION)


def _faiss_cpu() -> ModuleType:
    try:
        from hivlp.index.backends import faiss_cpu
    except ModuleNotFoundError as error:
        if error.name != "faiss":
            raise
        raise MissingExtra("faiss", "cpu") from error
    return faiss_cpu
