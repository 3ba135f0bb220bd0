"""From a home folder to everything that is served: opened, checked against each other, warm.

An index is searched with the artifact that aims at its gallery space, whatever either is called.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from PIL import Image

from hivlp.index.backends.choose import Backend
from hivlp.index.errors import SnapshotError
from hivlp.index.searchers import open_searcher
from hivlp.index.snapshot.activation import Activations
from hivlp.index.snapshot.live import LiveSnapshot
from hivlp.index.snapshot.manifest import SnapshotManifest
from hivlp.index.snapshot.prefault import prefault
from hivlp.index.snapshot.snapshot import Snapshot
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.index.snapshot.uploads import picture_roots
from hivlp.models.artifact import MANIFEST_NAME, ArtifactManifest, read_manifest
from hivlp.models.encoder import Encoder
from hivlp.models.errors import ArtifactError, HivlpError, SpaceMismatch
from hivlp.models.levels import Modality
from hivlp.models.runtime.loading import load_encoders, load_reranker
from hivlp.models.runtime.memory import available_memory
from hivlp.models.runtime.pages import use_large_pages
from hivlp.models.runtime.providers import check_distributions
from hivlp.service.queries import ImageQuery, Query, Setting, VectorQuery, text_query
from hivlp.service.schemas import SearchOptions
from hivlp.service.serving import Catalogue, NoModel, QueryModel, ServedModel, ServedVersion
from hivlp.service.settings import Limits, Settings
from hivlp.service.timeline import Timeline
from hivlp.service.work import find

log = logging.getLogger("hivlp.service")

ARTIFACTS = "artifacts"
# Files up to this size are hashed when a version is opened; larger ones when it was published and
# by `hivlp snapshots verify`.
HASH_UP_TO_BYTES = 256 << 20
WARM_TEXT = "red heart"


class NoneServed(HivlpError):
    """There are indexes, and not one of them can be served."""

    def __init__(self, reasons: Mapping[str, BaseException]) -> None:
        each = "; ".join(f"{name}: {error}" for name, error in reasons.items())
        super().__init__(f"no index can be served: {each}")
        self.reasons = dict(reasons)


class NothingToServe(HivlpError):
    """The home folder holds no index."""

    def __init__(self, home: Path, name: str | None = None) -> None:
        what = f"no index named {name!r}" if name else "no index"
        super().__init__(
            f"{what} under {home / 'indexes'}: `hivlp demo` makes one from real pictures, "
            "`hivlp build` from your own"
        )


def names_to_serve(settings: Settings) -> tuple[str, ...]:
    """The indexes asked for, or all there are. Raises NothingToServe."""
    store = SnapshotStore(settings.home)
    found = store.names()
    for name in settings.indexes:
        if name not in found:
            raise NothingToServe(settings.home, name)
    if not found:
        raise NothingToServe(settings.home)
    return settings.indexes or tuple(found)


def _agreed(settings: Settings, store: SnapshotStore) -> tuple[str, ...]:
    """The indexes to begin with: without those that other processes, which serve already, have yet
    to take up, unless they are named. Raises NothingToServe.
    """
    names = names_to_serve(settings)
    if settings.indexes:
        return names
    waiting = [name for name in names if _waits(store, name)]
    if len(waiting) == len(names):
        return names
    for name in waiting:
        log.warning("index %s: left to be activated: those that serve don't serve it", name)
    return tuple(name for name in names if name not in waiting)


def _waits(store: SnapshotStore, name: str) -> bool:
    """Whether others serve, and this index not yet."""
    try:
        return Activations(store, name).taken_up(but="") is False
    except (SnapshotError, OSError):  # a store that is read-only: each follows it alone
        return False


def cell_of(served: ServedVersion, settings: Settings) -> LiveSnapshot[ServedVersion]:
    """The cell of an index that begins with this version."""
    changes = settings.changes
    return LiveSnapshot(served, keep_s=changes.keep_s, keep=changes.keep_versions)


class Loader:
    """Opens versions with the models that query them; a model in use is not loaded again."""

    def __init__(self, settings: Settings) -> None:
        self.store = SnapshotStore(settings.home)
        self._settings = settings
        self._models: WeakValueDictionary[Path, ServedModel] = WeakValueDictionary()

    def open(
        self, name: str, version: str | None = None, like: ServedVersion | None = None
    ) -> ServedVersion:
        """A version, verified, and its model; None: the active one, or the last good. Blocking.

        `like` is served: levels and model are shared where they are the same. Raises HivlpError
        naming what doesn't fit.
        """
        backend = self._settings.backend
        snapshot = (
            open_whole(self.store, name, backend)
            if version is None
            else self.store.open(
                name,
                version,
                backend=backend,
                hash_up_to_bytes=HASH_UP_TO_BYTES,
                like=None if like is None else like.snapshot,
            )
        )
        try:
            return self._served(name, snapshot, like)
        except BaseException:
            snapshot.close()
            raise

    def make_ready(self, served: ServedVersion) -> None:
        """Read a version's files through and search it once, as far as settings say so."""
        if self._settings.warm and served.snapshot is not None:
            read_through(served.snapshot, available_memory())
            warm(served, self._settings.limits)
            log.info("index %s: %s", served.snapshot.manifest.index, use_large_pages().to_text())

    def _served(self, name: str, snapshot: Snapshot, like: ServedVersion | None) -> ServedVersion:
        manifest = snapshot.manifest
        same = like is not None and like.model.gallery_space == manifest.gallery_space
        model = like.model if like is not None and same else self._model(manifest)
        if model.query_encoder != manifest.query_encoder and not same:
            log.warning(
                "index %s was measured with another query encoder than %s's: `hivlp calibrate` it; "
                "until then no cascade of it stops early", name, model.name
            )  # fmt: skip
        pictures = picture_roots(self.store.root / name, manifest.corpus.root)
        searcher = open_searcher(snapshot, model.query_encoder)
        return ServedVersion(searcher, model, pictures, snapshot, searcher.close)

    def _model(self, manifest: SnapshotManifest) -> QueryModel:
        """The artifact that fits an index, loaded once; imported vectors do without.

        Raises ArtifactError, SpaceMismatch.
        """
        try:
            path = find_artifact(self._settings, manifest)
        except (ArtifactError, SpaceMismatch):
            if manifest.imported is None:
                raise
            name = manifest.index
            log.info("index %s: no artifact aims at its space; asked by vector or item", name)
            return NoModel(manifest.model, manifest.gallery_space, manifest.query_encoder)
        model = self._models.get(path)
        if model is None:
            model = self._models[path] = _load_model(path, self._settings)
        return model


def load_catalogue(settings: Settings, loader: Loader | None = None) -> Catalogue:
    """Open every index and its model. Blocking.

    An index that can't be served is left out, which the log says loudly, unless the settings name
    it. Raises HivlpError naming what doesn't fit where none can be, or where one of those named
    can't.
    """
    check_distributions()
    loader = loader or Loader(settings)
    opened: dict[str, ServedVersion] = {}
    failed: dict[str, Exception] = {}
    for name in _agreed(settings, loader.store):
        try:
            opened[name] = loader.open(name)
        except Exception as error:  # whatever is wrong with one, the others are served
            _leave_out(name, error, settings, failed)
        else:
            log.info("index %s, version %s: open", name, opened[name].searcher.info.version)
    if settings.warm:
        _make_all_ready(opened, settings, failed)
    if not opened:
        raise NoneServed(failed) if len(failed) > 1 else next(iter(failed.values()))
    cells = {name: cell_of(own, settings) for name, own in opened.items()}
    return Catalogue(cells, loader.store, loader, frozenset(failed))


def _make_all_ready(
    opened: dict[str, ServedVersion], settings: Settings, failed: dict[str, Exception]
) -> None:
    """Read everything through and search it; what can't be searched is taken out of `opened`."""
    room = available_memory()  # now that the models have taken theirs
    for served in opened.values():
        if served.snapshot is not None:
            room = read_through(served.snapshot, room)
    for name, served in list(opened.items()):
        try:
            warm(served, settings.limits)
        except Exception as error:
            del opened[name]
            served.close()
            _leave_out(name, error, settings, failed)
    log.info("%s", use_large_pages().to_text())


def _leave_out(
    name: str, error: Exception, settings: Settings, failed: dict[str, Exception]
) -> None:
    """Note an index that can't be served. Raises the error for one that was asked for by name."""
    if name in settings.indexes:
        raise error
    failed[name] = error
    # An error of the project's own says all there is to say; of another, the place is needed.
    place = None if isinstance(error, HivlpError) else error
    log.error("index %s: NOT SERVED: %s", name, error, exc_info=place)


def open_whole(store: SnapshotStore, name: str, backend: Backend) -> Snapshot:
    """The active version of an index, or where it fails the last good one, which the log says.

    Raises SnapshotMissing, and NoGoodVersion naming every version and what is wrong with it.
    """
    snapshot, passed = store.open_last_good(
        name, backend=backend, hash_up_to_bytes=HASH_UP_TO_BYTES
    )
    for entry in passed:
        log.error("index %s: NOT SERVED is version %s", name, entry.to_text())
    if passed:
        log.error("index %s: the last good version is %s", name, snapshot.manifest.version)
    return snapshot


def read_through(snapshot: Snapshot, room: int | None) -> int | None:
    """Read a version's files into memory, as far as there is room; returns the bytes left of it.

    A file that can't be read now is left to its first query, which will say what is wrong with it.
    """
    name, version = snapshot.manifest.index, snapshot.manifest.version
    try:
        done = prefault(snapshot, room)
    except OSError as error:
        log.warning("index %s, version %s: not read through: %s", name, version, error)
        return room
    log.info("index %s, version %s: %s", name, version, done.to_text())
    return None if room is None else room - done.bytes_read


def find_artifact(settings: Settings, manifest: SnapshotManifest) -> Path:
    """The folder of the newest artifact that aims at the index's space.

    One that can't be read is left out. Raises ArtifactError for it when no other fits, or for none
    at all, SpaceMismatch when those there are aim elsewhere.
    """
    found: list[tuple[Path, ArtifactManifest]] = []
    broken: list[ArtifactError] = []
    for path in _artifact_folders(settings, manifest):
        try:
            found.append((path, read_manifest(path)))
        except ArtifactError as error:
            log.warning("left out: %s", error)
            broken.append(error)
    fitting = [
        (m.created_at, path) for path, m in found if m.gallery_space == manifest.gallery_space
    ]
    if fitting:
        return max(fitting)[1]
    if broken:
        raise broken[0]
    if found:
        raise SpaceMismatch(expected=manifest.gallery_space, received=found[0][1].gallery_space)
    raise ArtifactError(settings.home / ARTIFACTS, "no model here; `hivlp demo` makes one")


def _artifact_folders(settings: Settings, manifest: SnapshotManifest) -> Iterator[Path]:
    if settings.artifact is not None:
        yield settings.artifact
        return
    folder = settings.home / ARTIFACTS
    named = Path(manifest.artifact) if manifest.artifact else None  # imported vectors have none
    if named is not None and (named / MANIFEST_NAME).is_file():
        yield named
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        known = named is not None and path.resolve() == named.resolve()
        if (path / MANIFEST_NAME).is_file() and not known:
            yield path


def _load_model(path: Path, settings: Settings) -> ServedModel:
    # No executor of its own: the pipeline runs the encoder ahead, and only where it helps.
    loaded = load_encoders(path, threads=settings.threads.encoder, ahead=None)
    towers: dict[Modality, Encoder[Any] | None] = {"text": loaded.text, "image": loaded.image}
    encoders = {side: tower for side, tower in towers.items() if tower is not None}
    threads = settings.threads.reranker or settings.cores
    reranker = load_reranker(loaded.artifact, threads=threads)
    return ServedModel(loaded.artifact.manifest, encoders, reranker)


def warm(served: ServedVersion, limits: Limits) -> None:
    """Search every side of a version once with every encoder, by both plans; with a vector of
    its own where there is none.
    """
    dim = served.searcher.info.levels[-1].dim
    for query in _warm_queries(served.model, limits, dim):
        for searched in served.searcher.info.rows:
            for plan in ("cascade", "funnel"):
                options = SearchOptions(modality=searched, plan=plan)
                setting = Setting(served.searcher, served.model, searched, limits, Timeline())
                find(query, options, setting, None)


def _warm_queries(model: QueryModel, limits: Limits, dim: int) -> Iterator[Query]:
    if "text" in model.encoders:
        yield text_query(WARM_TEXT, limits)
    if "image" in model.encoders:
        yield ImageQuery(_white_png())
    if not model.encoders:
        yield VectorQuery((1.0,) * dim)


def _white_png() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), 255, np.uint8)).save(stream, "PNG")
    return stream.getvalue()
