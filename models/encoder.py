"""The encoder contract: inputs go in once, early outputs come out coarse first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from hivlp.models.levels import EarlyOutput, GalleryKind, LevelSpec, Modality

RgbImage = npt.NDArray[np.uint8]
"""A decoded picture: (height, width, 3) uint8, RGB, upright, transparency composited over white."""

Item = TypeVar("Item", contravariant=True)


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """Prepared inputs of `size` items: named arrays whose first axis is `size`.

    `truncated[i]` tells whether item i was cut to the encoder's token limit.
    """

    inputs: Mapping[str, npt.NDArray[np.generic]]
    size: int
    truncated: tuple[bool, ...]


class Encoder(Protocol[Item]):
    """One tower of a dual encoder. Safe to call from several threads at once.

    `Item` is `str` for a text encoder and `RgbImage` for an image encoder.
    """

    @property
    def modality(self) -> Modality:
        """What this tower encodes."""

    @property
    def levels(self) -> tuple[LevelSpec, ...]:
        """The early outputs, coarse first."""

    @property
    def gallery(self) -> GalleryKind:
        """How `encode_gallery` vectors are cut into levels."""

    @property
    def gallery_space(self) -> str:
        """Hash of the space that the outputs aim at."""

    @property
    def query_encoder(self) -> str:
        """Hash of exits and precision."""

    def prepare(self, items: Sequence[Item]) -> EncoderBatch:
        """Tokenise texts, or resize and scale pictures. Raises InputError."""

    def encode(self, batch: EncoderBatch) -> Iterator[EarlyOutput]:
        """Yield one EarlyOutput per level, coarse first, as queries.

        The next stage may be computed before it is asked for; closing the iterator drops it.
        """

    def encode_gallery(self, batch: EncoderBatch) -> tuple[EarlyOutput, ...]:
        """Vectors for a gallery: the finest level alone when nested, every level when per_exit."""
