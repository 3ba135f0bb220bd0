"""Every metric and every bucket, in one place and one registry an app.

Names start with `hivlp_` and end in a base unit; a route is its template, never a path, and what
matches no route counts as `unmatched`, so that nobody can make series by scanning.

Where several processes serve, what any of them tells is of all: every gauge says by its
`multiprocess_mode` (one of the `live...`) how those of several processes become one, and what can
be worked out when it is asked for is `at_scrape`, never a `set_function`.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service import shared_metrics
from hivlp.service.scraped import OfAllProcesses, Processes, Snapshots
from hivlp.service.searching_metrics import SearchingMetrics
from hivlp.service.timeline import Span, overlap_saved_s

REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
STAGE_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)
CANDIDATE_BUCKETS = (1, 10, 30, 100, 300, 1_000, 3_000, 10_000, 100_000)
OPEN_METRICS = "application/openmetrics-text"
UNMATCHED = "unmatched"


class Metrics:
    """The metrics of one app."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.searching = SearchingMetrics(self.registry)
        shared = shared_metrics.joined()
        self._told = self.registry if shared is None else CollectorRegistry()
        self._snapshots = Snapshots()
        self.at_scrape(self._snapshots)
        self.at_scrape(Processes(shared))
        if shared is not None:
            self.at_scrape(OfAllProcesses(shared, without_zeros={"hivlp_snapshot_info"}))
        self._make_request_metrics()
        self._make_search_metrics()
        self._make_shared_cache_metrics()
        self._make_state_metrics()

    def _make_request_metrics(self) -> None:
        self.request_duration = Histogram(
            "hivlp_request_duration_seconds",
            "From the first byte of a request to the last of its answer.",
            ("route", "status"),
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.rejected = Counter(
            "hivlp_rejected_total",
            "Requests answered with an error of the sender's or for want of room, by code.",
            ("reason",),
            registry=self.registry,
        )
        self.connections = Gauge(
            "hivlp_connections",
            "Connections that are open.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.in_flight = Gauge(
            "hivlp_in_flight",
            "Searches that hold a permit.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.queue_size = Gauge(
            "hivlp_queue_size",
            "Searches waiting for a worker.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def _make_search_metrics(self) -> None:
        self.stage_duration = Histogram(
            "hivlp_stage_duration_seconds",
            "One stage of a search; level is empty where the stage has none.",
            ("stage", "level"),
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self.overlap_saved = Counter(
            "hivlp_overlap_saved_seconds_total",
            "Time during which encoding and searching went on at once.",
            registry=self.registry,
        )
        self.exit_level = Counter(
            "hivlp_exit_level_total",
            "Answers by the finest level reached.",
            ("level",),
            registry=self.registry,
        )
        self.degraded = Counter(
            "hivlp_degraded_total",
            "Answers that are less than what was asked for, by what was left out.",
            ("reason",),
            registry=self.registry,
        )
        for reason in ("deadline", "rerank"):
            self.degraded.labels(reason)  # 0 is a figure too
        self.candidates = Histogram(
            "hivlp_candidates",
            "Candidates kept by a level.",
            ("level",),
            buckets=CANDIDATE_BUCKETS,
            registry=self.registry,
        )
        self.cache_requests = Counter(
            "hivlp_cache_requests_total",
            "Look-ups in the answer cache: hit, miss, shared with one under way, or what failed.",
            ("tier", "result"),
            registry=self.registry,
        )

    def _make_shared_cache_metrics(self) -> None:
        self.cache_writes = Counter(
            "hivlp_cache_writes_total",
            "Answers written to a cache that processes share: done, or why not.",
            ("tier", "result"),
            registry=self.registry,
        )
        self.cache_breaker_open = Gauge(
            "hivlp_cache_breaker_open",
            "1 while a shared cache isn't asked, since asking it failed too often.",
            ("tier", "direction"),
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.cache_breaker_trips = Counter(
            "hivlp_cache_breaker_trips_total",
            "So often asking a shared cache failed too often.",
            ("tier", "direction"),
            registry=self.registry,
        )

    def _make_state_metrics(self) -> None:
        names = ("index", "version", "model")
        self.snapshot_info = Gauge(
            "hivlp_snapshot_info",
            "1 for the version being searched: the built one, whatever changed since.",
            names,
            registry=self.registry,
            multiprocess_mode="livemax",
        )
        self.snapshot_items = Gauge(
            "hivlp_snapshot_items",
            "Items of the version being searched.",
            ("index",),
            registry=self.registry,
            multiprocess_mode="livemostrecent",
        )
        self.snapshot_changes = Gauge(
            "hivlp_snapshot_changes",
            "Items that came, changed or went since what is searched was built.",
            ("index",),
            registry=self.registry,
            multiprocess_mode="livemostrecent",
        )
        self.swaps = Counter(
            "hivlp_swap_total",
            "Versions that took another's place: done, or failed and the old one kept.",
            ("result",),
            registry=self.registry,
        )
        self.changes = Counter(
            "hivlp_item_changes_total",
            "Items put or deleted over HTTP.",
            ("kind",),
            registry=self.registry,
        )
        self._shown: dict[str, tuple[str, str, str]] = {}
        self.scrub_failures = Counter(
            "hivlp_scrub_failures_total",
            "Versions that were found corrupt while they were served.",
            ("index",),
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "hivlp_event_loop_lag_seconds",
            "How late the event loop wakes a sleeper.",
            buckets=STAGE_BUCKETS_S,
            registry=self.registry,
        )
        self.processes = Gauge(
            "hivlp_processes",
            "Processes that have loaded everything and serve.",
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def observe_spans(self, spans: Iterable[Span]) -> None:
        """Count the stages of one computed search, and what overlapping them saved.

        However often it waited, for a worker and for others of its batch, that is one wait.
        """
        spans = tuple(spans)
        waits = [span.duration_s for span in spans if span.name == "queue"]
        if waits:
            self.stage_duration.labels("queue", "").observe(sum(waits))
        for span in spans:
            if span.name == "queue":
                continue
            level = "" if span.level is None else str(span.level)
            self.stage_duration.labels(span.name, level).observe(span.duration_s)
            if span.name == "search" and span.candidates_out is not None:
                self.candidates.labels(level).observe(span.candidates_out)
        self.overlap_saved.inc(overlap_saved_s(spans))

    def show_snapshot(
        self,
        *,
        index: str,
        version: str,
        model: str,
        items: int,
        created_s: float,
        changes: int = 0,
    ) -> None:
        """Tell which version of an index is being searched; the one before is told no longer."""
        labels = (index, version, model)
        before = self._shown.get(index, labels)
        self._shown[index] = labels
        self.snapshot_info.labels(*labels).set(1)
        if before != labels:
            self._forget(self.snapshot_info, before)
        self.snapshot_items.labels(index).set(items)
        self.snapshot_changes.labels(index).set(changes)
        self._snapshots.created_s[index] = created_s

    def show_quarantine(self, index: str, store: SnapshotStore) -> None:
        """Tell how many versions of an index are quarantined, whenever that is asked."""
        self.scrub_failures.labels(index)  # 0 is a figure too
        self._snapshots.stores[index] = store

    def at_scrape(self, collector: Collector) -> None:
        """Ask this for figures whenever all are asked for: what is the same in every process."""
        self._told.register(collector)

    def exposition(self, accept: str = "") -> bytes:
        """The text that Prometheus reads; with exemplars, where it asks for OpenMetrics and one
        process serves: files of several hold none. Blocking, then.
        """
        if OPEN_METRICS in accept:
            text: bytes = openmetrics.generate_latest(self._told)  # type: ignore[no-untyped-call]
            return text
        return generate_latest(self._told)

    def _forget(self, gauge: Gauge, labels: tuple[str, ...]) -> None:
        """Tell a series no longer. Files have no room for taking one out: there it is 0."""
        if self._told is self.registry:
            gauge.remove(*labels)
        else:
            gauge.labels(*labels).set(0)


def content_type(accept: str) -> str:
    """The type of what `exposition` writes for this `Accept`."""
    return openmetrics.CONTENT_TYPE_LATEST if OPEN_METRICS in accept else CONTENT_TYPE_LATEST
