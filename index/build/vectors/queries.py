"""Queries that are vectors: every level's query is known at once, and no encoder runs.

model = OwnVectors.of(snapshot)        # where a model is asked for, and there is none
queries = read_queries(Path("queries.npy"), snapshot.rotation, snapshot.manifest.specs)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hivlp.index.build.model import Model
from hivlp.index.build.queries import QuerySet
from hivlp.index.build.vectors.npy import Header, NpyFile
from hivlp.index.build.vectors.units import unit_rows
from hivlp.index.candidates import RowArray
from hivlp.index.errors import BuildError, CorpusError
from hivlp.models.levels import FloatArray, GalleryKind, LevelSpec, nested_prefix

if TYPE_CHECKING:
    from hivlp.index.snapshot.manifest import SnapshotManifest

LEAST_QUERIES = 20


@dataclass(frozen=True, slots=True)
class OwnVectors(Model):
    """Stands where a model is asked for and an imported index has none: it encodes nothing."""

    specs: tuple[LevelSpec, ...] = ()
    space: str = ""
    queried_by: str = ""

    @staticmethod
    def of(manifest: SnapshotManifest) -> OwnVectors:
        """What the queries of an imported version are."""
        space, queried_by = manifest.gallery_space, manifest.query_encoder
        name, specs = manifest.model, manifest.specs
        return OwnVectors(name, Path(), None, None, None, specs, space, queried_by)

    @property
    def levels(self) -> tuple[LevelSpec, ...]:
        """Levels of the gallery."""
        return self.specs

    @property
    def gallery(self) -> GalleryKind:
        """Nested, as rotated vectors are."""
        return "nested"

    @property
    def gallery_space(self) -> str:
        """The index's own space."""
        return self.space

    @property
    def query_encoder(self) -> str:
        """The index's own."""
        return self.queried_by


def vector_queries(
    finest: FloatArray, specs: Sequence[LevelSpec], ordinals: RowArray, *, from_corpus: bool
) -> QuerySet:
    """Every level's queries of (n, D) unit vectors in the index's own space."""
    outputs = {spec.level: nested_prefix(finest, spec.dim) for spec in specs}
    return QuerySet(outputs, ordinals, from_corpus=from_corpus)


def read_queries(
    path: Path, rotation: FloatArray | None, specs: Sequence[LevelSpec], limit: int
) -> QuerySet:
    """Up to `limit` queries of a .npy file, (n, D) in the space that the vectors came in.

    A spread of the file where it has more. Raises BuildError.
    """
    array = check_queries(path, specs[-1].dim)
    rows = np.linspace(0, array.count - 1, min(limit, array.count)).astype(np.int64)
    try:
        vectors = np.concatenate([array.read(row, 1) for row in rows.tolist()])
    except CorpusError as error:
        raise BuildError(str(error)) from error
    finest = own_space(vectors, rotation, str(path))
    # Equals must be in one half: what widths are chosen on must not be what they are tried on.
    codes = np.unique(finest, axis=0, return_inverse=True)[1].astype(np.int64)
    return vector_queries(finest, specs, codes.reshape(-1), from_corpus=False)


def check_queries(path: Path, dim: int) -> NpyFile:
    """A file of at least 20 vectors of `dim` numbers. Raises BuildError."""
    try:
        array = NpyFile.open(path)
    except CorpusError as error:
        raise BuildError(str(error)) from error
    if array.dim != dim:
        raise BuildError(f"{path}: vectors of {array.dim} numbers; {dim} are needed")
    if array.count < LEAST_QUERIES:
        raise BuildError(f"{path}: {array.count} queries, at least {LEAST_QUERIES} are needed")
    return array


def one_vector(path: Path, dim: int) -> np.ndarray:
    """(1, dim): the only vector of a .npy file, (dim,) or (1, dim). Raises BuildError."""
    try:
        header = Header.read(path)
        if prod(header.shape) != dim or header.shape[-1:] != (dim,):
            wanted = f"one vector of {dim} numbers is needed"
            raise BuildError(f"{path}: {wanted}, got {header.shape}")
        if header.dtype.kind != "f" or header.dtype.itemsize > 8:
            raise BuildError(f"{path}: holds {header.dtype}; floats are needed")
        found = np.fromfile(path, header.dtype, dim, offset=header.offset)
    except (CorpusError, OSError) as error:
        raise BuildError(str(error)) from error
    if len(found) != dim:
        raise BuildError(f"{path}: is cut short: its header says {dim} numbers")
    return found.astype(header.dtype.newbyteorder("="), copy=False).reshape(1, dim)


def own_space(vectors: np.ndarray, rotation: FloatArray | None, place: str) -> FloatArray:
    """(n, D) vectors as they were given, normalised and rotated into the index's own space.

    Raises BuildError naming the first that has no direction.
    """
    units = unit_rows(vectors)
    if not units.good.all():
        bad = int(np.flatnonzero(~units.good)[0])
        raise BuildError(f"{place}: row {bad} is {units.reason(bad)}")
    return units.vectors if rotation is None else units.vectors @ rotation
