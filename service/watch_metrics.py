"""Metrics of what is checked in spare time. Counters add up over processes; gauges are the last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

OVERLAP_BUCKETS = (0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.99, 1)
DURATION_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
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


class ShadowMetrics:
    """How another version answers what live searches ask."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.info = Gauge(
            "hivlp_shadow_info",
            "1 for the version that live answers are compared with.",
            ("index", "version", "model"),
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.overlap = Histogram(
            "hivlp_shadow_overlap_ratio",
            "Share of an answer's items that the other version answers too.",
            buckets=OVERLAP_BUCKETS,
            registry=registry,
        )
        self.same_first = Counter(
            "hivlp_shadow_same_first_total",
            "Answers whose first item is the same.",
            registry=registry,
        )
        self.duration = Histogram(
            "hivlp_shadow_duration_seconds",
            "The same search by either version, one after the other in a thread of low priority.",
            ("side",),
            buckets=DURATION_BUCKETS_S,
            registry=registry,
        )
        self.skipped = Counter(
            "hivlp_shadow_skipped_total",
            "Live searches that were drawn and not compared, by why.",
            ("reason",),
            registry=registry,
        )
        self.used = Counter(
            "hivlp_shadow_cpu_seconds_total", "What comparing cost.", registry=registry
        )
        self._shown: tuple[str, str, str] | None = None

    def show(self, index: str, version: str, model: str) -> None:
        """Tell which version is compared; the one before is 0 from now on."""
        labels = (index, version, model)
        if self._shown is not None and self._shown != labels:
            self.info.labels(*self._shown).set(0)
        self._shown = labels
        self.info.labels(*labels).set(1)

    def note(self, overlap: float, same_first: bool, live_s: float, shadow_s: float) -> None:
        """One search that was compared."""
        self.overlap.observe(overlap)
        self.same_first.inc(same_first)
        self.duration.labels("live").observe(live_s)
        self.duration.labels("shadow").observe(shadow_s)
