"""Every endpoint of the API, once: what it is asked with, and what its answer is.

Each function makes a `Call`; `Client` and `AsyncClient` turn them into methods, which take the same
arguments and return, or return an awaitable of, what the call is read into.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, Unpack
from urllib.parse import quote

from pydantic import BaseModel

from hivlp.models.levels import Modality
from hivlp.service.answers import (
    ActivationAnswer,
    BatchAnswer,
    BuildAnswer,
    BuildList,
    ChangeAnswer,
    EmbedAnswer,
    HealthAnswer,
    IndexList,
    InfoAnswer,
    ItemAnswer,
    SearchAnswer,
    SnapshotList,
)
from hivlp.service.client.errors import InvalidRequest
from hivlp.service.client.exchange import Call, Reply
from hivlp.service.client.fields import (
    BuildOptions,
    Fields,
    Options,
    PictureSource,
    Search,
    Vector,
    as_vector,
    checked,
    picture_text,
)

M = TypeVar("M", bound=BaseModel)
DEFAULT_INDEX = "default"
READY_OR_NOT = frozenset({200, 503})
BEGUN = frozenset({202})
AT_ONCE_OR_LATER = frozenset({200, 202})


@dataclass(frozen=True, slots=True)
class ItemPicture:
    """The bytes of an item's picture; `etag` changes when they do."""

    data: bytes
    media_type: str
    etag: str | None


def read_as(model: type[M]) -> Callable[[Reply], M]:
    """A reader of answers; fields that the model doesn't know pass."""
    return lambda reply: model.model_validate_json(reply.content, extra="ignore")


def search(search: Search) -> Call[SearchAnswer]:
    """Search by a text, a picture, an item or a vector. Raises ClientError."""
    path, blocks = f"/search/{search.kind}", search.kind == "image"
    return Call("POST", path, read_as(SearchAnswer), search.fields, blocks=blocks)


def search_text(query: str, **options: Unpack[Options]) -> Call[SearchAnswer]:
    """Find pictures (or captions) by a sentence. Raises ClientError."""
    return search(Search.text(query, **options))


def search_image(image: PictureSource, **options: Unpack[Options]) -> Call[SearchAnswer]:
    """Find pictures (or captions) by a picture: a path, bytes or an open file. Raises ClientError.

    A file is read once, from where it is, and left open.
    """
    return search(Search.image(image, **options))


def search_similar(item_id: str, **options: Unpack[Options]) -> Call[SearchAnswer]:
    """Find more like an item of the index, which is left out. Raises ClientError."""
    return search(Search.similar(item_id, **options))


def search_vector(vector: Vector, **options: Unpack[Options]) -> Call[SearchAnswer]:
    """Find by a vector, (dim,), of the finest level, or as vectors were imported.

    Raises ClientError.
    """
    return search(Search.vector(vector, **options))


def search_batch(searches: Iterable[Search]) -> Call[BatchAnswer]:
    """Several searches in one request, at most `limits.max_batch`; each its answer or its error.

    `search_many` takes any number, and turns errors into exceptions. Raises ClientError.
    """
    given = list(searches)
    blocks = any(one.kind == "image" for one in given)
    return batch_of(lambda: _entries(given), blocks=blocks)


def batch_of(entries: Callable[[], list[Fields]], *, blocks: bool = False) -> Call[BatchAnswer]:
    """A batch of bodies that may yet have to be made."""
    read = read_as(BatchAnswer)
    return Call("POST", "/search/batch", read, lambda: {"searches": entries()}, blocks=blocks)


def entry_of(search: Search) -> Fields:
    """A search as a batch holds it. Raises InvalidRequest."""
    return {"kind": search.kind, **search.fields()}


def _entries(searches: Sequence[Search]) -> list[Fields]:
    """The searches of one request. Raises InvalidRequest naming the place of a bad one."""
    entries = []
    for place, one in enumerate(searches):
        try:
            entries.append(entry_of(one))
        except InvalidRequest as error:
            message, param = f"searches.{place}.{error.message}", f"searches.{place}.{error.param}"
            raise InvalidRequest(message, code=error.code, param=param) from error
    return entries


def embed_text(text: str, *, index: str = DEFAULT_INDEX) -> Call[EmbedAnswer]:
    """The query embedding of a sentence at every level. Raises ClientError."""
    body = {"text": text, "index": index}
    return Call("POST", "/embed/text", read_as(EmbedAnswer), lambda: checked(body))


def embed_image(image: PictureSource, *, index: str = DEFAULT_INDEX) -> Call[EmbedAnswer]:
    """The query embedding of a picture at every level. Raises ClientError."""

    def body() -> Fields:
        return checked({"image": picture_text(image), "index": index})

    return Call("POST", "/embed/image", read_as(EmbedAnswer), body, blocks=True)


def get_item(item_id: str, *, index: str = DEFAULT_INDEX) -> Call[ItemAnswer]:
    """An item and its metadata. Raises ClientError: NotFound."""
    return Call("GET", _item_path(item_id), read_as(ItemAnswer), params={"index": index})


def put_item(
    item_id: str,
    *,
    texts: str | Sequence[str] = (),
    image: PictureSource | None = None,
    vector: Vector | None = None,
    modality: Modality | None = None,
    metadata: Mapping[str, Any] | None = None,
    index: str = DEFAULT_INDEX,
) -> Call[ChangeAnswer]:
    """Make an item what is said here, whether it was there before or not.

    It needs texts, a picture (path, bytes, open file) or a vector, (dim,), which stands for
    `modality`. Dates in `metadata` are sent as ISO 8601. Raises ClientError.
    """

    def body() -> Fields:
        given: Fields = {"texts": [texts] if isinstance(texts, str) else list(texts)}
        given["metadata"] = metadata or {}
        if image is not None:
            given["image"] = picture_text(image)
        if vector is not None:
            given["vector"] = as_vector(vector)
        if modality is not None:
            given["modality"] = modality
        return checked(given)

    path, read, params = _item_path(item_id), read_as(ChangeAnswer), {"index": index}
    return Call("PUT", path, read, body, params, blocks=image is not None)


def delete_item(item_id: str, *, index: str = DEFAULT_INDEX) -> Call[ChangeAnswer]:
    """Take an item out. Raises ClientError: NotFound, also where an earlier try did it."""
    return Call("DELETE", _item_path(item_id), read_as(ChangeAnswer), params={"index": index})


def item_image(
    item_id: str, *, size: int | None = None, index: str = DEFAULT_INDEX
) -> Call[ItemPicture]:
    """The picture of an item, or a thumbnail of at most `size` pixels. Raises ClientError."""
    params = {"index": index} if size is None else {"index": index, "size": str(size)}
    return Call("GET", f"{_item_path(item_id)}/image", _picture, params=params)


def indexes() -> Call[IndexList]:
    """Every index served, with the version being searched. Raises ClientError."""
    return Call("GET", "/indexes", read_as(IndexList))


def snapshots(index: str = DEFAULT_INDEX) -> Call[SnapshotList]:
    """The versions of an index, oldest first. Raises ClientError: NotFound."""
    path = f"/indexes/{_segment(index, 'index')}/snapshots"
    return Call("GET", path, read_as(SnapshotList))


def activate(
    snapshot: str,
    *,
    canary: Sequence[Mapping[str, Any]] | None = None,
    index: str = DEFAULT_INDEX,
) -> Call[ActivationAnswer]:
    """Have a version made the active one, once every process has it ready: `activation` tells.

    `canary`: queries that it must answer rightly first, each `{query or id, k, expected, at_least}`
    (None: those that the index keeps). Raises ClientError: NotFound, Conflict.
    """
    body: Fields = {"snapshot": snapshot}
    if canary is not None:
        body["canary"] = [dict(one) for one in canary]
    path, read = _admin_path(index, "activate"), read_as(ActivationAnswer)
    return Call("POST", path, read, lambda: checked(body), answers=AT_ONCE_OR_LATER)


def rollback(index: str = DEFAULT_INDEX) -> Call[ActivationAnswer]:
    """Have the version that was active before made so again. Raises ClientError: Conflict.

    A try that is sent again doesn't go back twice: the service knows it by its request id.
    """
    path, read = _admin_path(index, "rollback"), read_as(ActivationAnswer)
    return Call("POST", path, read, answers=AT_ONCE_OR_LATER)


def activation(index: str = DEFAULT_INDEX) -> Call[ActivationAnswer]:
    """How far the activation or rollback of an index is, or how the last one ended.

    Raises ClientError: NotFound where there was none.
    """
    return Call("GET", _admin_path(index, "activation"), read_as(ActivationAnswer))


def start_build(corpus: str, **options: Unpack[BuildOptions]) -> Call[BuildAnswer]:
    """Have a version of an index built from a corpus that the service can read.

    Without a `key` of yours a call has one of its own, so that a try that is sent again begins no
    second build. Raises ClientError.
    """
    body: Fields = {"key": uuid.uuid4().hex, **options, "corpus": corpus}
    read = read_as(BuildAnswer)
    return Call("POST", "/admin/builds", read, lambda: checked(body), answers=BEGUN)


def builds(limit: int = 20) -> Call[BuildList]:
    """The builds there were and are, newest first. Raises ClientError."""
    return Call("GET", "/admin/builds", read_as(BuildList), params={"limit": str(limit)})


def build(build_id: str) -> Call[BuildAnswer]:
    """How far a build is, and what came of it. Raises ClientError: NotFound."""
    return Call("GET", _build_path(build_id), read_as(BuildAnswer))


def cancel_build(build_id: str) -> Call[BuildAnswer]:
    """End a build; `cancelling` while that goes on. Raises ClientError: NotFound."""
    path = _build_path(build_id)
    return Call("DELETE", path, read_as(BuildAnswer), answers=AT_ONCE_OR_LATER)


def info() -> Call[InfoAnswer]:
    """Version, indexes, models with their sources and licences, limits. Raises ClientError."""
    return Call("GET", "/info", read_as(InfoAnswer))


def health() -> Call[HealthAnswer]:
    """What is loaded, since when: an answer too while the service isn't ready.

    Raises ClientError.
    """
    return Call("GET", "/health", read_as(HealthAnswer), answers=READY_OR_NOT)


def ready() -> Call[bool]:
    """Whether the service should be sent requests. Raises ClientError where there is none."""
    return Call("GET", "/readyz", lambda reply: reply.status == 200, answers=READY_OR_NOT)


def _admin_path(index: str, action: str) -> str:
    return f"/admin/indexes/{_segment(index, 'index')}/{action}"


def _build_path(build_id: str) -> str:
    return f"/admin/builds/{_segment(build_id, 'id')}"


def _item_path(item_id: str) -> str:
    return f"/items/{_segment(item_id, 'id')}"


def _segment(text: str, param: str) -> str:
    """One part of a path. Dots alone would be taken for a step to another folder, and dropped."""
    try:
        quoted = quote(text, safe="")
    except UnicodeEncodeError as error:
        message = f"{param}: holds half of a surrogate pair"
        raise InvalidRequest(message, code="invalid_id", param=param) from error
    return quoted.replace(".", "%2E") if quoted in (".", "..") else quoted


def _picture(reply: Reply) -> ItemPicture:
    media_type = reply.headers.get("Content-Type", "application/octet-stream")
    return ItemPicture(reply.content, media_type, reply.headers.get("ETag"))
