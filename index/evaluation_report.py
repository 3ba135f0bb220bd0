"""What an evaluation found: records, and tables for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from hivlp.index.cascade import PlanName
from hivlp.models.levels import Modality


@dataclass(frozen=True, slots=True)
class RetrievalRecall:
    """R@1, R@5, R@10: shares of queries, from 0 to 1."""

    r1: float
    r5: float
    r10: float


@dataclass(frozen=True, slots=True)
class PlanRecall:
    """A plan's retrieval recall, its ANN recall@10, and the widths it ran with."""

    retrieval: RetrievalRecall
    ann10: float
    keeps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EarlyExitRecall:
    """The cascade when it may stop early: `shares` of queries answered by each level."""

    retrieval: RetrievalRecall
    ann10: float
    shares: dict[int, float]


@dataclass(frozen=True, slots=True)
class DirectionReport:
    """One direction. `by_width`: ANN recall@10 of the first level by K1.

    `width_needed`: for galleries of N sampled rows, the K1 that holds .99 of the exact top 10.
    `left_out` counts queries that had no right row to find. `early` is None where no early exit was
    calibrated.
    """

    query: Modality
    searched: Modality
    queries: int
    left_out: int
    rows: int
    levels: dict[int, RetrievalRecall]
    plans: dict[PlanName, PlanRecall]
    by_width: dict[int, float]
    width_needed: dict[int, int]
    early: EarlyExitRecall | None = None


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Everything measured on one version; `unread` pictures could not be read as queries."""

    index: str
    version: str
    model: str
    items: int
    group: str | None
    unread: int
    directions: tuple[DirectionReport, ...]

    def to_json(self) -> str:
        """The report as indented JSON."""
        return json.dumps(asdict(self), indent=2)

    def to_text(self) -> str:
        """The report as tables for a terminal."""
        head = f"{self.index} {self.version}, model {self.model}, {self.items} items"
        if self.unread:
            head += f"; {self.unread} pictures could not be read and were no queries"
        if self.group is not None:
            head += f"; any item of the same {self.group!r} is right"
        return "\n\n".join([head, *(_table(direction) for direction in self.directions)])


def _table(report: DirectionReport) -> str:
    title = f"{report.query} to {report.searched}: {report.queries} queries, {report.rows} rows" + (
        f", {report.left_out} queries without a right row left out" if report.left_out else ""
    )
    lines = [title, f"{'':<10}{'R@1':>8}{'R@5':>8}{'R@10':>8}{'ANN@10':>8}  keeps"]
    lines += [f"level {n:<4}{_cells(found)}" for n, found in report.levels.items()]
    lines += [
        f"{name:<10}{_cells(found.retrieval)}{found.ann10:>8.3f}  {list(found.keeps)}"
        for name, found in report.plans.items()
    ]
    if report.early is not None:
        shares = _pairs(report.early.shares, "{:.1%}")
        lines.append(
            f"{'may stop':<10}{_cells(report.early.retrieval)}{report.early.ann10:>8.3f}  "
            f"answered by level {shares}"
        )
    lines.append("ANN recall@10 by K1   " + _pairs(report.by_width, "{:.3f}"))
    lines.append("K1 for .99 by N       " + _pairs(report.width_needed, "{}"))
    return "\n".join(lines)


def _cells(found: RetrievalRecall) -> str:
    return "".join(f"{value:>8.3f}" for value in (found.r1, found.r5, found.r10))


def _pairs(found: Mapping[int, float], shape: str) -> str:
    def parts() -> Iterator[str]:
        for name, value in found.items():
            yield f"{name}: {shape.format(value)}"

    return "  ".join(parts())
