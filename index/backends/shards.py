"""How many rows to ask of each part of a level whose searches return a limited number.

A device index returns at most `limit` rows. Rows are dealt out to several shards in turn (row r
lies in shard r mod S, at r div S), so that neighbours, which are often alike, lie apart. The best
`fetch` rows of all are among the shards' own best as long as no shard had to stop above the worst
of them: `merge` says so (`sure`), and whoever asked asks for more, up to the limit, and then
elsewhere. So every k is answered right; the dealing only makes the first question suffice.
Nothing here knows of a device: it is arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hivlp.index.candidates import RowArray
from hivlp.models.levels import FloatArray

MOST_SHARDS = 8
"""Each shard is a launch; eight of 2,048 rows hold the best 10,000 of a million comfortably."""
GENEROUS = 2
"""The first question asks each shard for so many times its fair share."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The best of several shards' rows; `sure` unless a shard may have kept back a better one."""

    scores: FloatArray
    rows: RowArray
    sure: bool


def shard_count(rows: int, limit: int) -> int:
    """Shards for so many rows: one while a search can return them all, at most `MOST_SHARDS`."""
    return max(1, min(MOST_SHARDS, -(-rows // limit)))


def shard_size(rows: int, shards: int, shard: int) -> int:
    """Rows of one shard: those r below `rows` with r mod `shards` == `shard`."""
    return max(0, -(-(rows - shard) // shards))


def questions(fetch: int, shards: int, limit: int, slack: int) -> tuple[int, ...]:
    """Rows to ask of each shard, growing, until the answer is sure; none where it can't be.

    The last is either enough whatever the rows, or the limit. More than all shards together can
    return is never asked.
    """
    if fetch > shards * limit:
        return ()
    fair = -(-fetch // shards)
    return tuple(sorted({min(limit, fetch, GENEROUS * fair + slack), min(limit, fetch)}))


def merge(found: Sequence[tuple[FloatArray, RowArray]], size: int, fetch: int) -> Merged:
    """The best `fetch` of what the shards of `size` rows returned, one (scores, places) each.

    Scores are best first, places count within the shard. Ties may stand in any order.
    """
    shards = len(found)
    scores = np.concatenate([own for own, _ in found])
    rows = np.concatenate([places * shards + shard for shard, (_, places) in enumerate(found)])
    order = np.argsort(-scores, kind="stable")[:fetch]
    kept_back = [
        own[-1]
        for shard, (own, _) in enumerate(found)
        if len(own) and len(own) < shard_size(size, shards, shard)
    ]
    enough = len(order) == min(fetch, size)
    sure = enough and all(worst <= scores[order[-1]] for worst in kept_back)
    return Merged(scores[order], rows[order], bool(sure))
