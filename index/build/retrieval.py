"""R@K of plans where queries have right answers, and which plan `auto` takes in a direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hivlp.index.build.directions import Direction
from hivlp.index.build.observe import (
    blocks,
    overlapped_ms,
    own_rows,
    run_stages,
    stage_ms,
    without,
)
from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, PlanName
from hivlp.index.level_index import LevelIndex
from hivlp.index.snapshot.manifest import PaceRecord, RetrievalRecord

KS = (1, 5, 10)
WORTH = 1.1
"""The funnel must be so many times faster to be taken: a cascade can stop early besides."""


def measure_retrieval(
    direction: Direction,
    plans: Mapping[PlanName, Plan],
    graphs: Mapping[int, LevelIndex],
    best: Sequence[Candidates],
) -> list[RetrievalRecord]:
    """R@1, R@5 and R@10 of held-out queries by exact search and by each plan.

    None without answers. Queries with doubles in the gallery are left out. `best[i]` is what
    exhaustive search of the finest level finds.
    """
    if direction.answers is None:
        return []
    found: dict[PlanName, list[Candidates]] = {"exact": list(best)}
    for name, plan in plans.items():
        found[name] = []
        for block in blocks(direction):
            *_, (_, last) = run_stages(direction, plan, graphs, block)
            found[name] += last
    own = own_rows(direction, best)
    fair = [i for i in np.flatnonzero(direction.held_out).tolist() if len(own[i]) <= 1]
    records = []
    for name, each in found.items():
        ranks = [direction.answers.rank(i, without(each[i], own[i], max(KS)).rows) for i in fair]
        known = np.array([rank for rank in ranks if rank is not None])
        if len(known):
            records.append(
                RetrievalRecord(
                    searched=direction.searched,
                    query=direction.query,
                    plan=name,
                    queries=len(known),
                    recalls={k: round(float((known <= k).mean()), 4) for k in KS},
                )
            )
    return records


def measure_pace(
    direction: Direction, plans: Mapping[PlanName, Plan], graphs: Mapping[int, LevelIndex]
) -> PaceRecord | None:
    """Which plan answers sooner where the encoder can run ahead; None without its times."""
    if not direction.encode_ms:
        return None
    encode = list(direction.encode_ms)
    took = {}
    for name in ("cascade", "funnel"):
        plan = plans[name]
        spent = stage_ms(direction, plan, graphs)
        reads = [max(stage.query_level, stage.level) for stage in plan.stages]
        if name == "funnel":  # whatever its first query, it begins when everything is encoded
            reads = [len(encode)] * len(reads)
        took[name] = overlapped_ms(encode, list(zip(reads, spent, strict=True)))
    return PaceRecord(
        searched=direction.searched,
        query=direction.query,
        plan="funnel" if took["funnel"] * WORTH < took["cascade"] else "cascade",
        encode_ms=tuple(encode),
        cascade_ms=round(took["cascade"], 3),
        funnel_ms=round(took["funnel"], 3),
    )
