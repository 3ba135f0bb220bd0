"""Builds counted, by whichever serving process looks after them."""

from __future__ import annotations

from datetime import datetime

from prometheus_client import CollectorRegistry, Counter, Histogram

from hivlp.service.jobs.records import Build, BuildRecords, Waiting

BUCKETS_S = (1, 5, 15, 60, 300, 900, 1_800, 3_600, 4 * 3_600, 12 * 3_600, 86_400)
RESULTS = ("done", "failed", "cancelled")


class BuildMetrics:
    """What became of builds, and how long those took that began."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.builds = Counter(
            "hivlp_build_total",
            "Builds over HTTP that ended: done, failed or cancelled.",
            ("result",),
            registry=registry,
        )
        self.duration = Histogram(
            "hivlp_build_duration_seconds",
            "From the begin of a build to its end, tries after a restart included.",
            buckets=BUCKETS_S,
            registry=registry,
        )
        for result in RESULTS:
            self.builds.labels(result)  # 0 is a figure too

    def count(self, build: Build) -> None:
        """One that has ended."""
        self.builds.labels(build.state).inc()
        if build.started_at is not None and build.ended_at is not None:
            began, ended = map(datetime.fromisoformat, (build.started_at, build.ended_at))
            self.duration.observe(max(0.0, (ended - began).total_seconds()))


class Tally:
    """Counts each build once: those that end from now on, whoever ran them."""

    def __init__(self, records: BuildRecords, metrics: BuildMetrics) -> None:
        self._metrics = metrics
        self._waiting = Waiting(records)
        self._waiting.look()

    def look(self) -> None:
        """Count what has ended since. Blocking; raises OSError."""
        for build in self._waiting.news():
            if not build.waiting:
                self._metrics.count(build)
