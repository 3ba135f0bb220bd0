"""Figures that are made when they are asked for: ages, quarantines, processes, and all of a folder.

Whichever process is asked makes them, and they are the same from each.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from prometheus_client import Metric, ProcessCollector
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service import shared_metrics


class Snapshots(Collector):
    """How old what is searched is, and how many versions are quarantined, by index."""

    def __init__(self) -> None:
        self.created_s: dict[str, float] = {}
        self.stores: dict[str, SnapshotStore] = {}

    def collect(self) -> Iterator[Metric]:
        """Both, now."""
        age = GaugeMetricFamily(
            "hivlp_snapshot_age_seconds", "Age of the version being searched.", labels=("index",)
        )
        for index, created_s in list(self.created_s.items()):
            age.add_metric((index,), max(0.0, time.time() - created_s))
        yield age
        bad = GaugeMetricFamily(
            "hivlp_snapshot_quarantined",
            "Versions of an index that failed and were not verified since; -1 where unreadable.",
            labels=("index",),
        )
        for index, store in list(self.stores.items()):
            bad.add_metric((index,), _quarantined(store, index))
        yield bad


def _quarantined(store: SnapshotStore, index: str) -> float:
    try:
        return len(store.quarantine(index).entries())
    except SnapshotError:
        return -1


class Processes(Collector):
    """prometheus-client's `process_...`: of this process, or of all, told apart by their place."""

    def __init__(self, shared: Path | None) -> None:
        self._shared = shared

    def collect(self) -> Iterable[Metric]:
        """What the system knows of each now."""
        if self._shared is None:
            return ProcessCollector(registry=None).collect()
        found: dict[str, Metric] = {}
        for place, pid in shared_metrics.live(self._shared):
            for family in _of_process(pid).collect():
                whole = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    whole.add_sample(sample.name, {"process": place}, sample.value)
        return list(found.values())


def _of_process(pid: int) -> ProcessCollector:
    return ProcessCollector(pid=lambda: pid, registry=None)


class OfAllProcesses(Collector):
    """What the processes of a folder counted, as one; `without_zeros` are gauges whose zeros mean
    that there is no such thing any more.
    """

    def __init__(self, folder: Path, without_zeros: Collection[str]) -> None:
        self._collector = MultiProcessCollector(None, str(folder))  # type: ignore[no-untyped-call]
        self._without_zeros = without_zeros

    def collect(self) -> Iterator[Metric]:
        """All, now."""
        for metric in self._collector.collect():  # type: ignore[no-untyped-call]
            samples: list[Sample] = metric.samples
            if metric.name in self._without_zeros:
                metric.samples = [sample for sample in samples if sample.value]
            yield metric
