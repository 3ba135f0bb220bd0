"""The cascade: a chain of stages, each a scan, a re-score or a graph search of one level.

    level 1: scan all N, keep K1 -> level 2: re-score K1, keep K2 -> level 3: re-score K2, keep k

HiVLP section 3 (inference) and `equations.md` 1.8. A stage never keeps more than it was given,
except a graph stage, which may grow from its entry rows. The last `keep` is the number returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from hivlp.index.candidates import Candidates
from hivlp.index.early_exit import ExitRule
from hivlp.index.errors import PlanError
from hivlp.index.level_index import LevelIndex, Method, SearchParams
from hivlp.index.masks import RowMask
from hivlp.models.levels import FloatArray, Modality

PlanName = Literal["cascade", "funnel", "exact"]


@dataclass(frozen=True, slots=True)
class Stage:
    """Search `level` by `method`, keep the best `keep`.

    `query_level` is the early output used as the query: the level itself in a cascade; the finest
    in a funnel, whose prefix of `level`'s dimension is taken.
    """

    level: int
    method: Method
    keep: int
    query_level: int
    params: SearchParams = field(default_factory=SearchParams)


@dataclass(frozen=True, slots=True)
class Plan:
    """A named chain of stages, checked when made; `exits` says when it may stop early."""

    name: PlanName
    stages: tuple[Stage, ...]
    exits: ExitRule | None = None

    def __post_init__(self) -> None:
        check_stages(self.stages)

    @property
    def keep(self) -> int:
        """The number of rows returned."""
        return self.stages[-1].keep

    def stops(self, level: int, found: Candidates, before: Candidates | None) -> bool:
        """Whether to answer with what `level` found for one query, leaving out what follows."""
        if self.exits is None or len(found) < self.keep:
            return False
        return self.exits.sure(level, found, before)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a caller asks of `Searcher.plan`.

    `keeps` are explicit (level, keep) widths, coarse first; `max_level` caps the levels used;
    `need` is how many items must come back (k + offset); the searcher knows how many rows make
    sure of them. `early_exit`: the cascade may stop where an earlier level is sure enough.
    """

    searched: Modality
    query: Modality
    need: int
    name: Literal["auto", "cascade", "funnel", "exact"] = "auto"
    keeps: tuple[tuple[int, int], ...] = ()
    max_level: int | None = None
    early_exit: bool = False


def check_stages(stages: Sequence[Stage]) -> None:
    """Raise PlanError unless the stages form a cascade."""
    if not stages:
        raise PlanError("a plan needs at least one stage")
    if stages[0].method == "rescore":
        raise PlanError("the first stage has nothing to re-score: scan or graph first")
    for before, stage in pairwise(stages):
        if stage.level <= before.level or stage.query_level < before.query_level:
            raise PlanError("levels must grow from stage to stage")
        if stage.method == "scan":
            raise PlanError(f"level {stage.level}: only the first stage scans")
        if stage.method == "rescore" and stage.keep > before.keep:
            raise PlanError(
                f"level {stage.level} keeps {stage.keep}, more than the {before.keep} it is given",
                limit=before.keep,
            )
    if any(stage.keep < 1 for stage in stages):
        raise PlanError("keep must be at least 1", limit=1)


def run_stage(
    levels: Mapping[int, LevelIndex],
    stage: Stage,
    queries: FloatArray,
    previous: Sequence[Candidates] | None,
    *,
    graphs: Mapping[int, LevelIndex] = MappingProxyType({}),
    mask: RowMask | None = None,
) -> list[Candidates]:
    """One stage for n queries ((n, dim of stage.level) float32): n Candidates of at most `keep`.

    `graphs` are the levels that graph stages walk; `mask` says which rows a scan or a walk may
    find. What a scan finds is all that later stages re-score.
    """
    if stage.method == "graph":
        entry_rows = [found.rows for found in previous] if previous is not None else None
        return graphs[stage.level].search(queries, stage.keep, stage.params, entry_rows, mask)
    level = levels[stage.level]
    if stage.method == "rescore":
        assert previous is not None, "a re-score needs what the stage before found"
        scored = level.score(queries, [found.rows for found in previous])
        return [found.top(stage.keep) for found in scored]
    return level.search(queries, stage.keep, stage.params, None, mask)
