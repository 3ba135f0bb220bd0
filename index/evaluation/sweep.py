"""The cascade at other widths: R@K and ANN recall by what each narrowing level keeps.

One width is changed, the others are as planned, but that no level may keep more than the one before
it: what is found is what a search with `cascade: [{level, keep}]` finds. On an index of graphs it
is the scanning cascade that widths speak of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hivlp.index.candidates import RowArray
from hivlp.index.cascade import Plan, PlanRequest
from hivlp.index.evaluation.answers import Answers
from hivlp.index.evaluation.figures import WIDTHS
from hivlp.index.evaluation.measure import Measurer, Passes, Scored, answers_of, results_of
from hivlp.index.evaluation.queries import Sampled
from hivlp.index.evaluation.report import WidthReport
from hivlp.models.levels import Modality

QUERIES = 500
MOST_KEPT = 10_000
"""Rows that a level keeps at most: they are scored again for each of QUERIES queries."""


def sweep(
    measurer: Measurer,
    query: Modality,
    sampled: Sampled,
    groups: RowArray,
    at: Sequence[int],
    step: Callable[[int], None] = lambda _: None,
) -> tuple[WidthReport, ...]:
    """Every narrowing level at every width of WIDTHS that the gallery has rows for.

    `groups` (n,) are those of the queries; `step` is called with their number after each width.
    """
    kept, block = measurer.block(sampled, groups)
    if not len(kept):
        return ()
    tried: list[tuple[int, int, Plan, Answers]] = []
    for level, keep, plan in _plans(measurer, query, results_of(at)):
        tried.append((level, keep, plan, answers_of(plan, block, measurer.k)))
        step(len(sampled.queries))
    passes = Passes(block, measurer.k, np.zeros(block.gallery.size, int), [block.gallery.size])
    passes.run([answers for *_, answers in tried])
    return tuple(
        _report(level, keep, plan, passes.scored(answers), at)
        for level, keep, plan, answers in tried
    )


def widths_tried(measurer: Measurer, query: Modality, at: Sequence[int]) -> int:
    """How many widths `sweep` will try."""
    return sum(1 for _ in _plans(measurer, query, results_of(at)))


def _plans(measurer: Measurer, query: Modality, need: int) -> Iterator[tuple[int, int, Plan]]:
    gallery = measurer.gallery
    need += query == gallery.searched
    rows = min(gallery.size, MOST_KEPT)
    for level in sorted(gallery.rows)[:-1]:
        for keep in sorted({*WIDTHS, rows}):
            if need <= keep <= rows:
                request = PlanRequest(gallery.searched, query, need, "cascade", ((level, keep),))
                yield level, keep, gallery.plan(request)


def _report(level: int, keep: int, plan: Plan, scored: Scored, at: Sequence[int]) -> WidthReport:
    return WidthReport(
        level=level,
        keep=keep,
        keeps=tuple(stage.keep for stage in plan.stages),
        recalls={k: round(float((scored.ranks <= k).mean()), 4) for k in at},
        ann10=round(float(scored.ann.mean()), 4),
        queries=len(scored.ranks),
    )
