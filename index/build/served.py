"""Whether a side's graphs are worth serving, from the beams that were measured over all its rows.

The choice of a family is an estimate from a sample; the beams are the measurement. Rows that are
mostly equal link to one another alone, and a walk never leaves them: the beam that finds the rest
is as wide as the level, an exhaustive search by the dearest means, or there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from hivlp.index.level_index import Codec
from hivlp.index.snapshot.manifest import OptionRecord, WidthRecord
from hivlp.models.levels import Modality

K = 10
FAR = 0.02
"""Recall this far under the target, by the best beam there is, is a graph that doesn't reach."""


def useless_graph(records: Sequence[WidthRecord], searched: Modality, rows: int) -> str | None:
    """Why the graphs of a side of `rows` rows gain nothing, or None where they do.

    They don't where, for k = 10, some plan and some kind of query, the measured beam reaches all
    rows, or none finds enough where the scan does.
    """
    own = [r for r in records if r.searched == searched and r.k == K]
    enough = {(r.query, r.plan) for r in own if r.family == "scan" and not _far(r)}
    for record in own:
        if record.family != "graph":
            continue
        what = f"the graph gains nothing for {record.query} queries by the {record.plan} plan"
        if max(record.efs) >= rows:
            return f"{what}: its beam is {max(record.efs)} of {rows} rows"
        if _far(record) and (record.query, record.plan) in enough:
            return f"{what}: no beam finds more than {record.recall_chosen_on:.3f} of the best"
    return None


def without_graph(options: Sequence[OptionRecord], reason: str) -> tuple[OptionRecord, ...]:
    """The options with the scan over the same codes chosen in place of the graph."""
    taken = next(option for option in options if option.chosen)
    level1: Codec = taken.level1
    scans = [o for o in options if (o.family, o.level1) == ("scan", level1)]
    assert scans, "a graph that was chosen is chosen over the scan of the same codes"
    return tuple(
        option.model_copy(update={"chosen": True, "reason": "the graph gained nothing"})
        if option is scans[0]
        else option.model_copy(update={"chosen": False, "reason": reason})
        if option is taken
        else option
        for option in options
    )


def _far(record: WidthRecord) -> bool:
    return record.recall_chosen_on < record.target - FAR
