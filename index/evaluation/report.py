"""What an evaluation found: records, and JSON of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from hivlp.models.levels import Modality


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number and its 95 % interval; None without one."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class SystemReport:
    """One system in one direction: R@K by K, and ANN recall@10 (None of what is re-ranked).

    `keeps` are a plan's widths; of an early exit, `shares` of queries that each level answered, and
    the `threshold` that was calibrated.
    """

    recalls: dict[int, Figure]
    ann10: Figure | None
    keeps: tuple[int, ...] = ()
    shares: dict[int, float] | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class ThresholdReport:
    """The early exit at one threshold: shares by level, and what is left of the recalls."""

    threshold: float
    shares: dict[int, float]
    recalls: dict[int, float]
    ann10: float


@dataclass(frozen=True, slots=True)
class WidthReport:
    """The cascade with another width of one level, the others as planned: on `queries` of them."""

    level: int
    keep: int
    keeps: tuple[int, ...]
    recalls: dict[int, float]
    ann10: float
    queries: int


@dataclass(frozen=True, slots=True)
class DirectionReport:
    """One direction, `systems` by name.

    `by_width`: by level, ANN recall@10 of its first K rows, by K. `width_needed`: for galleries of
    N sampled rows, the K at which level 1 holds .99 of the exact top 10. `left_out` counts queries
    that had no right row to find. `thresholds` of the early exit, and `widths` that were tried.
    """

    query: Modality
    searched: Modality
    queries: int
    left_out: int
    rows: int
    systems: dict[str, SystemReport]
    by_width: dict[int, dict[int, float]]
    width_needed: dict[int, int]
    thresholds: tuple[ThresholdReport, ...] = ()
    widths: tuple[WidthReport, ...] = ()


@dataclass(frozen=True, slots=True)
class SummaryReport:
    """Both directions of one system: `ar`, the mean of the R@K of both, in percent, and `rsum`,
    their sum. `apart` is its AR less that of the finest level ranked exactly, whose interval is of
    the difference itself: query by query, over the same draws. None of that level.
    """

    ar: Figure
    rsum: Figure
    apart: Figure | None = None


@dataclass(frozen=True, slots=True)
class DifferenceReport:
    """This less the other, in one direction and system (None: both directions), over the queries
    that both have. `figures` by name: `R@1`, `ANN@10`, `AR` in percent; `ours` and `theirs` are
    what was subtracted. `overlap10`: the share of the first 10 answers that both give, in percent
    (None: not known of one of them).
    """

    query: Modality | None
    searched: Modality | None
    system: str
    queries: int
    figures: dict[str, Figure]
    ours: dict[str, float] = field(default_factory=dict)
    theirs: dict[str, float] = field(default_factory=dict)
    overlap10: Figure | None = None


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Everything measured on one version; `unread` pictures could not be read as queries.

    `against` names what `differences` are to. `reranked` is how many of a plan's rows were, at
    most (0: none in any direction). Plans are those of searches for so many `results`.
    """

    index: str
    version: str
    model: str
    items: int
    group: str | None
    protocol: str
    at: tuple[int, ...]
    unread: int
    directions: tuple[DirectionReport, ...]
    summary: dict[str, SummaryReport]
    failures: int = 0
    reranked: int = 0
    results: int = 10
    against: str | None = None
    differences: tuple[DifferenceReport, ...] = ()

    def to_json(self) -> str:
        """The report as indented JSON."""
        return json.dumps(asdict(self), indent=2)
