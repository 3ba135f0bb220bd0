"""Batches ahead of the training process, in order, whatever number of workers makes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hivlp.models.errors import TrainingError
from hivlp.models.runtime.progress import say
from hivlp.models.training.data.failures import FailureLog
from hivlp.models.training.data.prepare import Loaded

AHEAD = 4
"""Batches that each worker may be ahead."""
SHOWN = 3


class BatchLoader:
    """Iterates over the tensors of batches `steps`; lists what was left out on the way.

    `expected` is how many pictures there are to try; more than the share `max_failures` of them
    broken is an error. Raises TrainingError.
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
        self._tried = expected + len(failures)
        self._max_failures = max_failures
        self._shown = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for loaded in self._loader:
            if loaded["error"] is not None:
                raise TrainingError(loaded["error"])
            for found in loaded["broken"]:
                if self._failures.add(found) and self._shown < SHOWN:
                    self._shown += 1
                    say(f"left out: {found.place}: {found.reason}")
            self._failures.check_share(self._tried, self._max_failures)
            yield loaded["tensors"]


def _as_it_is(loaded: Any) -> Any:
    return loaded
