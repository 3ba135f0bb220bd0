"""Early exits measured again: what the recorded rules do with queries drawn anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hivlp.index.build.answers import item_groups
from hivlp.index.build.confidence import recall_lower
from hivlp.index.build.exits import Applied, apply_rule
from hivlp.index.build.measure import direction_of
from hivlp.index.build.model import Model
from hivlp.index.build.risk import Array
from hivlp.index.build.widths import KS, exact_best
from hivlp.index.cascade import PlanRequest
from hivlp.index.early_exit import DEPTH
from hivlp.index.evaluation.queries import SEED, sample_queries
from hivlp.index.local_searcher import LocalSearcher
from hivlp.index.snapshot.manifest import ExitRecord
from hivlp.index.snapshot.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class ExitNow:
    """One direction's early exits now, beside what was promised."""

    record: ExitRecord
    applied: Applied
    queries: int

    @property
    def kept(self) -> bool:
        """Whether the promise holds: refuted only where the loss is surely over it."""
        return all(_least(lost) <= self.record.most_lost for lost in self.applied.lost.values())

    def to_text(self) -> str:
        """One line."""
        trial, full = self.applied.trial, self.applied.full
        stops = ", ".join(f"{share:.1%} at level {level}" for level, share in trial.shares.items())
        recalls = "; ".join(
            f"{name} {trial.recalls[key]:.4f} instead of {full[key]:.4f}"
            for name, key in (("R@1", "r1"), ("R@10", "r10"), ("ANN recall@10", "ann10"))
            if trial.recalls[key] is not None and full[key] is not None
        )
        return (
            f"{self.record.query} to {self.record.searched}, early exit: {stops} of "
            f"{self.queries} queries stop, {trial.saved:.1%} of the encoder's time; {recalls}"
        )


def check_exits(
    snapshot: Snapshot, model: Model, sample: int = 500, seed: int = SEED + 1
) -> list[ExitNow]:
    """What the snapshot's early exits do now, on queries drawn anew; none without thresholds."""
    manifest = snapshot.manifest
    records = [record for record in manifest.exits if record.rule is not None]
    if not records:
        return []
    model.check_fits(manifest.gallery_space)
    sampled, _ = sample_queries(snapshot, model, sample, seed)
    group = manifest.build.metadata_group
    groups = item_groups(
        None if group is None else snapshot.catalogue.column(group), manifest.items
    )
    searcher = LocalSearcher(snapshot)
    found = []
    for record in records:
        if record.query not in sampled:
            continue
        side, queries = snapshot.sides[record.searched], sampled[record.query].queries
        direction = direction_of(side, record.searched, record.query, queries, groups)
        need = min(DEPTH + (record.query == record.searched), side.size)
        plan = searcher.plan(
            PlanRequest(record.searched, record.query, need, "cascade", early_exit=True)
        )
        best = exact_best(direction, max(side.rows), min(max(KS), side.size))
        applied = apply_rule(direction, plan, side.graphs, best, record.loss)
        found.append(ExitNow(record, applied, len(queries)))
    return found


def _least(lost: Array) -> float:
    """What the mean loss is above with 95 % confidence."""
    known = lost[~np.isnan(lost)].astype(np.float32)
    return recall_lower(known) if len(known) else 0.0
