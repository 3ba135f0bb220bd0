"""Batches ahead of the training process, in order, whatever number of workers makes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hivlp.models.errors import TrainingError
from hivlp.models.runtime.progress import say
from hivlp.models.training.data.failures import FailureLog, LeftOut
from hivlp.models.training.data.parts import PartCounts
from hivlp.models.training.data.prepare import Loaded

AHEAD = 4
"""Batches that each worker may be ahead."""
SHOWN = 3


class BatchLoader:
    """Iterates over the tensors of batches `steps`; lists what was left out on the way.

    `expected` is how many pictures there are to try; more than the share `max_failures` of them
    broken in this sitting is an error. `parts` keeps what a stream counts. Raises TrainingError.
    """

    def __init__(
        self,
        batches: Dataset[Loaded] | IterableDataset[Loaded],
        steps: range,
        failures: FailureLog,
        *,
        workers: int,
        pinned: bool,
        expected: int,
        max_failures: float,
        parts: PartCounts | None = None,
    ) -> None:
        streamed = isinstance(batches, IterableDataset)
        options: dict[str, Any] = {} if streamed else {"sampler": steps}
        if workers:
            # Forking a process that has threads (torch's, tokenizers') may lock up.
            options |= {"multiprocessing_context": "spawn", "prefetch_factor": AHEAD}
        self._loader: DataLoader[Loaded] = DataLoader(
            batches,
            batch_size=None,
            num_workers=workers,
            collate_fn=_as_it_is,
            pin_memory=pinned,
            **options,
        )
        self._failures = failures
        self._expected = expected
        self._parts = parts
        self._max_failures = max_failures
        self._left_out: set[str] = set()
        self._shown = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for loaded in self._loader:
            self._note(loaded["broken"])
            if loaded["error"] is not None:
                raise TrainingError(loaded["error"])
            if self._parts is not None:
                self._parts.add(loaded["parts"])
            yield loaded["tensors"]

    def _note(self, broken: Sequence[LeftOut]) -> None:
        for found in broken:
            self._left_out.add(found.row)
            if self._failures.add(found.what) and self._shown < SHOWN:
                self._shown += 1
                say(f"left out: {found.what.place}: {found.what.reason}")
        self._failures.check_share(len(self._left_out), self._expected, self._max_failures)


def _as_it_is(loaded: Any) -> Any:
    return loaded
