"""Which backend searches a level: the one place that knows, and the one that imports faiss."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Literal

from hivlp.index.backends.exact import ExactLevel
from hivlp.index.backends.rows import LevelRows
from hivlp.index.errors import BrokenFaiss, NoDevice
from hivlp.index.level_index import Codec, LevelIndex
from hivlp.models.errors import MissingExtra
from hivlp.models.runtime.providers import check_distributions

Chosen = Literal["faiss-cpu", "faiss-gpu", "numpy"]
"""`faiss-cpu` opens what is stored as FAISS indexes, `faiss-gpu` puts their rows on the device
besides, `numpy` uses the rows alone."""
Backend = Literal["auto", "faiss-cpu", "faiss-gpu", "numpy"]
"""`auto` is the GPU where faiss sees one, else the CPU."""


def choose_backend(asked: Backend) -> Chosen:
    """What `asked` means here. Raises MissingExtra, NoDevice for a GPU that isn't there."""
    if asked == "numpy" or asked == "faiss-cpu":
        return asked
    return decide(asked, _faiss("faiss_gpu").gpu_count())


def decide(asked: Backend, gpus: int | None) -> Chosen:
    """The backend, where faiss sees so many GPUs (None: its build knows of none).

    Raises MissingExtra and NoDevice where a GPU is asked for that can't be had.
    """
    if asked == "faiss-gpu" and gpus is None:
        raise MissingExtra("faiss-gpu", "gpu")
    if asked == "faiss-gpu" and not gpus:
        raise NoDevice
    if asked == "auto":
        return "faiss-gpu" if gpus else "faiss-cpu"
    return asked


def open_level(level: int, rows: LevelRows, faiss_file: Path | None, backend: Chosen) -> LevelIndex:
    """Open one level: its FAISS file where there is one and the backend is FAISS, else its rows.

    What is stored as a FAISS index is scanned on the device where the backend has one. Raises
    MissingExtra where faiss is wanted and absent, ValueError for an unreadable file.
    """
    if backend == "numpy" or faiss_file is None:
        return ExactLevel(level, rows)
    opened: LevelIndex = _faiss("faiss_cpu").open_codes(faiss_file, level, rows)
    if backend == "faiss-gpu":
        opened = _faiss("faiss_gpu").open_device(opened, rows)
    return opened


def open_graph(graph_file: Path, rows: LevelRows, codes: LevelIndex) -> LevelIndex:
    """Open the graph of the level that `codes` scans: it walks over the same FAISS codes.

    A graph is walked on the CPU, wherever its level is scanned. A level without FAISS codes is
    walked over its rows, in place. Raises MissingExtra where faiss is absent, ValueError for an
    unreadable file or one of other rows.
    """
    on_cpu = getattr(codes, "host", codes)
    shared = None if isinstance(on_cpu, ExactLevel) else on_cpu
    opened: LevelIndex = _faiss("faiss_graph").open_graph(graph_file, codes.level, rows, shared)
    return opened


def open_graphs(
    files: Mapping[int, Path], rows: Mapping[int, LevelRows], levels: Mapping[int, LevelIndex]
) -> dict[int, LevelIndex]:
    """Open a side's graphs by level, and what `link_levels` adds to them."""
    walked = link_levels(files, rows)
    return {level: open_graph(files[own], rows[level], levels[level]) for level, own in walked}


def link_levels(stored: Iterable[int], rows: Mapping[int, LevelRows]) -> list[tuple[int, int]]:
    """Each level that can be walked, and the level whose links it walks.

    The level before the finest walks the finest level's links, where its rows are prefixes of the
    same ones: so the last walk can be over before the last exit has answered.
    """
    own = sorted(stored)
    found = [(level, level) for level in own]
    if own and len(rows) > 2:
        finest = max(rows)
        before = finest - 1
        if finest in own and before not in own and rows[before].matrix is rows[finest].matrix:
            found.append((before, finest))
    return found


def write_level(path: Path, rows: LevelRows, codec: Codec = "flat") -> None:
    """Write a level's unit vectors as a plain FAISS index. Raises MissingExtra, ValueError."""
    _faiss("faiss_cpu").write_codes(path, rows, codec)


def write_graph(
    path: Path,
    rows: LevelRows,
    threads: int = 1,
    step: Callable[[int], None] | None = None,
) -> None:
    """Build and write a level's graph, links alone; `step` is told of every part that was added.

    Only one thread gives the same graph again. Raises MissingExtra, ValueError.
    """
    _faiss("faiss_graph").write_graph(path, rows, threads, step)


def codec_for(codec: Codec, rows: int) -> Codec:
    """The codec that a level of so many rows can have. Raises MissingExtra."""
    possible: Codec = _faiss("faiss_cpu").codec_for(codec, rows)
    return possible


def faiss_version() -> str:
    """The installed faiss's version. Raises MissingExtra."""
    return str(_faiss("faiss_cpu").VERSION)


@functools.cache
def _check_once() -> None:
    """Two packages that both bring faiss: which files won is chance, so neither is used."""
    check_distributions()


def _faiss(module: Literal["faiss_cpu", "faiss_gpu", "faiss_graph"]) -> ModuleType:
    """Import one of faiss's modules. Raises MissingExtra, BrokenFaiss, ConflictingDistributions."""
    _check_once()
    try:
        importlib.import_module("faiss")
    except ModuleNotFoundError as error:
        if error.name != "faiss":
            raise BrokenFaiss(error) from error
        raise MissingExtra("faiss", "cpu") from error
    except (ImportError, RuntimeError) as error:  # a library of CUDA's that isn't there
        raise BrokenFaiss(error) from error
    return importlib.import_module(f"hivlp.index.backends.{module}")
