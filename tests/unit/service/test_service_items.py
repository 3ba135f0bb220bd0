"""Items and their pictures: any id, any size, and nothing outside the corpus."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from hivlp.models.runtime.images import ImageLimits
from hivlp.service.answers import ItemAnswer
from hivlp.service.app import create_app
from hivlp.service.pictures import NoPicture, Pictures, locate
from tests.unit.service import fakes_service
from tests.unit.service.fakes_service import NAMES, FakeSearcher, World
from tests.unit.service.pictures_service import noisy_jpeg, picture, write
from tests.unit.service.serving_app import SMALL, serving

LARGE = picture((10, 200, 30), (90, 60))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus root, and a secret beside it."""
    outside = tmp_path_factory.mktemp("outside")
    root = outside / "corpus"
    write(outside, "secret.png", picture((1, 2, 3)))
    write(root, "a/red.png", LARGE)
    write(root, "green.jpg", noisy_jpeg())
    write(root, "blue.tiff", picture((0, 0, 255), (30, 30), "TIFF"))
    write(root, "wide.tiff", picture((0, 9, 0), (17_000, 2), "TIFF"))
    write(root, "page.png", b"<html><script>alert(1)</script>")
    write(root, "cup.png", picture((9, 9, 9)))
    (root / "link.png").symlink_to(outside / "secret.png")
    return root


@pytest.fixture(scope="module")
def client(corpus: Path) -> Iterator[httpx.Client]:
    images = {
        "red": "a/red.png",
        "green": "green.jpg",
        "blue": "blue.tiff",
        "yellow": "page.png",
        "café/☕": "cup.png",
    }
    world = World(searcher=FakeSearcher(images=images), pictures=corpus)
    with serving(create_app(SMALL, load=world.load)) as client:
        yield client


def test_an_item_is_shown_with_its_metadata(client: httpx.Client) -> None:
    response = client.get("/items/red")
    ItemAnswer.model_validate_json(response.content)
    body = response.json()
    assert (body["id"], body["metadata"]["name"]) == ("red", "Red")
    assert client.get(body["image"]).headers["content-type"] == "image/png"
    assert client.get("/items/white").json()["image"] is None


@pytest.mark.parametrize("item_id", ["café/☕"])
@pytest.mark.parametrize("safe", ["", "/"])
def test_ids_hold_any_characters(client: httpx.Client, item_id: str, safe: str) -> None:
    path = f"/items/{quote(item_id, safe=safe)}"
    body = client.get(path).json()
    assert body["id"] == item_id
    assert client.get(f"{path}/image").status_code == 200
    assert client.get(body["image"]).status_code == 200


@pytest.mark.parametrize(
    "path", ["/items/nobody", "/items/nobody/image", "/items/", "/items/%00", "/items/%F0%9F%98%80"]
)
def test_an_unknown_item_is_404(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "no_such_item"
    assert client.get("/items/red?index=nowhere").status_code == 404


@pytest.mark.parametrize("path", ["/items/%ff", "/items/%ED%A0%BD", "/items/a%FE/image"])
def test_a_path_that_is_not_utf8_is_no_id(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (422, "invalid_id", "id")


def test_the_original_is_sent_as_what_it_is(client: httpx.Client) -> None:
    response = client.get("/items/red/image")
    assert response.content == LARGE
    assert response.headers["content-type"] == "image/png"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert client.get("/items/green/image").headers["content-type"] == "image/jpeg"
    converted = client.get("/items/blue/image")
    assert converted.headers["content-type"] == "image/webp"


def test_a_picture_that_there_is_no_room_for_is_not_sent(corpus: Path) -> None:
    world = World(searcher=FakeSearcher(images={"red": "a/red.png"}), pictures=corpus)
    app = create_app(SMALL, load=world.load)
    room = app.state.hivlp.body_room
    with serving(app) as client, room.share() as take:
        take(room.limit - len(LARGE))
        assert client.get("/items/red/image").content == LARGE
        take(1)
        response = client.get("/items/red/image")
        assert (response.status_code, response.json()["error"]["code"]) == (429, "overloaded")
        assert room.held == room.limit - len(LARGE) + 1


def test_a_thumbnail_fits_and_keeps_its_shape(client: httpx.Client) -> None:
    response = client.get("/items/red/image?size=30")
    assert response.headers["content-type"] == "image/webp"
    with Image.open(io.BytesIO(response.content)) as image:
        assert image.size == (30, 20)
    assert client.get("/items/red/image?size=500").content == LARGE


def test_a_picture_that_has_not_changed_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/items/red/image?size=30")
    assert first.headers["cache-control"] == "no-cache"  # asked for again, so never out of date
    tag = first.headers["etag"]
    again = client.get("/items/red/image?size=30", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == tag
    other = client.get("/items/red/image", headers={"If-None-Match": tag})
    assert other.status_code == 200


@pytest.mark.parametrize("size", ["0", "-1", "15", "1025", "99999999999"])
def test_a_size_out_of_range_is_refused(client: httpx.Client, size: str) -> None:
    response = client.get(f"/items/red/image?size={size}")
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "size"
    assert client.get("/items/red/image?size=16").status_code == 200


@pytest.mark.parametrize("size", ["many", "1.5", ""])
def test_a_size_that_is_no_number_is_refused(client: httpx.Client, size: str) -> None:
    response = client.get(f"/items/red/image?size={size}")
    assert response.status_code == 422
    assert response.json()["error"]["param"] == "size"


def test_what_is_no_picture_is_never_sent(client: httpx.Client) -> None:
    for path in ("/items/yellow/image", "/items/yellow/image?size=30", "/items/white/image"):
        response = client.get(path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "no_picture"
        assert "script" not in response.text


@pytest.mark.parametrize(
    "reference",
    ["../secret.png", "a/../../secret.png", "link.png", "/etc/passwd", "a", ".", "", "gone.png",
     "a\x00b", "../secret.png#row=0", "red.parquet#row=99", "x" * 5_000],
)  # fmt: skip
def test_no_reference_leaves_the_corpus(corpus: Path, reference: str) -> None:
    secret = str(corpus.parent / "secret.png")
    for one in (reference, secret):
        with pytest.raises(NoPicture):
            Pictures(ImageLimits()).original(locate(corpus, one, "x"))
    with pytest.raises(NoPicture):
        locate(None, reference, "x")


def test_a_pipe_in_the_corpus_is_not_waited_for(corpus: Path) -> None:
    os.mkfifo(corpus / "pipe.png")
    with pytest.raises(NoPicture):
        locate(corpus, "pipe.png", "x")


def test_pictures_inside_a_table_are_shown_too(corpus: Path) -> None:
    rows = [{"bytes": picture((255, 0, 0))}, {"bytes": picture((0, 255, 0), (64, 64))}]
    pq.write_table(pa.table({"image": rows}), corpus / "t.parquet")
    pictures = Pictures(ImageLimits())
    first, second = (locate(corpus, f"t.parquet#row={row}", "x") for row in (0, 1))
    assert first.tag != second.tag
    assert pictures.original(first).data == rows[0]["bytes"]
    assert pictures.thumbnail(second, 16).media_type == "image/webp"
    with pytest.raises(NoPicture):
        pictures.original(locate(corpus, "t.parquet#row=2", "x"))


def test_a_changed_file_changes_its_tag(corpus: Path) -> None:
    write(corpus, "moving.png", picture((1, 1, 1), (40, 40)))
    before = locate(corpus, "moving.png", "x")
    pictures = Pictures(ImageLimits())
    first = pictures.thumbnail(before, 20)
    write(corpus, "moving.png", picture((200, 1, 1), (50, 50)))
    os.utime(corpus / "moving.png", ns=(1, 1))
    after = locate(corpus, "moving.png", "x")
    assert after.tag != before.tag
    assert pictures.thumbnail(after, 20).data != first.data


def test_a_picture_wider_than_webp_can_be_is_shown_too(corpus: Path) -> None:
    pictures = Pictures(ImageLimits())
    found = locate(corpus, "wide.tiff", "x")
    whole = pictures.original(found)
    assert whole.media_type == "image/png"
    with Image.open(io.BytesIO(whole.data)) as image:
        assert image.size == (17_000, 2)
    assert pictures.thumbnail(found, 64).media_type == "image/webp"


def test_a_picture_over_the_pixel_limit_is_not_decoded(corpus: Path) -> None:
    with pytest.raises(NoPicture, match="limit"):
        Pictures(ImageLimits(max_pixels=100)).thumbnail(locate(corpus, "a/red.png", "x"), 16)


def test_an_id_that_ends_like_a_picture_is_found(world: World) -> None:
    name = "folder/image"
    assert name not in NAMES
    with serving(create_app(SMALL, load=world.load)) as client:
        response = client.get("/items/folder/image")
        assert response.json()["error"]["message"] == "no item with id 'folder'"


def test_an_id_that_ends_like_the_picture_of_another_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    monkeypatch.setattr(fakes_service, "NAMES", ("red", "red/image", "two\nlines", "end\n"))
    images = dict.fromkeys(("red", "red/image", "two\nlines"), "a/red.png")
    world = World(searcher=FakeSearcher(images=images), pictures=corpus)
    with serving(create_app(SMALL, load=world.load)) as client:
        for item_id in ("red/image", "two\nlines", "end\n"):
            item = client.get(f"/items/{quote(item_id, safe='')}").json()
            assert item["id"] == item_id
        for path in ("/items/red/image", "/items/red%2Fimage/image", "/items/two%0Alines/image"):
            assert client.get(path).content == LARGE


def test_head_asks_for_the_headers_alone(client: httpx.Client) -> None:
    for path in ("/items/red", "/items/red/image?size=30", "/readyz", "/openapi.json", "/"):
        head, full = client.head(path), client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-type", "content-length", "etag"):
            assert head.headers.get(name) == full.headers.get(name)
    assert client.head("/search/text").status_code == 405


def test_pictures_of_one_moment_and_size_are_told_apart(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"12345")
        os.utime(tmp_path / name, (1_000_000, 1_000_000))
    first, second = (locate(tmp_path, name, "x").tag for name in ("a.png", "b.png"))
    assert first != second
    assert first == locate(tmp_path, "a.png", "x").tag
