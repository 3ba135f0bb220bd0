"""The re-ranker contract: a cross-modal encoder that scores a query against few candidates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hivlp.models.encoder import RgbImage
from hivlp.models.levels import FloatArray, Modality


class Reranker(Protocol):
    """Scores pairs with the cross-modal encoder (HiVLP section on re-ranking)."""

    @property
    def fits(self) -> str:
        """The gallery_space whose artifact this re-ranker belongs to."""

    def score(
        self,
        query: str | RgbImage,
        candidates: Sequence[str] | Sequence[RgbImage],
        *,
        searched: Modality,
    ) -> FloatArray:
        """(n,) float32 match probabilities in [0, 1], one per candidate, in the order given."""
