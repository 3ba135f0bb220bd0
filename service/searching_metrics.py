"""Metrics of how searches are run: together, by which plan, or not at all."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)


class SearchingMetrics:
    """What the pipeline and its workers count."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.batch_size = Histogram(
            "hivlp_batch_size",
            "Searches encoded together by one worker.",
            buckets=BATCH_BUCKETS,
            registry=registry,
        )
        self.batch_requests = Histogram(
            "hivlp_batch_request_searches",
            "Searches in one request to the batch endpoint.",
            buckets=BATCH_BUCKETS,
            registry=registry,
        )
        self.plans = Counter(
            "hivlp_plan_total",
            "Computed answers by the plan that was asked for and the plan that was run.",
            ("asked", "plan"),
            registry=registry,
        )
        self.cancelled = Counter(
            "hivlp_cancelled_total",
            "Searches dropped before they began, since nobody waited for them any more.",
            registry=registry,
        )
        self.worker_deaths = Counter(
            "hivlp_worker_deaths_total",
            "Threads that ran searches and died.",
            registry=registry,
        )
