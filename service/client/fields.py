"""What users give, as the fields of a request: options, pictures, vectors.

Only what was given is sent, so that the defaults are the service's. What can't be sent at all is
an `InvalidRequest` with the words that the service would use, before a byte leaves.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import orjson

from hivlp.models.levels import Modality
from hivlp.service.client.errors import InvalidRequest

Fields: TypeAlias = dict[str, Any]
Kind = Literal["text", "image", "similar", "vector"]
Vector: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]]


class Readable(Protocol):
    """A file opened for reading bytes."""

    def read(self, size: int = -1, /) -> bytes:
        """All that is left of it."""
        ...


# A text is a path, or an http(s) URL, which the service fetches where it is allowed to. Files are
# read from where they are, and left open.
PictureSource: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview | Readable


class Width(TypedDict):
    """How many candidates a level of the cascade keeps."""

    level: int
    keep: int


class Options(TypedDict, total=False):
    """What every search takes; docs/api.md says what each means."""

    index: str
    snapshot: str | None
    k: int
    offset: int
    modality: Modality
    filter: Mapping[str, Any] | None
    with_metadata: bool | Sequence[str]
    explain: bool
    rerank: bool
    rerank_k: int
    plan: Literal["auto", "cascade", "funnel", "exact"]
    cascade: Sequence[Width]
    max_level: int | None
    early_exit: bool
    min_score: float | None
    deadline_ms: float | None


class BuildOptions(TypedDict, total=False):
    """How to build; docs/api.md says what each means."""

    index: str
    artifact: str | None
    activate: bool
    key: str | None
    split: Literal["all", "train", "val", "test", "restval"]
    images: str | None
    aliases: Literal["img2dataset"] | None
    metadata_group: str | None
    max_failures: float
    batch_size: int
    workers: int
    threads: int
    build_threads: int | None
    store_states: bool
    forget_changes: bool
    materialise: bool
    family: Literal["auto", "scan", "graph"]
    level1: Literal["auto", "flat", "sq8", "pq64x4fs", "rabitqfs"]
    rows: Literal["fp32", "fp16"]
    must: Sequence[Literal["mask", "batch", "rebuild"]]
    max_memory: int | None
    max_query_ms: float | None
    max_build_s: float
    target: float


@dataclass(frozen=True, slots=True)
class Search:
    """One search, to be sent alone or among others: made by the function of its kind.

    A picture is read when the search is sent, not before.
    """

    kind: Kind
    _subject: str = field(repr=False)
    _value: Callable[[], object] = field(repr=False)
    _options: Options = field(repr=False)

    @classmethod
    def text(cls, query: str, **options: Unpack[Options]) -> Search:
        """By a sentence."""
        return cls("text", "query", lambda: query, options)

    @classmethod
    def image(cls, image: PictureSource, **options: Unpack[Options]) -> Search:
        """By a picture: a path, bytes, or a file opened for reading bytes."""
        return cls("image", "image", lambda: picture_text(image), options)

    @classmethod
    def similar(cls, item_id: str, **options: Unpack[Options]) -> Search:
        """By an item of the index, which is left out of the hits."""
        return cls("similar", "id", lambda: item_id, options)

    @classmethod
    def vector(cls, vector: Vector, **options: Unpack[Options]) -> Search:
        """By a vector, (dim,), of the finest level, or as vectors were imported."""
        return cls("vector", "vector", lambda: as_vector(vector), options)

    def fields(self) -> Fields:
        """Its body at the endpoint of its kind. Raises InvalidRequest."""
        return checked({self._subject: self._value(), **self._options})


def picture_text(source: PictureSource) -> str:
    """A picture as JSON can hold it: its bytes, or its URL as it is. Raises InvalidRequest."""
    if isinstance(source, str) and source.lower().startswith(("http://", "https://")):
        return source
    return base64.b64encode(_picture_bytes(source)).decode("ascii")


def _picture_bytes(source: PictureSource) -> bytes | bytearray | memoryview:
    if isinstance(source, bytes | bytearray | memoryview):
        return source
    try:
        if isinstance(source, str | os.PathLike):
            return Path(source).read_bytes()
        data = source.read()
    except Exception as error:  # what stands for a file (fsspec, a tar) may raise anything
        why = f"can't be read: {error or type(error).__name__}"
        raise _invalid("image", "unreadable_image", why) from error
    if not isinstance(data, bytes):
        raise _invalid("image", "unreadable_image", "the file must be opened for reading bytes")
    return data


def as_vector(given: Vector) -> npt.NDArray[np.floating[Any]]:
    """(dim,) float32 where it was, else float64: what is sent. Raises InvalidRequest."""
    try:
        numbers = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise _invalid("vector", "invalid_vector", "must be numbers") from error
    if numbers.ndim != 1 or numbers.dtype.kind not in "fiu":
        raise _invalid("vector", "invalid_vector", "must be numbers, in one dimension")
    if not _finite(numbers):
        raise _invalid("vector", "invalid_vector", "holds NaN or infinity")
    return np.ascontiguousarray(numbers, np.float32 if numbers.dtype == np.float32 else np.float64)


def checked(fields: Fields) -> Fields:
    """`fields`, which JSON can hold as they are. Raises InvalidRequest naming the one it can't."""
    for name, value in fields.items():
        if not _finite(value):
            raise _invalid(name, "invalid_value", "holds NaN or infinity, which JSON can't")
        if isinstance(value, np.ndarray) or (isinstance(value, str) and value.isascii()):
            continue
        try:
            encode(value)
        except TypeError as error:
            code = "invalid_text" if "surrogate" in str(error) else "invalid_value"
            raise _invalid(name, code, str(error)) from error
    return fields


def _finite(value: object) -> bool:
    """orjson writes NaN as null, which would pass for a field that wasn't given."""
    if isinstance(value, float | np.floating):
        return math.isfinite(value)
    if isinstance(value, np.ndarray):
        return value.dtype.kind != "f" or bool(np.isfinite(value).all())
    if isinstance(value, Mapping):
        return all(_finite(inner) for inner in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return all(_finite(inner) for inner in value)
    return True


def encode(value: object) -> bytes:
    """JSON; arrays, dates and other sequences and mappings included. Raises TypeError."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no form in JSON")


def _invalid(param: str, code: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {why}", code=code, param=param)
