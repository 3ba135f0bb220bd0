"""A running Qdrant collection, downloaded to the disk first: a download that breaks goes on.

    with download(connect(url), url, "things", None, home) as source: ...

    HOME/cache/imports/<hash of address, collection and vector>/
        state.json           of what, how far it came, and what kinds of payload there are
        part_000000.npy      vectors; .parquet beside it: ids, payloads as JSON
        lock                 held by the process that uses the folder

A part is written whole and has reached the disk before the state says so, so whatever dies in
between is read again, and what lies there besides is removed. The folder goes when the import has
been published.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from hivlp.index.build.vectors.npy import NpySource
from hivlp.index.build.vectors.payloads import as_column
from hivlp.index.build.vectors.qdrant_folder import (
    Collection,
    Part,
    State,
    ends,
    locked,
    part_name,
    tidy,
    vector_of,
)
from hivlp.index.build.vectors.source import RawBatch, part_rows
from hivlp.index.build.vectors.tables import PART_BYTES
from hivlp.index.errors import CorpusError
from hivlp.index.remote import is_url, redacted, scrubbed
from hivlp.index.snapshot.manifest import Metric, SourceKind
from hivlp.index.snapshot.room import check_room
from hivlp.models.errors import MissingExtra
from hivlp.models.runtime.progress import Progress, say

API_KEY = "QDRANT_API_KEY"
PAGE = 1_000
"""Points asked for at once, and fewer of long vectors."""
PAGE_NUMBERS = 1_000_000
PART = 20_000
"""Points of a part: the most that is downloaded again."""
TIMEOUT_S = 60
TRIES = 4
VECTOR_BYTES = 4
"""Of one number; payloads besides are not known before they are there."""
SAME = 1e-5
"""Numbers of one vector, read twice, differ by less."""


class QdrantSource:
    """A downloaded collection: points in the order of their ids, payloads as columns.

    The folder is this process's own until `close` or `discard`.
    """

    kind: SourceKind = "qdrant"
    pictures_inside = False
    rooted = False
    left_out = ()

    def __init__(self, folder: Path, source: str, state: State, lock: int) -> None:
        self.folder = folder
        self.source = source
        self.metric: Metric = state.of.metric
        self._lock: int | None = lock
        self._parts = NpySource(folder)
        self.dim, self.count = self._parts.dim, self._parts.count
        self.root = folder.resolve()
        self._columns = state.kinds.columns(taken=("id",))
        fields = [(name, kind) for _, name, kind in self._columns]
        self.schema = pa.schema([("id", pa.string()), *fields])

    def __enter__(self) -> QdrantSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def sample(self, limit: int) -> Iterator[npt.NDArray[Any]]:
        """Blocks of neighbours, spread over all points."""
        return self._parts.sample(limit)

    def batches(self) -> Iterator[RawBatch]:
        """Every point once."""
        for batch in self._parts.batches():
            ids = batch.table.column("id")
            payloads = [orjson.loads(one) for one in batch.table.column("payload").to_pylist()]
            columns = [
                as_column([one.get(key) for one in payloads], kind)
                for key, _, kind in self._columns
            ]
            there = batch.table.column("there").to_numpy()
            reasons = {int(i): "no vector" for i in np.flatnonzero(~there)}
            table = pa.table([ids, *columns], schema=self.schema)
            yield replace(batch, table=table, reasons=reasons)

    def discard(self) -> None:
        """Remove what was downloaded."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let another process have the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def connect(url: str) -> Any:
    """A client of a server. Raises MissingExtra, CorpusError for an address that is none."""
    try:
        from qdrant_client import QdrantClient
    except ModuleNotFoundError as error:
        raise MissingExtra("qdrant-client", "qdrant") from error
    try:
        key = os.environ.get(API_KEY) or None
        return QdrantClient(url=url, api_key=key, timeout=TIMEOUT_S)
    except ValueError as error:
        said = f"not the address of a Qdrant: {scrubbed(error, _with_scheme(url))}"
        raise CorpusError(_shown(url), said) from None  # its own text may hold a password


def download(
    client: Any,
    url: str,
    collection: str,
    vector: str | None,
    home: Path,
    *,
    quiet: bool = False,
) -> QdrantSource:
    """Everything that a collection holds, on the disk under `home`; goes on where it stopped.

    `vector` names one of several vectors. Raises CorpusError for what can't be had or imported, for
    a collection that is not what it was when its download began, and where another process uses
    the same download; NoRoom where the disk has too little for the vectors that are left.
    """
    server = _Server(client, url, f"{_shown(url)} collection {collection!r}")
    of = _described(server, collection, vector)
    name = hashlib.sha256("\0".join((_shown(url), collection, of.vector)).encode()).hexdigest()[:32]
    folder = home / "cache" / "imports" / name
    lock = locked(folder, server.place)
    try:
        state = State.read(folder, of)
        of.compare(state.of, folder, server.place)
        tidy(folder, state)
        left = max(0, of.points - state.points)
        check_room({folder: VECTOR_BYTES * of.dim * left}, f"{server.place}, {left} points")
        _check_points(server, collection, folder, state)
        _go_on(server, collection, folder, state, quiet)
        return QdrantSource(folder, server.place, state, lock)
    except BaseException:
        os.close(lock)
        raise


def _go_on(server: _Server, collection: str, folder: Path, state: State, quiet: bool) -> None:
    """Download what is missing. Raises CorpusError, also for a collection without points."""
    if state.points and not quiet:
        what = "was downloaded before" if state.done else "were downloaded before; going on"
        say(f"{server.place}: {state.points} points {what} (remove {folder} to begin anew)")
    total = state.of.points
    with Progress(f"download {collection}", total, "point", quiet=quiet) as progress:
        progress.step(state.points)
        while not state.done:
            before = state.points
            _part(server, collection, folder, state)
            progress.step(state.points - before)
    if not state.points:
        raise CorpusError(server.place, "holds no points")
    if state.points != total and not quiet:
        say(
            f"{server.place}: {state.points} points downloaded, {total} were there as it began: it "
            "is being changed"
        )


def _check_points(server: _Server, collection: str, folder: Path, state: State) -> None:
    """The first and the last point downloaded are there as they were: a collection that was made
    anew looks like the old one otherwise. Raises CorpusError.
    """
    before = ends(folder, state)
    ids = [int(one) if one.isdecimal() else one for one, _ in before]
    asked = {"ids": ids, "with_vectors": _vectors_asked(state), "with_payload": False}
    points = server.ask(server.client.retrieve, collection, **asked) if ids else []
    now = {str(point.id): vector_of(point, state.of.vector) for point in points}
    for one, vector in before:
        there = now.get(one, ())
        own = np.full(state.of.dim, np.nan) if there is None else np.asarray(there, np.float32)
        if own.shape != vector.shape or not np.allclose(own, vector, atol=SAME, equal_nan=True):
            reason = f"its point {one} changed since its download began; remove {folder} to begin"
            raise CorpusError(server.place, f"{reason} anew")


def _vectors_asked(state: State) -> bool | list[str]:
    """Not the others, sparse ones say; the one without a name can't be asked for by it."""
    return [state.of.vector] if state.of.vector else True


def _described(server: _Server, collection: str, vector: str | None) -> Collection:
    """What is to be downloaded. Raises CorpusError for what can't be imported."""
    params = server.ask(server.client.get_collection, collection).config.params
    name, wanted = _wanted(params.vectors, vector, server.place)
    total = server.ask(server.client.count, collection, exact=True).count
    kept = wanted.model_dump_json(include={"size", "distance", "datatype", "multivector_config"})
    others = sorted(params.vectors) if isinstance(params.vectors, Mapping) else []
    others += sorted(params.sparse_vectors or {})
    config = hashlib.sha256("\0".join((kept, *others)).encode()).hexdigest()[:16]
    metric = cast(Metric, str(wanted.distance.value).lower())
    return Collection(int(wanted.size), metric, name, int(total), config)


def _wanted(params: Any, vector: str | None, place: str) -> tuple[str, Any]:
    """The name and the parameters of the wanted vectors. Raises CorpusError."""
    name = vector or ""
    if isinstance(params, Mapping):
        if vector is None and len(params) == 1:
            name = next(iter(params))
        if name not in params:
            known = ", ".join(sorted(params)) or "none but sparse ones"
            raise CorpusError(place, f"--vector-name is needed, one of: {known}")
        params = params[name]
    elif vector:
        raise CorpusError(place, f"its vectors have no names, {vector!r} was asked for")
    if params is None:
        raise CorpusError(place, "holds sparse vectors only, which can't be rotated")
    if params.multivector_config is not None:
        raise CorpusError(place, "holds several vectors a point; one a point can be imported")
    return name, params


def _part(server: _Server, collection: str, folder: Path, state: State) -> None:
    """Download one part, write it, and then say so."""
    part = Part(state.of, state.kinds)
    following = state.next
    page = max(1, min(PAGE, PAGE_NUMBERS // state.of.dim))
    wanted = min(PART, part_rows(state.of.dim))
    while len(part.ids) < wanted and part.size < PART_BYTES:
        points, following = server.ask(
            server.client.scroll,
            collection,
            limit=min(page, wanted - len(part.ids)),
            offset=following,
            with_payload=True,
            with_vectors=_vectors_asked(state),
        )
        part.add(points)
        if following is None:
            break
    if part.ids:
        part.write(folder / part_name(state.parts))
        state.parts += 1
    state.points += len(part.ids)
    state.next, state.done = following, following is None
    state.write(folder)


def _with_scheme(url: str) -> str:
    return url if is_url(url) else f"http://{url}"


def _shown(url: str) -> str:
    """An address for errors and manifests: without a password, as it was given otherwise."""
    shown = redacted(_with_scheme(url))
    return shown if is_url(url) else shown.removeprefix("http://")


@dataclass(frozen=True, slots=True)
class _Server:
    """A client, and how what it can't do is said."""

    client: Any
    url: str
    place: str

    def ask(self, call: Any, *given: Any, **named: Any) -> Any:
        """What the server answers; asked again a few times when it can't be reached.

        Raises CorpusError.
        """
        from qdrant_client.http.exceptions import ApiException, ResponseHandlingException

        reason: Exception | None = None
        for attempt in range(TRIES):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            try:
                return call(*given, **named)
            except ResponseHandlingException as error:
                reason = error
            except (ApiException, ValueError) as error:  # ValueError is the in-process client's
                said = scrubbed(error, _with_scheme(self.url))
                raise CorpusError(self.place, f"the server says: {said}") from error
        said = scrubbed(reason, _with_scheme(self.url))
        raise CorpusError(
            self.place, f"can't be reached: {said}; run it again to go on where it stopped"
        ) from reason
