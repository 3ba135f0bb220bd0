"""Which backend searches a level: the one place that knows, and the one that imports faiss."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Literal

from hivlp.index.backends.exact import ExactLevel
from hivlp.index.backends.rows import LevelRows
from hivlp.index.level_index import Codec, LevelIndex
from hivlp.models.errors import MissingExtra

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
    opened: LevelIndex = _faiss("faiss_cpu").open_codes(faiss_file, level, rows)
    return opened


def open_graph(
    graph_file: Path, rows: LevelRows, codes: LevelIndex, rows_file: Path | None
) -> LevelIndex:
    """Open the graph of the level that `codes` scans: it walks over the same FAISS codes.

    A level without FAISS codes is walked over `rows_file`, in place. Raises MissingExtra where
    faiss is absent, ValueError for an unreadable file.
    """
    shared = None if isinstance(codes, ExactLevel) else codes
    module = _faiss("faiss_graph")
    opened: LevelIndex = module.open_graph(graph_file, codes.level, rows, shared, rows_file)
    return opened


def write_level(path: Path, rows: LevelRows, codec: Codec = "flat") -> None:
    """Write a level's unit vectors as a plain FAISS index. Raises MissingExtra, ValueError."""
    _faiss("faiss_cpu").write_codes(path, rows, codec)


def write_graph(path: Path, rows: LevelRows) -> None:
    """Build and write a level's graph, links alone. Raises MissingExtra, ValueError."""
    _faiss("faiss_graph").write_graph(path, rows)


def codec_for(codec: Codec, rows: int) -> Codec:
    """The codec that a level of so many rows can have. Raises MissingExtra."""
    possible: Codec = _faiss("faiss_cpu").codec_for(codec, rows)
    return possible


def faiss_version() -> str:
    """The installed faiss's version. Raises MissingExtra."""
    return str(_faiss("faiss_cpu").VERSION)


def _faiss(module: Literal["faiss_cpu", "faiss_graph"]) -> ModuleType:
    try:
        return importlib.import_module(f"hivlp.index.backends.{module}")
    except ModuleNotFoundError as error:
        if error.name != "faiss":
            raise
        raise MissingExtra("faiss", "cpu") from error
