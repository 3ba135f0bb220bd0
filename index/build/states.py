"""Pictures' token states, kept beside a version for the model's re-ranker.

    with keeping_states(cache_folder, model, wanted=True) as kept:
        ... encode into kept.cache with kept.encode ...
        record = kept.write(folder, items, rows)

They are what makes re-ranking cheap for text queries: nothing of a candidate's picture is encoded.
They are large, 2 x tokens x width bytes a picture, and lie twice on the disk: in the version, and
in a cache by content, from which an interrupted or later build goes on. The cache may be removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hivlp.index.build.embeddings import STATES_FOLDER, StatesCache
from hivlp.index.build.model import Model
from hivlp.index.build.spool import Items
from hivlp.index.errors import BuildError
from hivlp.index.snapshot import layout
from hivlp.index.snapshot.manifest import StatesRecord
from hivlp.models.encoder import EncoderBatch
from hivlp.models.reranker import Reranker

WRITTEN_AT_ONCE = 32 * 2**20
"""Bytes of states in memory while they are written."""


@dataclass(frozen=True, slots=True)
class KeptStates:
    """A re-ranker, and the cache of the states that it reads."""

    reranker: Reranker
    cache: StatesCache

    @property
    def row_bytes(self) -> int:
        """Of one picture's states."""
        return self.cache.row_bytes

    def encode(self, batch: EncoderBatch) -> npt.NDArray[np.float16]:
        """(n, m x d) states of pictures that the image tower has prepared."""
        pixels = np.asarray(batch.inputs["pixel_values"], np.float32)
        with np.errstate(over="ignore"):  # what half precision can't hold is refused as Inf
            halves = self.reranker.prepared_states(pixels).astype(np.float16)
        return halves.reshape(batch.size, -1)

    def write(self, folder: Path, items: Items, rows: int) -> StatesRecord:
        """Write image/states.npy of `rows` pictures, zeros for one that was never encoded."""
        tokens, width = self.reranker.image_shape
        keys = (item.image_key for item in items if item.image_key is not None)
        at_once = max(1, WRITTEN_AT_ONCE // (2 * tokens * width))
        with (folder / layout.STATES).open("wb") as stream:
            header = {"descr": "<f2", "fortran_order": False, "shape": (rows, tokens * width)}
            np.lib.format.write_array_header_1_0(stream, header)
            while part := list(islice(keys, at_once)):
                stream.write(self.cache.get(part).data)
        return StatesRecord(space=self.reranker.states_space, tokens=tokens, width=width)


@contextmanager
def keeping_states(
    cache_folder: Path, model: Model, *, wanted: bool
) -> Iterator[KeptStates | None]:
    """What keeps the states of `model`'s pictures, or None where they aren't wanted.

    Raises BuildError where the model has no re-ranker.
    """
    if not wanted:
        yield None
        return
    if model.reranker is None:
        raise BuildError(f"the model {model.name!r} has no re-ranker to keep states for")
    tokens, width = model.reranker.image_shape
    folder, space = cache_folder / STATES_FOLDER, model.reranker.states_space
    with StatesCache(folder, space, tokens * width) as cache:
        yield KeptStates(model.reranker, cache)
