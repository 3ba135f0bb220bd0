"""The one module that chooses where a graph runs, and opens onnxruntime sessions.

onnxruntime is imported when the first session is opened, never at import.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from hivlp.models.errors import ArtifactError, DeadlinePassed, HivlpError, MissingExtra

Device = Literal["cpu", "cuda", "auto"]

_CPU = "CPUExecutionProvider"
_CUDA = "CUDAExecutionProvider"
# Distributions that install into the same folder: the one installed last wins, file by file.
_RIVALS: dict[str, tuple[str, ...]] = {
    "onnxruntime": ("onnxruntime", "onnxruntime-gpu"),
    "faiss": (
        "faiss-cpu",
        "faiss-gpu",
        "faiss-gpu-cu11",
        "faiss-gpu-cu12",
        "faiss-gpu-cuvs",
        "faiss-gpu-cu12-cuvs",
        "faiss-gpu-cu13-cuvs",
    ),
}


class ConflictingDistributions(HivlpError):
    """Two installed distributions provide the same module."""

    def __init__(self, module: str, distributions: tuple[str, ...]) -> None:
        names = " and ".join(distributions)
        super().__init__(
            f"{names} both provide the module {module}, and which files win is chance: "
            f"pip uninstall {' '.join(distributions)}, then install one of them, "
            "with 'hivlp[cpu]' or 'hivlp[gpu]'"
        )
        self.module = module
        self.distributions = distributions


def check_distributions(path: Sequence[str] | None = None) -> None:
    """Raise ConflictingDistributions where two distributions provide onnxruntime, or faiss.

    `path` replaces `sys.path` as the folders searched for installed distributions.
    """
    for module, names in _RIVALS.items():
        found = tuple(name for name in names if _is_installed(name, path))
        if len(found) > 1:
            raise ConflictingDistributions(module, found)


def _is_installed(name: str, path: Sequence[str] | None) -> bool:
    folders = list(sys.path if path is None else path)
    return any(importlib.metadata.distributions(name=name, path=folders))


def choose_providers(device: Device) -> tuple[str, ...]:
    """Execution providers for `device`, best first; "auto" is CUDA where onnxruntime offers it.

    Raises MissingExtra where onnxruntime is absent, or is the build that lacks CUDA.
    """
    offered = _onnxruntime().get_available_providers()
    if device == "cpu" or (device == "auto" and _CUDA not in offered):
        return (_CPU,)
    if _CUDA not in offered:
        raise MissingExtra("onnxruntime-gpu", "gpu")
    return (_CUDA, _CPU)


def open_session(folder: Path, file: str, *, threads: int, providers: tuple[str, ...]) -> Any:
    """An onnxruntime InferenceSession of `folder`/`file`, safe to run from several threads.

    Raises ArtifactError naming the file where it is no graph that onnxruntime can run.
    """
    onnxruntime = _onnxruntime()
    try:
        return onnxruntime.InferenceSession(
            str(folder / file), _session_options(threads, providers), providers=list(providers)
        )
    except Exception as error:  # onnxruntime's errors share no base below Exception
        raise ArtifactError(folder, f"{file}: onnxruntime can't load it: {error}") from error


def run_until(
    session: Any,
    outputs: Sequence[str],
    feed: Mapping[str, npt.NDArray[np.generic]],
    until: float | None,
) -> list[npt.NDArray[np.generic]]:
    """Run a session; at `until`, a time of `time.perf_counter` (None: never), it is stopped.

    A graph stops before its next node, so what is left of one node runs past the time. Raises
    DeadlinePassed.
    """
    if until is None:
        found: list[npt.NDArray[np.generic]] = session.run(list(outputs), dict(feed))
        return found
    left = until - time.perf_counter()
    if left <= 0:
        raise DeadlinePassed("the time was up before the graph was run")
    options = _onnxruntime().RunOptions()

    def stop() -> None:
        options.terminate = True

    watch = threading.Timer(left, stop)
    watch.daemon = True
    watch.start()
    try:
        found = session.run(list(outputs), dict(feed), options)
    except Exception as error:
        if options.terminate:
            raise DeadlinePassed("the graph was stopped: its time was up") from error
        raise
    finally:
        watch.cancel()
    return found


def _session_options(threads: int, providers: tuple[str, ...]) -> Any:
    options = _onnxruntime().SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads of several sessions spinning on few cores cost four times the work itself.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.inter_op.allow_spinning", "0")
    # Both keep memory for every shape seen; texts and batches come in many.
    options.enable_mem_pattern = False
    options.enable_cpu_mem_arena = _CUDA in providers
    options.log_severity_level = 3  # errors only: they are raised besides
    return options


def _onnxruntime() -> Any:
    try:
        return importlib.import_module("onnxruntime")
    except ModuleNotFoundError as error:
        raise MissingExtra("onnxruntime", "cpu") from error
