"""Metrics of what is checked in spare time. Counters add up over processes; gauges are the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge

MODE: Literal["livemostrecent"] = "livemostrecent"


class RecallMetrics:
    """What became of the sample of live queries that is answered again exactly."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.recall = Gauge(
            "hivlp_ann_recall",
            "Share of the exact top k that live queries got: of the last ones checked.",
            ("index", "plan", "k"),
            registry=registry,
            multiprocess_mode=MODE,
        )
        self.checks = Counter(
            "hivlp_ann_recall_checks_total",
            "Live queries that were answered again exactly.",
            ("index", "plan"),
            registry=registry,
        )
        self.wanted = Counter(
            "hivlp_ann_recall_wanted_total",
            "Items of the exact top k of queries that were checked.",
            ("index", "plan", "k"),
            registry=registry,
        )
        self.found = Counter(
            "hivlp_ann_recall_found_total",
            "Those of them that had been answered, or others just as good.",
            ("index", "plan", "k"),
            registry=registry,
        )
        self.skipped = Counter(
            "hivlp_ann_recall_skipped_total",
            "Live queries that were drawn and not checked, by why.",
            ("reason",),
            registry=registry,
        )
        self.used = Counter(
            "hivlp_ann_recall_cpu_seconds_total",
            "What checking cost.",
            registry=registry,
        )

    def note(
        self,
        index: str,
        plan: str,
        k: str,
        checked: tuple[int, int],
        recent: Sequence[tuple[int, int]],
    ) -> None:
        """One more (found, wanted), and the recent ones, itself among them."""
        self.found.labels(index, plan, k).inc(checked[0])
        self.wanted.labels(index, plan, k).inc(checked[1])
        mean = sum(found / wanted for found, wanted in recent) / len(recent)
        self.recall.labels(index, plan, k).set(mean)
