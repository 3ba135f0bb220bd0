"""What the service sees of an index: plans, stages, items. Local today; other engines fit behind.

A searcher belongs to one snapshot for its whole life. The pipeline drives it stage by stage, so
that the encoder can work on the next level meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hivlp.index.candidates import Candidates, RowArray
from hivlp.index.cascade import Plan, PlanRequest, Stage
from hivlp.index.filters import Expression
from hivlp.index.masks import BoolArray, Mask
from hivlp.models.levels import FloatArray, GalleryKind, LevelSpec, Modality


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """Which version of which index is being searched, and what it fits.

    `rotation` (D, D) float32 turns vectors as they were imported into the index's own space (None:
    they are in it).
    """

    index: str
    version: str
    gallery_space: str
    gallery: GalleryKind
    model: str
    levels: tuple[LevelSpec, ...]
    items: int
    rows: Mapping[Modality, int]
    created_at: str
    rotation: FloatArray | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class FoundItem:
    """One item of the answer: `text` is the caption that matched, when texts were searched."""

    id: str
    row: int
    score: float
    text: str | None = None


@dataclass(frozen=True, slots=True)
class StoredStates:
    """What a version keeps of pictures for re-rankers of one `space` (their `states_space`).

    `known` (n,) says which rows have states; those of these, in order, are `states` (known, m, d).
    """

    space: str
    known: BoolArray
    states: npt.NDArray[np.float16] = field(repr=False)


class Searcher(Protocol):
    """Search one snapshot. Safe to call from several threads at once."""

    @property
    def info(self) -> SnapshotInfo:
        """The snapshot this searcher belongs to."""

    def plan(self, request: PlanRequest, *, allowed: int | None = None) -> Plan:
        """Widths and methods for a request. Raises PlanError for what contradicts itself.

        `allowed`: every step will be given a mask that allows so many rows (a filter, deletions),
        so the plan begins with a scan; None: there is no mask.
        """

    def mask(self, searched: Modality, expression: Expression) -> Mask:
        """The rows of a side whose items a filter allows. Raises FilterError."""

    def step(
        self,
        searched: Modality,
        stage: Stage,
        queries: FloatArray,
        previous: Sequence[Candidates] | None,
        *,
        mask: Mask | None = None,
    ) -> list[Candidates]:
        """Run one stage for n queries; `previous` is what the stage before returned, None at first.

        `queries` is (n, dim of stage.level) float32, normalised. `mask` (None: every row) says
        which of the side's rows the first stage may find, and so all that the later ones re-score;
        the plan must have been made for it. Every index takes one, whatever its codes.
        """

    def exact(
        self,
        searched: Modality,
        query: FloatArray,
        keep: int,
        between: Callable[[], None],
        *,
        mask: Mask | None = None,
    ) -> Candidates:
        """The best `keep` rows for a finest query (dim,) float32, by exhaustive search: what the
        exact plan finds, for whoever has time.

        `between` is called every few milliseconds of work; it may wait, and raise to give up.
        """

    def items(self, searched: Modality, found: Candidates, k: int, offset: int) -> list[FoundItem]:
        """Turn rows into items: the best row of each item, skipping `offset` items, at most `k`."""

    def row_of(self, item_id: str, modality: Modality) -> int:
        """First row of an item. Raises NoSuchItem."""

    def vector(self, modality: Modality, row: int, level: int) -> FloatArray:
        """(1, dim) float32: the gallery vector of a row at a level, for `similar`."""

    def explain(
        self, searched: Modality, queries: Mapping[int, FloatArray], rows: RowArray
    ) -> dict[int, FloatArray]:
        """Scores of `rows` at every level of `queries` (level -> (1, dim)): level -> (m,)."""

    def metadata(
        self, item_ids: Sequence[str], names: Sequence[str] | None
    ) -> list[dict[str, Any]]:
        """Metadata of items, all columns or the named ones. Raises NoSuchItem, PlanError."""

    def stored_states(self, rows: RowArray) -> StoredStates | None:
        """States of rows of the image side; None where the version keeps none at all."""

    def image_ref(self, item_id: str) -> str | None:
        """Where an item's picture lies, as the corpus gave it, or None. Raises NoSuchItem."""
