"""What was asked of a build: family and codes, what the index must do, limits to choose within."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from hivlp.index.errors import BuildError
from hivlp.index.level_index import FAST_SCAN, Codec, Family, Must
from hivlp.index.snapshot.manifest import OptionRecord

FEW_ROWS = 20_000
"""Up to so many rows a flat scan is taken without trying anything else."""
CANDIDATES: tuple[tuple[Family, Codec], ...] = (
    ("scan", "flat"),
    ("scan", "sq8"),
    ("scan", "pq64x4fs"),
    ("scan", "rabitqfs"),
    ("graph", "sq8"),
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """A family and codes, or limits to choose within (None: no limit).

    `must` is what the index is for. `mask`: filters and deletions, so fast-scan codes get maskable
    ones beside them. `batch`: many queries at once, so options are timed in batches. `rebuild`: it
    is built often, so no graph is taken.
    Raises BuildError for what contradicts itself: fast-scan codes are never scored one by one, a
    graph is built anew each time.
    """

    family: Literal["auto", "scan", "graph"] = "auto"
    level1: Literal["auto", "flat", "sq8", "pq64x4fs", "rabitqfs"] = "auto"
    must: tuple[Must, ...] = ("mask",)
    max_memory_bytes: int | None = None
    max_query_ms: float | None = None
    max_build_s: float | None = 1_800.0

    def __post_init__(self) -> None:
        if self.family == "graph" and self.level1 in FAST_SCAN:
            raise BuildError(f"a graph can't walk over {self.level1} codes: ask for sq8 or flat")
        if self.family == "graph" and "rebuild" in self.must:
            raise BuildError(
                "an index that is rebuilt often takes no graphs: leave out `rebuild`, or ask for "
                "the scan family"
            )

    def admits(self, family: Family, codec: Codec) -> bool:
        """Whether a pair is what was asked for."""
        return self.family in ("auto", family) and self.level1 in ("auto", codec)

    def asked(self, rows: int) -> list[tuple[Family, Codec]]:
        """What a side of so many rows is chosen from, the simplest first."""
        asked = [c for c in CANDIDATES if self.admits(*c)] or [self._forced()]
        few = rows <= FEW_ROWS and self.family == "auto"
        if few and ("scan", "flat") not in asked:  # no graph over a handful of rows
            asked = [c for c in asked if c[0] == "scan"] or asked
        return asked

    def possible(self, rows: int) -> list[tuple[Family, Codec]]:
        """Those of them that a side of so many rows may get in the end."""
        asked = self.asked(rows)
        if rows <= FEW_ROWS and ("scan", "flat") in asked:
            return [("scan", "flat")]
        often = "rebuild" in self.must
        return [c for c in asked if not (often and c[0] == "graph")] or asked

    def _forced(self) -> tuple[Family, Codec]:
        """The pair asked for where it is never a candidate by itself: a graph over flat codes."""
        family: Family = "scan" if self.family == "auto" else self.family
        return family, "sq8" if self.level1 == "auto" else self.level1

    def share(self, part: float) -> Wishes:
        """The same for a side that has this part of all rows: memory and building are shared."""
        memory, build = self.max_memory_bytes, self.max_build_s
        return replace(
            self,
            max_memory_bytes=None if memory is None else round(memory * part),
            max_build_s=None if build is None else build * part,
        )

    def over(self, option: OptionRecord) -> list[str]:
        """What an option is known to be over, or not to do."""
        values = (
            (option.memory_bytes, self.max_memory_bytes, "over --max-memory"),
            (option.search_ms, self.max_query_ms, "over --max-query-ms"),
            (option.build_s, self.max_build_s, "over --max-build-s"),
        )
        often = ["rebuilt often"] if self.never_takes(option) else []
        return often + [
            words
            for value, limit, words in values
            if limit is not None and value is not None and value > limit
        ]

    def never_takes(self, option: OptionRecord) -> bool:
        """Whether an option isn't worth measuring: a graph for an index that is rebuilt often."""
        return option.family == "graph" and "rebuild" in self.must
