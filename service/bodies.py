"""Request bodies: bytes in, plain values out, with a 4xx for everything that isn't what it says.

orjson refuses NaN, Infinity, bytes that aren't UTF-8 and nesting beyond 1,024. It also refuses half
an emoji (`"\\ud83d"`), which is well-formed JSON of an ill-formed text: that one is answered 422
with the field's name, as any other bad text.

Large bodies are parsed in a thread, in steps that let the event loop go on between them: orjson and
binascii hold the interpreter for as long as one call takes. A body that would become very many
objects, each some dozen times larger than what was sent for it, is refused before it is parsed.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from hivlp.models.errors import ImageError, InputError
from hivlp.service.errors import BodyTooLarge, Malformed, ServiceError
from hivlp.service.settings import Limits

# Fields of a form whose value is a text; every other is written as JSON: k=5, rerank=false.
TEXT_FIELDS = frozenset({"index", "snapshot", "modality", "plan"})
MAX_FORM_FIELDS = 64
UTF_8 = frozenset({b"utf-8", b"utf8"})
# The field with a broken text is looked for in bodies up to this size; it takes time.
MAX_BLAMED_BYTES = 128 << 10
# What is larger is parsed in a thread.
OFF_LOOP_BYTES = 64 << 10
# Of base64 at once, a multiple of 4: about a tenth of a millisecond.
SLICE_CHARS = 64 << 10
COUNTED_BYTES = 256 << 10
VALUE_SIGNS = (b",", b"[", b"{", b":")
URL = re.compile("https?:", re.IGNORECASE)
IMAGE = re.compile(rb'"image"[ \t\r\n]*:[ \t\r\n]*"')
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Upload:
    """A request with a picture: the picture's bytes and the other fields."""

    image: bytes
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Remote:
    """A request with the URL of a picture, and the other fields."""

    url: str
    fields: dict[str, Any]


Fetch = Callable[[str], Awaitable[bytes]]
"""From a URL to what is there. Raises InputError, ImageError, Overloaded."""


def media_type(request: Request) -> str:
    """The Content-Type without its parameters, in lower case."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What `work` returns; done in a thread where there are many bytes to it."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()


async def read_json(request: Request, limits: Limits, *, pictures: bool = False) -> dict[str, Any]:
    """The body as a JSON object; a large one only where there may be `pictures` in it.

    Raises ServiceError 400, 413 or 415, InputError for a broken text.
    """
    kind = media_type(request)
    if not _is_json(kind):
        raise _wrong_media_type("application/json", kind)
    raw = await (request.body() if pictures else _small_body(request, limits.max_json_bytes))
    return await off_loop(len(raw), lambda: parse_object(raw, limits.max_body_values))


async def _small_body(request: Request, limit: int) -> bytes:
    """Of text one sign that takes four bytes makes four of each: it is held to less."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BodyTooLarge(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BodyTooLarge(limit)
        parts.append(part)
    return b"".join(parts)


def _is_json(kind: str) -> bool:
    return kind == "application/json" or kind.endswith("+json")


def parse_object(raw: bytes, max_values: int) -> dict[str, Any]:
    """Strict JSON whose top is an object of at most so many values."""
    if len(raw) > max_values and _values_at_most(raw, max_values) > max_values:
        message = f"the body may hold more than {max_values} values, the most there may be"
        raise ServiceError(413, "too_many_values", message)
    value = _parse(raw)
    if not isinstance(value, dict):
        raise Malformed("the body must be a JSON object")
    return value


def _values_at_most(raw: bytes, enough: int) -> int:
    """No JSON of these bytes has more values: each but the first follows one of these signs.

    Counted until there are more than `enough`.
    """
    found = 1
    for start in range(0, len(raw), COUNTED_BYTES):
        found += sum(raw.count(sign, start, start + COUNTED_BYTES) for sign in VALUE_SIGNS)
        if found > enough:
            break
    return found


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "surrogate" in str(error):
            _blame_broken_text(raw)
        raise Malformed(f"the body is not JSON: {error}") from error


def _blame_broken_text(raw: bytes) -> None:
    """Raise InputError naming the field that holds a lone surrogate, if the rest is JSON."""
    if len(raw) > MAX_BLAMED_BYTES:
        return
    try:
        value = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError):
        return
    for path, text in _texts(value, ()):
        if any("\ud800" <= character <= "\udfff" for character in text):
            param = ".".join(path) or None
            message = "half of a surrogate pair: the text is not valid Unicode"
            raise InputError("invalid_text", message, param=param or "body")


def _texts(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield path, key
            yield from _texts(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _texts(inner, (*path, str(place)))


async def read_upload(request: Request, limits: Limits, fetch: Fetch) -> Upload:
    """A picture from multipart (`image` and form fields) or JSON (`image` as base64, or a URL)."""
    kind = media_type(request)
    if kind == "multipart/form-data":
        fields, image = await _read_form(request, limits.max_image_bytes)
        if image is None:
            raise InputError("missing_field", "image: is needed, as a file part", param="image")
        return Upload(image, fields)
    if not _is_json(kind):
        raise _wrong_media_type("multipart/form-data or application/json", kind)
    raw = await request.body()
    return await with_picture(
        await off_loop(len(raw), lambda: split_image(_parse_with_image(raw, limits), limits)), fetch
    )


async def with_picture(found: Upload | Remote, fetch: Fetch) -> Upload:
    """What was sent, with the picture's bytes: fetched, where its URL was."""
    return found if isinstance(found, Upload) else Upload(await fetch(found.url), found.fields)


def _parse_with_image(raw: bytes, limits: Limits) -> dict[str, Any]:
    """As `parse_object`; a long `image` stays the bytes that it is, for orjson takes long over it.

    A mark takes its place. Where that doesn't come out as the value of `image`, what was cut out
    was something else, and nothing is cut out.
    """
    found = IMAGE.search(raw, raw.find(b'"image"')) if b'"image"' in raw else None
    end = -1 if found is None else raw.find(b'"', found.end())
    if found is not None and end - found.end() > OFF_LOOP_BYTES:
        image, mark = raw[found.end() : end], secrets.token_hex(16)
        if b"\\" not in image:
            rest = parse_object(
                raw[: found.end()] + mark.encode() + raw[end:], limits.max_body_values
            )
            if rest.get("image") == mark:
                return {**rest, "image": image}
    return parse_object(raw, limits.max_body_values)


def split_image(fields: dict[str, Any], limits: Limits) -> Upload | Remote:
    """Take `image` (base64, data URI or URL) out of JSON fields and decode it."""
    rest = dict(fields)
    if "image" not in rest:
        raise InputError("missing_field", "image: is needed", param="image")
    text = rest.pop("image")
    if not isinstance(text, str | bytes):
        raise InputError("invalid_value", "image: must be base64 or a data URI", param="image")
    if isinstance(text, str) and URL.match(text):
        return Remote(text, rest)
    return Upload(decode_base64(text, limits.max_image_bytes), rest)


def decode_base64(text: str | bytes, max_image_bytes: int) -> bytes:
    """Strict base64, or a data URI of it; the size is checked before a byte is decoded."""
    try:
        encoded = text.encode("ascii") if isinstance(text, str) else text
    except UnicodeEncodeError as error:
        raise _not_base64() from error
    if encoded.startswith(b"data:"):
        head, comma, encoded = encoded.partition(b",")
        if not comma or not head.endswith(b";base64"):
            raise InputError("invalid_value", "image: a data URI must be base64", param="image")
    if len(encoded) > 4 * (max_image_bytes // 3 + 1):
        raise _image_too_large(max_image_bytes)
    try:
        data = _decoded(encoded)
    except binascii.Error as error:
        raise _not_base64() from error
    if len(data) > max_image_bytes:
        raise _image_too_large(max_image_bytes)
    return data


def _not_base64() -> InputError:
    return InputError("invalid_value", "image: not valid base64", param="image")


def _decoded(encoded: bytes) -> bytes:
    """Strict base64. Raises binascii.Error."""
    pieces = []
    for start in range(0, len(encoded), SLICE_CHARS):
        part = encoded[start : start + SLICE_CHARS]
        piece = binascii.a2b_base64(part, strict_mode=True)
        if len(piece) < len(part) // 4 * 3 and start + SLICE_CHARS < len(encoded):
            raise binascii.Error("padding before the end")
        pieces.append(piece)
    return b"".join(pieces)


async def read_item(
    request: Request, limits: Limits, fetch: Fetch
) -> tuple[dict[str, Any], bytes | None]:
    """Fields, and a picture where one is given: multipart or JSON, as `read_upload`."""
    kind = media_type(request)
    if kind == "multipart/form-data":
        return await _read_form(request, limits.max_image_bytes)
    if not _is_json(kind):
        raise _wrong_media_type("multipart/form-data or application/json", kind)
    raw = await request.body()
    fields = await off_loop(len(raw), lambda: _parse_with_image(raw, limits))
    if fields.get("image") is None:
        return {name: value for name, value in fields.items() if name != "image"}, None
    found = await off_loop(len(raw), lambda: split_image(fields, limits))
    upload = await with_picture(found, fetch)
    return upload.fields, upload.image


async def _read_form(request: Request, max_image_bytes: int) -> tuple[dict[str, Any], bytes | None]:
    _, options = parse_options_header(request.headers["content-type"])
    if options.get(b"charset", b"utf-8").lower() not in UTF_8:
        raise ServiceError(415, "unsupported_media_type", "the charset of a form must be utf-8")
    return await _parse_form(request, max_image_bytes)


async def _parse_form(
    request: Request, max_image_bytes: int
) -> tuple[dict[str, Any], bytes | None]:
    parser = MultiPartParser(
        request.headers, request.stream(), max_files=1, max_fields=MAX_FORM_FIELDS
    )
    parser.spool_max_size = 0  # never to the disk: what may be held of a body is counted
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Malformed(error.message) from error
    try:
        return await _read_fields(form, max_image_bytes)
    finally:
        await form.close()


async def _read_fields(form: FormData, max_image_bytes: int) -> tuple[dict[str, Any], bytes | None]:
    fields: dict[str, Any] = {}
    image: bytes | None = None
    for name, value in form.multi_items():
        if name in fields or (name == "image" and image is not None):
            raise InputError("invalid_value", f"{name}: given more than once", param=name)
        if name != "image":
            fields[name] = _form_value(name, value)
            continue
        image = await _image_part(value, max_image_bytes)
    return fields, image


async def _image_part(value: UploadFile | str, max_image_bytes: int) -> bytes:
    if isinstance(value, str):
        message = "image: send the picture as a file part (curl -F image=@FILE)"
        raise InputError("invalid_value", message, param="image")
    data = await value.read(max_image_bytes + 1)
    if len(data) > max_image_bytes:
        raise _image_too_large(max_image_bytes)
    return data


def _form_value(name: str, value: UploadFile | str) -> Any:
    if not isinstance(value, str):
        raise InputError("invalid_value", f"{name}: must not be a file", param=name)
    if name in TEXT_FIELDS:
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError as error:
        message = f'{name}: write the value as JSON, such as 5, true or ["name"]'
        raise InputError("invalid_value", message, param=name) from error


def _image_too_large(limit: int) -> ImageError:
    message = f"the picture is larger than the limit of {limit} bytes"
    return ImageError("image_too_large", message, param="image", limit=limit)


def _wrong_media_type(wanted: str, got: str) -> ServiceError:
    message = f"Content-Type must be {wanted}, got {got or 'none'}"
    return ServiceError(415, "unsupported_media_type", message)
