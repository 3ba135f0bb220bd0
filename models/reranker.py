"""The re-ranker contract: a cross-modal encoder that scores a query against few candidates.

It reads token states of both towers' full depth. Those of pictures may be kept, so that a text
query pays for itself and the cross-modal layers alone. Every call may be given a time to end by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from hivlp.models.encoder import RgbImage
from hivlp.models.levels import FloatArray, Modality

DEFAULT_RERANKED = 20
"""Candidates of a query that are scored unless told otherwise."""
StatesArray = npt.NDArray[np.float32] | npt.NDArray[np.float16]
"""Token states of pictures: (n, m, d), float32 as they are made, float16 as they are kept."""


@dataclass(frozen=True, slots=True)
class TextStates:
    """Token states of texts: `states` (n, t, d) float32; `mask` (n, t) int64, 0 for padding."""

    states: FloatArray
    mask: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.states)


class Reranker(Protocol):
    """Scores pairs with the cross-modal encoder (HiVLP section on re-ranking).

    Safe to call from several threads at once. `until` (None: no limit) is a time of
    `time.perf_counter`, in seconds; work that isn't done by then raises DeadlinePassed.
    """

    @property
    def fits(self) -> str:
        """The gallery_space whose artifact this re-ranker belongs to."""

    @property
    def identity(self) -> str:
        """Hash of all that its scores depend on."""

    @property
    def states_space(self) -> str:
        """What states of pictures belong to: kept ones can be scored where it is the same."""

    @property
    def image_shape(self) -> tuple[int, int]:
        """Tokens and width of one picture's states: (m, d)."""

    def text_states(self, texts: Sequence[str], *, until: float | None = None) -> TextStates:
        """States of texts, as the text tower leaves them. Raises TextError."""

    def image_states(self, images: Sequence[RgbImage], *, until: float | None = None) -> FloatArray:
        """(n, m, d) float32 states of pictures, as the image tower leaves them."""

    def prepared_states(self, pixels: FloatArray, *, until: float | None = None) -> FloatArray:
        """The same of pictures that the image tower has prepared: (n, 3, height, width) float32."""

    def match(
        self, texts: TextStates, images: StatesArray, *, until: float | None = None
    ) -> FloatArray:
        """(n,) float32 match probabilities in [0, 1] of n pairs; one text or picture serves all."""

    def score(
        self,
        query: str | RgbImage,
        candidates: Sequence[str] | Sequence[RgbImage],
        *,
        searched: Modality,
        until: float | None = None,
    ) -> FloatArray:
        """(n,) float32 match probabilities in [0, 1], one per candidate, in the order given."""
