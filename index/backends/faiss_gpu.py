"""A level's rows on a GPU: flat, fp16, inner product; found there, scored and ranked here.

FAISS has no device form of scalar-quantised or fast-scan codes, so a device index is filled from
the rows. It stands before the same level's CPU index, its `host`, and is a faster way to find what
that finds: candidates are scored by the project's own kernel, ties go to the lower row.
Notable: a device search returns at most 2,048 rows (`getMaxKSelection`), so rows are dealt out to
shards (`shards.py`), and what they can't answer for sure, the host does: a k above all that the
shards return, more ties than were fetched. A mask goes to the host at once: FAISS's device
indexes take no selectors. Device indexes aren't thread-safe even for readers, so every call into
one is made by a single thread of the process.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, ParamSpec, Protocol, TypeVar

import faiss as faiss_untyped
import numpy as np

from hivlp.index.backends.faiss_cpu import SLACK, finite
from hivlp.index.backends.rows import LevelRows, check_queries
from hivlp.index.backends.shards import merge, questions, shard_count, shard_size
from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.errors import DeviceFailed, last_line
from hivlp.index.level_index import Capabilities, LevelIndex, SearchParams
from hivlp.index.masks import RowMask
from hivlp.models.levels import FloatArray

faiss: Any = faiss_untyped  # its stubs know half of what it holds
LIMIT = 2_048
DEVICE = 0
CHUNK = 65_536
HALF_MARGIN = 1e-4
"""More than rounding numbers to fp16 moves the inner product of unit vectors in practice: 2e-5 at
128 numbers, 5e-4 at worst."""
log = logging.getLogger("hivlp.index")
P = ParamSpec("P")
T = TypeVar("T")


class DeviceIndex(Protocol):
    """What is used of a device index: called by one thread alone."""

    def add(self, vectors: FloatArray) -> None:
        """Append (n, dim) float32 vectors."""

    def search(self, queries: FloatArray, k: int) -> tuple[FloatArray, RowArray]:
        """(n, k) inner products, best first, and (n, k) rows; k at most the index's limit."""


class Owner:
    """The one thread that touches the device."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hivlp-gpu")
        self._dropped: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result, made by the owner; its error is raised here."""
        return self._pool.submit(self._call, lambda: call(*args, **kwargs)).result()

    def later(self, call: Callable[[], object]) -> None:
        """Have the owner make a call before its next one; its result is dropped.

        Takes no lock: the garbage collector may call it in the midst of anything.
        """
        self._dropped.put(call)

    def _call(self, call: Callable[[], T]) -> T:
        while not self._dropped.empty():
            self._dropped.get()()
        return call()


_owning = threading.Lock()


def owner() -> Owner:
    """The process's owner thread, begun when the first level is put on the device."""
    with _owning:
        return _owner()


@functools.cache
def _owner() -> Owner:
    return Owner()


class DeviceLevel:
    """A `LevelIndex` that finds on a device and falls back on its `host`."""

    def __init__(
        self,
        host: LevelIndex,
        rows: LevelRows,
        make: Callable[[int], DeviceIndex],
        limit: int,
        owner: Owner,
    ) -> None:
        self.host = host
        self._limit = limit
        self._owner = owner
        try:
            self._shards: list[DeviceIndex] = owner.run(_filled, rows, make, limit)
        except RuntimeError as error:
            raise DeviceFailed(host.level, str(error)) from error
        # A device index must go where it was made, or it would free memory that is in use.
        release = weakref.finalize(self, owner.later, self._shards.clear)
        release.atexit = False

    @property
    def level(self) -> int:
        """1 (coarsest) to L."""
        return self.host.level

    @property
    def dim(self) -> int:
        """Dimension of this level's vectors."""
        return self.host.dim

    @property
    def size(self) -> int:
        """Number of rows."""
        return self.host.size

    @property
    def capabilities(self) -> Capabilities:
        """Scan and re-score, any k; a mask where the host takes one."""
        return Capabilities(
            methods=frozenset({"scan", "rescore"}),
            mask=self.host.capabilities.mask,
            entry_rows=False,
            max_k=None,
            exact=False,
            batch=True,
        )

    def search(
        self,
        queries: FloatArray,
        k: int,
        params: SearchParams,
        entry_rows: Sequence[RowArray] | None,
        mask: RowMask | None,
    ) -> list[Candidates]:
        """The best min(k, allowed) rows of each query (n, dim), ties to the lower row.

        Raises InputError for NaN, Inf or a wrong shape.
        """
        assert k >= 1, k
        assert entry_rows is None, "a scan has no entry rows"
        checked = check_queries(queries, self.dim)
        if mask is not None or k + SLACK >= self.size:
            return self.host.search(checked, k, params, None, mask)
        try:
            answers = self._on_device(checked, k)
        except RuntimeError as error:  # full, or gone: the host answers
            log.warning("level %d on the GPU: %s", self.level, last_line(error))
            answers = [None] * len(checked)
        left = [i for i, answer in enumerate(answers) if answer is None]
        if left:
            found = self.host.search(checked[left], k, params, None, None)
            answers = list(answers)
            for i, answer in zip(left, found, strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def score(self, queries: FloatArray, rows: Sequence[RowArray]) -> list[Candidates]:
        """Score given rows, one array a query: all of them, best first. Raises InputError."""
        return self.host.score(queries, rows)

    def _on_device(self, queries: FloatArray, k: int) -> list[Candidates | None]:
        """The answers that the device is sure of; None for the others."""
        answers: list[Candidates | None] = [None] * len(queries)
        left = list(range(len(queries)))
        for ask in questions(k + SLACK, len(self._shards), self._limit, SLACK):
            if not left:
                break
            found = self._owner.run(self._ask, queries[left], ask)
            unsure = []
            for place, i in enumerate(left):
                own = [(scores[place], rows[place]) for scores, rows in found]
                merged = merge(own, self.size, k + SLACK)
                if not merged.sure:
                    unsure.append(i)
                elif merged.scores[-1] < merged.scores[k - 1] - HALF_MARGIN:
                    answers[i] = self.host.score(queries[i : i + 1], [merged.rows])[0].top(k)
            left = unsure
        return answers

    def _ask(self, queries: FloatArray, ask: int) -> list[tuple[FloatArray, RowArray]]:
        count = len(self._shards)
        return [
            index.search(queries, min(ask, shard_size(self.size, count, shard)))
            for shard, index in enumerate(self._shards)
        ]


def gpu_count() -> int | None:
    """Devices that faiss sees; None where it is the build without GPU support."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "GpuIndexFlatIP") else None


def open_device(host: LevelIndex, rows: LevelRows) -> DeviceLevel:
    """Put a level's unit vectors on the GPU, 2 bytes a number, before its CPU index."""
    return DeviceLevel(host, rows, _device_index, LIMIT, owner())


def _filled(rows: LevelRows, make: Callable[[int], DeviceIndex], limit: int) -> list[DeviceIndex]:
    """Shards that hold all rows, dealt out in turn."""
    count = shard_count(rows.size, limit)
    shards = [make(rows.dim) for _ in range(count)]
    step = CHUNK - CHUNK % count
    for start in range(0, rows.size, step):
        part = finite(rows.vectors(np.arange(start, min(start + step, rows.size))))
        for shard, index in enumerate(shards):
            if len(own := np.ascontiguousarray(part[shard::count])):
                index.add(own)
    return shards


@functools.cache
def _resources() -> Any:
    """The device's streams and scratch memory, shared by all indexes of the process."""
    return faiss.StandardGpuResources()


def _device_index(dim: int) -> DeviceIndex:
    config = faiss.GpuIndexFlatConfig()
    config.device = DEVICE
    config.useFloat16 = True
    index: DeviceIndex = faiss.GpuIndexFlatIP(_resources(), dim, config)
    return index
