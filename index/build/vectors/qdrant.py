"""A running Qdrant collection, downloaded to the disk first: a download that breaks goes on.

    source = download(connect(url), url, "things", None, home)

    HOME/cache/imports/<hash of address, collection and vector>/
        state.json           how far it came: the next offset, and what kinds of payload there are
        part_000000.npy      vectors; .parquet beside it: ids, payloads as JSON

A part is written whole before the state says so, so whatever dies in between is read again. The
folder goes when the import has been published.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from hivlp.index.build.vectors.npy import NpySource
from hivlp.index.build.vectors.payloads import Kinds, as_column
from hivlp.index.build.vectors.source import RawBatch, part_rows
from hivlp.index.errors import CorpusError
from hivlp.index.snapshot.durable import replace_text
from hivlp.index.snapshot.manifest import Metric, SourceKind
from hivlp.models.errors import MissingExtra
from hivlp.models.levels import FloatArray
from hivlp.models.runtime.progress import Progress, say

API_KEY = "QDRANT_API_KEY"
PAGE = 1_000
"""Points asked for at once, and fewer of long vectors."""
PAGE_NUMBERS = 1_000_000
PART = 20_000
"""Points of a part: the most that is downloaded again."""
TIMEOUT_S = 60
TRIES = 4
STATE = "state.json"


@dataclass(slots=True)
class _State:
    """What a download has done."""

    points: int
    parts: int
    next: int | str | None
    done: bool
    kinds: Kinds

    def write(self, folder: Path) -> None:
        fields = {"points": self.points, "parts": self.parts, "next": self.next, "done": self.done}
        text = json.dumps({**fields, "kinds": self.kinds.to_json()}) + "\n"
        replace_text(folder / STATE, text)

    @staticmethod
    def read(folder: Path) -> _State:
        """What there is, or a beginning."""
        try:
            found = json.loads((folder / STATE).read_text(encoding="utf-8"))
            kinds = Kinds.of_json(found["kinds"])
            return _State(found["points"], found["parts"], found["next"], found["done"], kinds)
        except FileNotFoundError:
            return _State(0, 0, None, False, Kinds())
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"unreadable: {error}; remove the folder to begin anew"
            raise CorpusError(str(folder / STATE), reason) from error


class QdrantSource:
    """A downloaded collection: points in the order of their ids, payloads as columns."""

    kind: SourceKind = "qdrant"
    pictures_inside = False

    def __init__(self, folder: Path, source: str, metric: Metric) -> None:
        self.folder = folder
        self.source = source
        self.metric: Metric = metric
        self._parts = NpySource(folder)
        self.dim, self.count = self._parts.dim, self._parts.count
        self.root = Path.cwd()
        kinds = _State.read(folder).kinds
        self._columns = kinds.columns(taken=("id",))
        fields = [(name, kind) for _, name, kind in self._columns]
        self.schema = pa.schema([("id", pa.string()), *fields])

    def sample(self, limit: int) -> Iterator[FloatArray]:
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
        raise CorpusError(url, f"not the address of a Qdrant: {error}") from error


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

    `vector` names one of several vectors. Raises CorpusError for what can't be had or imported.
    """
    place = f"{url} collection {collection!r}"
    dim, metric = _vectors_of(_ask(place, client.get_collection, collection), vector, place)
    name = hashlib.sha256("\0".join((url, collection, vector or "")).encode()).hexdigest()[:32]
    folder = home / "cache" / "imports" / name
    folder.mkdir(parents=True, exist_ok=True)
    state = _State.read(folder)
    if state.points and not quiet:
        what = "was downloaded before" if state.done else "were downloaded before; going on"
        say(f"{place}: {state.points} points {what} (remove {folder} to begin anew)")
    total = int(_ask(place, client.count, collection, exact=True).count)
    with Progress(f"download {collection}", total, "point", quiet=quiet) as progress:
        progress.step(state.points)
        while not state.done:
            before = state.points
            _part(client, collection, vector, dim, folder, state, place)
            progress.step(state.points - before)
    if not state.points:
        raise CorpusError(place, "holds no points")
    if state.points != total and not quiet:
        say(f"{place}: {state.points} points downloaded, {total} are there now: it has changed")
    return QdrantSource(folder, place, metric)


def _vectors_of(info: Any, vector: str | None, place: str) -> tuple[int, Metric]:
    """Dimension and metric of the wanted vectors. Raises CorpusError."""
    params = info.config.params.vectors
    if isinstance(params, Mapping):
        if vector is None and len(params) == 1:
            vector = next(iter(params))
        if vector not in params:
            known = ", ".join(sorted(params)) or "none but sparse ones"
            raise CorpusError(place, f"--vector-name is needed, one of: {known}")
        params = params[vector]
    elif vector is not None:
        raise CorpusError(place, f"its vectors have no names, {vector!r} was asked for")
    if params is None:
        raise CorpusError(place, "holds sparse vectors only, which can't be rotated")
    if params.multivector_config is not None:
        raise CorpusError(place, "holds several vectors a point; one a point can be imported")
    return int(params.size), cast(Metric, str(params.distance.value).lower())


def _part(
    client: Any,
    collection: str,
    vector: str | None,
    dim: int,
    folder: Path,
    state: _State,
    place: str,
) -> None:
    """Download one part, write it, and then say so."""
    points: list[Any] = []
    following = state.next
    page = max(1, min(PAGE, PAGE_NUMBERS // dim))
    wanted = min(PART, part_rows(dim))
    while len(points) < wanted:
        some, following = _ask(
            place,
            client.scroll,
            collection,
            limit=min(page, wanted - len(points)),
            offset=following,
            with_payload=True,
            with_vectors=True if vector is None else [vector],
        )
        points += some
        if following is None:
            break
    if points:
        _write_part(folder / f"part_{state.parts:06d}", points, dim, state.kinds)
        state.parts += 1
    state.points += len(points)
    state.next, state.done = following, following is None
    state.write(folder)


def _write_part(path: Path, points: Sequence[Any], dim: int, kinds: Kinds) -> None:
    vectors = np.full((len(points), dim), np.nan, np.float32)
    there = np.zeros(len(points), np.bool_)
    payloads = []
    for row, point in enumerate(points):
        own = point.vector
        if isinstance(own, Mapping):
            own = next(iter(own.values()), None)
        if own is not None:
            vectors[row], there[row] = own, True
        payload = point.payload or {}
        kinds.add(payload)
        payloads.append(orjson.dumps(payload, default=str).decode())
    ids = pa.array([str(point.id) for point in points], pa.string())
    columns = {"id": ids, "payload": pa.array(payloads, pa.string()), "there": pa.array(there)}
    pq.write_table(pa.table(columns), path.with_suffix(".parquet"))
    np.save(path.with_suffix(".npy"), vectors, allow_pickle=False)


def _ask(place: str, call: Any, *given: Any, **named: Any) -> Any:
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
            raise CorpusError(place, f"the server says: {error}") from error
    raise CorpusError(
        place, f"can't be reached: {reason}; run it again to go on where it stopped"
    ) from reason
