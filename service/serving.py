"""What is being served: of each index one version, with the model that queries it.

A version is swapped as one unit: levels, ids, metadata, model and the places of its pictures. It is
leased a request, and stays open until the last lease of it ends when another takes its place: an
answer comes wholly from one version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from hivlp.index.errors import SnapshotMissing
from hivlp.index.searcher import Searcher
from hivlp.index.snapshot.live import NotKept
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import PictureRoots
from hivlp.models.artifact import ArtifactManifest
from hivlp.models.encoder import Encoder
from hivlp.models.errors import InputError
from hivlp.models.levels import Modality
from hivlp.models.reranker import Reranker
from hivlp.service.errors import not_available


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

    @property
    def reranker(self) -> Reranker | None:
        """Its cross-modal encoder, where it has one."""

    def encoder(self, modality: Modality, param: str) -> Encoder[Any]:
        """The tower of a modality. Raises InputError where there is none."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ServedModel:
    """An artifact with its towers, ready to run."""

    manifest: ArtifactManifest
    encoders: Mapping[Modality, Encoder[Any]]
    reranker: Reranker | None = None

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

    @property
    def reranker(self) -> None:
        """None."""
        return None

    def encoder(self, modality: Modality, param: str) -> Encoder[Any]:
        """Raises InputError, saying what can be asked instead."""
        message = (
            f"this index holds imported vectors and has no {modality} encoder: ask by vector or by "
            "item, or serve it with an artifact that aims at its gallery_space"
        )
        raise InputError("no_encoder", message, param=param)


@dataclass(frozen=True, slots=True)
class ServedVersion:
    """One version of an index, whole: `snapshot` is what the searcher has open, where it has any.

    `close_with` closes what the searcher holds.
    """

    searcher: Searcher
    model: QueryModel
    pictures: PictureRoots = field(default_factory=PictureRoots)
    snapshot: Snapshot | None = None
    close_with: Callable[[], None] = lambda: None

    @property
    def built(self) -> str:
        """The version that it is but for items that changed since: itself, where none did."""
        changes = None if self.snapshot is None else self.snapshot.manifest.changes
        return self.searcher.info.version if changes is None else changes.since

    def close(self) -> None:
        """Let go of the levels; called once no lease is left."""
        self.close_with()


class Live(Protocol):
    """The cell that holds the active version of one index, and for a while those before."""

    def lease(
        self, wanted: Callable[[ServedVersion], bool] | None = None
    ) -> AbstractContextManager[ServedVersion]:
        """The active version, or the newest that is `wanted`, kept open until the block ends.

        Raises NotKept.
        """

    def swap(self, value: ServedVersion, keep: Callable[[ServedVersion], bool]) -> None:
        """Make another version the active one; those before it that aren't to `keep` close with
        their last lease.
        """

    def expire(self, keep: Callable[[ServedVersion], bool]) -> None:
        """Let go of versions that were kept for long enough, or aren't to `keep`."""

    def close_in(self, pool: Executor) -> None:
        """Close versions in this pool from now on."""

    def close(self) -> None:
        """Retire it: it closes when its last lease ends."""


class Versions(Protocol):
    """Where the versions of indexes live."""

    def versions(self, name: str, /) -> list[str]:
        """The versions of an index, oldest first."""


class Source(Protocol):
    """Where other versions come from while one is served. Blocking; for threads of their own."""

    @property
    def store(self) -> SnapshotStore:
        """The store that versions are published in."""

    def open(
        self, name: str, version: str | None = None, like: ServedVersion | None = None
    ) -> ServedVersion:
        """A version and its model; None: the active one, or the last good. Raises HivlpError."""

    def make_ready(self, served: ServedVersion) -> None:
        """Read its files through and search it once, before it is asked."""


@dataclass(slots=True)
class Catalogue:
    """Every index served here, by name; without a `source` they stay as they are.

    `indexes` is never changed, only replaced by one that has another index besides: whoever goes
    through it, in any thread, goes on with what it had. `left_out` failed as it was made.
    """

    indexes: Mapping[str, Live]
    store: Versions
    source: Source | None = None
    left_out: frozenset[str] = frozenset()
    _adding: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def add(self, name: str, live: Live) -> None:
        """Serve one more index from now on."""
        with self._adding:
            assert name not in self.indexes, f"{name} is served already"
            self.indexes = {**self.indexes, name: live}

    def live(self, name: str) -> Live:
        """The cell of an index. Raises SnapshotMissing."""
        if name not in self.indexes:
            known = ", ".join(sorted(self.indexes)) or "none"
            raise SnapshotMissing(name, "", f"no such index here; there are: {known}")
        return self.indexes[name]

    @contextmanager
    def lease(self, name: str, version: str | None = None) -> Iterator[ServedVersion]:
        """The active version of an index; where one is asked for: that one, if it is still held.

        Raises SnapshotMissing for an unknown version, InputError for one that is held no longer.
        """
        wanted = None if version is None else _is_version(version)
        try:
            lease = self.live(name).lease(wanted)
            served = lease.__enter__()
        except NotKept:
            raise self._not_held(name, str(version)) from None
        with ExitStack() as held:
            held.push(lease)
            yield served

    def _not_held(self, name: str, version: str) -> Exception:
        if version not in self.store.versions(name):
            return SnapshotMissing(name, version, "no such version")
        with self.lease(name) as served:
            active = served.searcher.info.version
        message = (
            f"only the active version, {active}, can be searched, and for a while those that item "
            "changes superseded"
        )
        return not_available("snapshot", message)

    def models(self) -> list[ServedModel]:
        """The models in use, each once, in the order of the indexes' names."""
        found: dict[str, ServedModel] = {}
        for name in sorted(self.indexes):
            with self.lease(name) as served:
                if isinstance(served.model, ServedModel):
                    found.setdefault(served.model.query_encoder, served.model)
        return list(found.values())


def _is_version(version: str) -> Callable[[ServedVersion], bool]:
    return lambda served: served.searcher.info.version == version
