"""No way to a file outside the corpus: neither in what is asked for, nor in what a corpus says."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hivlp.index.errors import CorpusError
from hivlp.index.pictures import read_picture
from hivlp.models.runtime.images import ImageLimits
from hivlp.service.app import create_app
from hivlp.service.pictures import NoPicture, Pictures, locate
from tests.unit.service.fakes_service import FakeSearcher, World
from tests.unit.service.pictures_service import picture, write
from tests.unit.service.serving_app import SMALL, serving

SECRET = picture((1, 2, 3))
OWN = picture((200, 0, 0))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, and a picture beside it that nobody may see."""
    outside = tmp_path_factory.mktemp("outside")
    root = outside / "corpus"
    write(outside, "secret.png", SECRET)
    write(outside, "corpus-secret/secret.png", SECRET)  # its name begins as the corpus's does
    write(root, "red.png", OWN)
    write(root, "deep/red.png", OWN)
    for name, to in {
        "link.png": outside / "secret.png",
        "relative.png": "../secret.png",
        "folder": outside,
        "deep/up": "../..",
        "again.png": "link.png",
        "round.png": "round.png",
        "process": "/proc/self/root",
    }.items():
        (root / name).symlink_to(to)
    return root


def references(corpus: Path) -> list[str]:
    secret = str(corpus.parent / "secret.png")
    up = "../secret.png"
    return [
        up,
        f"./{up}",
        f"deep/../{up}",
        f"deep/up/{up[3:]}",
        "deep/../../secret.png",
        "deep/./.././../secret.png",
        "../corpus/../secret.png",
        "../corpus-secret/secret.png",
        "/".join([".."] * 40) + secret,
        secret,
        f"/{secret}",
        f"//{secret}",
        f"file://{secret}",
        f"file:{secret}",
        "link.png",
        "relative.png",
        "again.png",
        "round.png",
        "folder/secret.png",
        "folder/corpus/link.png",
        f"process{secret}",
        "..\\secret.png",
        "deep\\..\\..\\secret.png",
        f"C:{secret}",
        "\\\\host\\share\\secret.png",
        "%2e%2e/secret.png",
        "..%2fsecret.png",
        "%252e%252e/secret.png",
        "..\x2fsecret.png\x00.png",
        "red.png\x00",
        "\x00",
        "\uff0e\uff0e/secret.png",
        "..\u2215secret.png",
        "~/secret.png",
        "$HOME/secret.png",
        "",
        ".",
        "..",
        "/",
        "deep",
        "upload:" + "0" * 64,
        "upload:../../secret.png",
        f"{up}#row=0",
        f"{up}#offset=512,size=10",
        "x" * 5_000,
        "x/" * 3_000,
        "\ud800.png",
    ]


def test_no_reference_of_any_kind_leaves_the_corpus(corpus: Path) -> None:
    pictures = Pictures(ImageLimits())
    for reference in references(corpus):
        with pytest.raises(NoPicture):
            pictures.original(locate(corpus, reference, "x"))
        with pytest.raises(CorpusError):
            read_picture(corpus, reference)
    for reference in ("red.png", "deep/red.png", "deep/../red.png", "folder/corpus/red.png"):
        assert pictures.original(locate(corpus, reference, "x")).data == OWN


def test_a_corpus_that_is_itself_a_link_is_a_corpus(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(corpus)
    found = locate(tmp_path / "current", "red.png", "x")
    assert Pictures(ImageLimits()).original(found).data == OWN
    with pytest.raises(NoPicture):
        locate(tmp_path / "current", "../secret.png", "x")


def test_a_file_that_becomes_a_link_out_is_not_followed(corpus: Path, tmp_path: Path) -> None:
    root = tmp_path / "corpus"
    write(root, "red.png", OWN)
    found = locate(root, "red.png", "x")
    (root / "red.png").unlink()
    (root / "red.png").symlink_to(corpus.parent / "secret.png")
    with pytest.raises(NoPicture):
        Pictures(ImageLimits()).original(found)


@pytest.fixture(scope="module")
def client(corpus: Path) -> Iterator[httpx.Client]:
    searcher = FakeSearcher(images={"red": "red.png", "green": "../secret.png", "blue": "link.png"})
    app = create_app(SMALL, load=World(searcher=searcher, pictures=corpus).load)
    with serving(app) as client:
        yield client


def asked(client: httpx.Client, path: bytes) -> bytes:
    """The answer to a path as it is, which no client would send."""
    url = client.base_url
    with socket.create_connection((url.host, url.port or 0), timeout=20) as connection:
        connection.sendall(
            b"GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path
        )
        return b"".join(iter(lambda: connection.recv(65_536), b""))


@pytest.mark.parametrize(
    "way",
    [
        b"/items/../secret.png/image",
        b"/items/../../secret.png",
        b"/items/%2e%2e/secret.png/image",
        b"/items/%2e%2e%2fsecret.png/image",
        b"/items/..%2Fsecret.png/image",
        b"/items/%252e%252e%252fsecret.png/image",
        b"/items/..%5csecret.png/image",
        b"/items/..\\secret.png/image",
        b"/items/%2fetc%2fpasswd/image",
        b"/items//etc/passwd/image",
        b"/items/file:%2f%2f%2fetc%2fpasswd/image",
        b"/items/red%00/image",
        b"/items/red%00.png/image",
        b"/items/%00/image",
        b"/items/red/image/../../../secret.png",
        b"/items/red/../../secret.png/image",
        b"/items/./red/image",
        b"/items/red%2f..%2f..%2fsecret.png/image",
        b"/items/link.png/image",
        b"/items/red.png/image",
        b"/items/%ef%bc%8e%ef%bc%8e%2fsecret.png/image",
        b"/items/C:%5csecret.png/image",
        b"/items/green/image",
        b"/items/blue/image",
        b"/items/green/image?size=32",
        b"/items/red/image?index=..%2f..%2fsecret",
        b"/items/red/image?index=%00",
        b"/static/../../secret.png",
        b"/static/%2e%2e/app.py",
        b"/static/..%2fapp.py",
        b"/static//etc/passwd",
        b"/../../../../etc/passwd",
    ],
)
def test_nothing_outside_is_sent_whatever_is_asked(client: httpx.Client, way: bytes) -> None:
    head, _, body = asked(client, way).partition(b"\r\n\r\n")
    assert head.split(b" ", 2)[1] in (b"400", b"404", b"422"), head
    assert b"content-type: application/json" in head
    assert SECRET not in body
    assert b"root:" not in body


def test_an_item_with_a_picture_has_it_all_the_while(client: httpx.Client) -> None:
    assert client.get("/items/red/image").content == OWN
    assert asked(client, b"/items/%72%65%64/image").endswith(OWN)
