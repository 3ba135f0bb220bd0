"""What is being served: indexes, the models that query them, and the pictures of their items.

Each index is leased a request: a version that is replaced meanwhile stays open until the last
lease of it ends, and an answer comes wholly from one version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hivlp.index.errors import SnapshotMissing
from hivlp.index.searcher import Searcher
from hivlp.models.artifact import ArtifactManifest
from hivlp.models.encoder import Encoder
from hivlp.models.errors import InputError
from hivlp.models.levels import Modality
from hivlp.service.errors import not_available


class Live(Protocol):
    """The cell that holds the active version of one index."""

    def lease(self) -> AbstractContextManager[Searcher]:
        """The active searcher, kept open until the block ends."""

    def close(self) -> None:
        """Retire it: it closes when its last lease ends."""


class Versions(Protocol):
    """Where the versions of indexes live."""

    def versions(self, name: str, /) -> list[str]:
        """The versions of an index, oldest first."""


class QueryModel(Protocol):
    """What queries of an index go through."""

    @property
    def name(self) -> str:
        """The model's name, which answers carry."""

    @property
    def gallery_space(self) -> str:
        """The space that its queries lie in."""

    @property
    def query_encoder(self) -> str:
        """Hash of what makes its queries: answers of two models are never taken for each other."""

    @property
    def encoders(self) -> Mapping[Modality, Encoder[Any]]:
        """Its towers by what they encode."""

    def encoder(self, modality: Modality, param: str) -> Encoder[Any]:
        """The tower of a modality. Raises InputError where there is none."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An artifact with its towers, ready to run."""

    manifest: ArtifactManifest
    encoders: Mapping[Modality, Encoder[Any]]

    @property
    def name(self) -> str:
        """The artifact's name."""
        return self.manifest.name

    @property
    def gallery_space(self) -> str:
        """The space that it aims at."""
        return self.manifest.gallery_space

    @property
    def query_encoder(self) -> str:
        """Hash of its exits and precision."""
        return self.manifest.query_encoder

    def encoder(self, modality: Modality, param: str) -> Encoder[Any]:
        """The tower of a modality. Raises InputError where the model has none."""
        if modality not in self.encoders:
            message = f"the model of this index has no {modality} encoder"
            raise InputError("no_encoder", message, param=param)
        return self.encoders[modality]


@dataclass(frozen=True, slots=True)
class NoModel:
    """What an index of imported vectors is queried with: vectors and items, and no encoder."""

    name: str
    gallery_space: str
    query_encoder: str

    @property
    def encoders(self) -> Mapping[Modality, Encoder[Any]]:
        """None."""
        return {}

    def encoder(self, modality: Modality, param: str) -> Encoder[Any]:
        """Raises InputError, saying what can be asked instead."""
        message = (
            f"this index holds imported vectors and has no {modality} encoder: ask by vector or by "
            "item, or serve it with an artifact that aims at its gallery_space"
        )
        raise InputError("no_encoder", message, param=param)


@dataclass(frozen=True, slots=True)
class ServedIndex:
    """One index, the model that queries it, and the folder its pictures lie in."""

    name: str
    live: Live
    model: QueryModel
    picture_root: Path | None = None


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Every index served here, by name."""

    indexes: Mapping[str, ServedIndex]
    store: Versions
    models: tuple[ServedModel, ...] = field(default=())

    def index(self, name: str) -> ServedIndex:
        """An index by name. Raises SnapshotMissing."""
        if name not in self.indexes:
            known = ", ".join(sorted(self.indexes)) or "none"
            raise SnapshotMissing(name, "", f"no such index here; there are: {known}")
        return self.indexes[name]

    @contextmanager
    def lease(self, name: str, version: str | None = None) -> Iterator[Searcher]:
        """The active searcher of an index, which must be `version` if one is asked for."""
        with self.index(name).live.lease() as searcher:
            active = searcher.info.version
            if version is not None and version != active:
                if version not in self.store.versions(name):
                    raise SnapshotMissing(name, version, "no such version")
                message = f"only the active version, {active}, can be searched"
                raise not_available("snapshot", message)
            yield searcher
