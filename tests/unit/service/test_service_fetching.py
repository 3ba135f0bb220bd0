"""Pictures by URL: from hosts that were named, at addresses that were looked at, in bounds."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import shutil
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.models.errors import HivlpError, ImageError, InputError
from hivlp.service.addresses import Address
from hivlp.service.app import create_app
from hivlp.service.client import Client
from hivlp.service.errors import Overloaded
from hivlp.service.fetch_settings import FetchSettings
from hivlp.service.fetching import Fetcher
from tests.unit.service.fakes_service import World
from tests.unit.service.pictures_service import picture
from tests.unit.service.serving_app import SMALL, serving

HOST, OTHER = "pictures.example", "other.example"
# Stands for an address of everybody's: all of 127/8 is this machine.
HERE, ELSEWHERE = ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("127.0.0.2")
RED = picture((255, 0, 0))
PICTURE = b"\x89PNG and so on"
Say = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, *headers: str, status: str = "200 OK") -> Say:
    """Says this, and closes."""

    async def say(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""])
        writer.write(head.encode() + body)

    return say


class Upstream:
    """A server whose every connection says one thing, and who was asked for what."""

    def __init__(self, *says: Say) -> None:
        self._says = list(says)
        self.asked: list[bytes] = []
        self.port = 0

    async def serve(self, tls: ssl.SSLContext | None = None) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=tls)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
            say = self._says.pop(0) if len(self._says) > 1 else self._says[0]
            await say(reader, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Names:
    """A resolver: what each name is, the first time, the second, and so on."""

    def __init__(self, **names: list[Address]) -> None:
        self._names = {name.replace("_", "."): list(found) for name, found in names.items()}
        self.resolved: list[str] = []

    async def __call__(self, host: str, port: int) -> list[Address]:
        self.resolved.append(host)
        found = self._names.get(host)
        if not found:
            raise OSError("no such name")
        return [found.pop(0) if len(found) > 1 else found[0]]


def is_here(address: Address) -> bool:
    return address == HERE


async def fetched(
    upstream: Upstream,
    path: str = "/a.png",
    *,
    scheme: str = "http",
    host: str = HOST,
    names: Any = None,
    server_tls: ssl.SSLContext | None = None,
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> bytes:
    server = await upstream.serve(server_tls)
    given = {"hosts": (HOST, OTHER), "ports": (80, upstream.port), **settings}
    resolver = names or Names(pictures_example=[HERE], other_example=[HERE])
    fetcher = Fetcher(FetchSettings(**given), 100_000, resolve=resolver, allowed=is_here, tls=tls)
    try:
        async with server:
            return await fetcher.fetch(f"{scheme}://{host}:{upstream.port}{path}")
    finally:
        await fetcher.close()


def refused(upstream: Upstream, code: str, said: str, *args: Any, **options: Any) -> None:
    with pytest.raises(HivlpError, match=said) as caught:
        asyncio.run(fetched(upstream, *args, **options))
    error = caught.value
    assert isinstance(error, InputError | ImageError)
    assert (error.code, error.param) == (code, "image")


def test_a_picture_comes_from_where_it_is() -> None:
    upstream = Upstream(answer(PICTURE, f"Content-Length: {len(PICTURE)}"))
    assert asyncio.run(fetched(upstream, "/a%20b.png?x=1")) == PICTURE
    (asked,) = upstream.asked
    assert asked.startswith(b"GET /a%20b.png?x=1 HTTP/1.1\r\n")
    assert f"Host: {HOST}:{upstream.port}\r\n".encode() in asked
    assert b"Accept-Encoding: identity" in asked
    assert b"authorization" not in asked.lower()
    assert b"cookie" not in asked.lower()


def test_it_is_off_unless_hosts_are_named() -> None:
    fetcher = Fetcher(FetchSettings(), 1_000)
    with pytest.raises(InputError, match="not available") as caught:
        asyncio.run(fetcher.fetch("https://pictures.example/a.png"))
    assert caught.value.code == "not_available"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://pictures.example/a.png",
        "file:///etc/passwd",
        "gopher://pictures.example/",
        "http:///a.png",
        "http:pictures.example",
        "https://",
        "http://user@pictures.example/",
        "http://user:s3cret@pictures.example/",
        "http://@pictures.example:443@evil.example/",
        "http://pictures.example.evil.example/",
        "http://evil.example/pictures.example",
        "http://evil.example#@pictures.example/",
        "http://evil.example\\@pictures.example/",
        "http://evilpictures.example/",
        "http://pictures.example:22/",
        "http://pictures.example:6379/",
        "http://127.0.0.1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://169.254.169.254/latest/meta-data/",
        "http://2130706433/",
        "http://localhost/",
        "http://pictures.example\r\nX: y/",
        "http://pictures.example\x00/",
        "http://" + "a" * 3_000,
        "http://pictures.example/" + "a" * 3_000,
        "http://pictures.example:99999/",
        "http://[::1/",
        "http://\ud800/",
        "",
    ],
)
def test_what_may_not_be_asked_is_not(url: str) -> None:
    async def nobody(host: str, port: int) -> list[Address]:
        pytest.fail(f"{host}:{port} was looked up")

    fetcher = Fetcher(FetchSettings(hosts=(HOST,)), 1_000, resolve=nobody)
    with pytest.raises(InputError) as caught:
        asyncio.run(fetcher.fetch(url))
    assert (caught.value.code, caught.value.param) == ("url_not_allowed", "image")
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize(
    ("names", "host", "may"),
    [
        ((HOST,), HOST, True),
        ((HOST.upper() + ".",), HOST, True),
        ((HOST,), "a." + HOST, False),
        (("*." + HOST,), "a." + HOST, True),
        (("*." + HOST,), "b.a." + HOST, True),
        (("*." + HOST,), HOST, False),
        (("*." + HOST,), "evil" + HOST, False),
        (("*",), "anything.example", True),
        ((), HOST, False),
    ],
)
def test_hosts_are_named_exactly_or_by_what_is_above_them(
    names: tuple[str, ...], host: str, may: bool
) -> None:
    assert FetchSettings(hosts=names).names(host) is may


@pytest.mark.parametrize("name", ["http://a", "a/b", "a:80", "*a", "a.*", "*.*.a", "", "a b"])
def test_what_is_no_host_is_no_setting(name: str) -> None:
    with pytest.raises(ValueError, match="must be a host name"):
        FetchSettings(hosts=(name,))


def test_a_name_at_an_address_that_is_not_public_is_not_connected_to() -> None:
    upstream = Upstream(answer(PICTURE))
    names = Names(pictures_example=[ELSEWHERE])
    refused(upstream, "url_not_allowed", "not public", names=names)
    assert upstream.asked == []


def test_one_address_of_several_that_is_not_public_is_enough() -> None:
    async def both(host: str, port: int) -> list[Address]:
        return [HERE, ELSEWHERE]

    upstream = Upstream(answer(PICTURE))
    refused(upstream, "url_not_allowed", "not public", names=both)
    assert upstream.asked == []


def test_the_next_address_is_tried_where_one_does_not_answer() -> None:
    dead = ipaddress.ip_address("127.0.0.3")  # where nobody listens

    async def both(host: str, port: int) -> list[Address]:
        return [dead, HERE]

    async def run() -> bytes:
        upstream = Upstream(answer(PICTURE))
        async with await upstream.serve():
            settings = FetchSettings(hosts=(HOST,), ports=(upstream.port,))
            fetcher = Fetcher(settings, 1_000, resolve=both, allowed=lambda _: True)
            found = await fetcher.fetch(f"http://{HOST}:{upstream.port}/")
            await fetcher.close()
            return found

    assert asyncio.run(run()) == PICTURE


def test_a_name_that_changes_its_mind_is_asked_once_and_then_connected_to() -> None:
    names = Names(pictures_example=[HERE, ELSEWHERE])
    upstream = Upstream(answer(PICTURE))
    assert asyncio.run(fetched(upstream, names=names)) == PICTURE
    assert names.resolved == [HOST]


def test_a_name_that_changes_its_mind_between_hops_is_looked_at_again() -> None:
    names = Names(pictures_example=[HERE, ELSEWHERE])
    upstream = Upstream(answer(b"", "Location: /b.png", status="302 Found"), answer(PICTURE))
    refused(upstream, "url_not_allowed", "not public", names=names)
    assert names.resolved == [HOST, HOST]
    assert len(upstream.asked) == 1


@pytest.mark.parametrize(
    ("location", "code", "said"),
    [
        ("http://evil.example/", "url_not_allowed", "not a host that"),
        ("http://127.0.0.1/", "url_not_allowed", "not a host that"),
        ("http://169.254.169.254/", "url_not_allowed", "not a host that"),
        ("//evil.example/", "url_not_allowed", "not a host that"),
        ("file:///etc/passwd", "url_not_allowed", "must begin with"),
        ("http://pictures.example:22/", "url_not_allowed", "port 22"),
        ("http://a:b@pictures.example/", "url_not_allowed", "must not hold"),
        ("", "url_not_allowed", "must be a URL"),
        ("/" + "a" * 3_000, "url_not_allowed", "at most 2048"),
        ("/again", "fetch_failed", "redirects more than 3 times"),
    ],
)
def test_a_redirect_leads_nowhere_that_may_not_be_asked(
    location: str, code: str, said: str
) -> None:
    upstream = Upstream(answer(b"", f"Location: {location}", status="302 Found"))
    refused(upstream, code, said)
    assert len(upstream.asked) == (4 if location == "/again" else 1)


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "303 See", "307 Temp", "308 Perm"])
def test_redirects_are_followed_where_they_may_lead(status: str) -> None:
    async def over_there(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        where = f"http://{OTHER}:{upstream.port}/b.png"
        await answer(b"", f"Location: {where}", status=status)(reader, writer)

    upstream = Upstream(over_there, answer(PICTURE))
    assert asyncio.run(fetched(upstream)) == PICTURE
    assert f"Host: {OTHER}".encode() in upstream.asked[1]


@pytest.mark.parametrize(
    ("status", "kind", "said"),
    [
        ("403 Forbidden", "text/html; charset=utf-8", r"answered 403 \(text/html\)"),
        ("404 Not Found", "application/json", r"answered 404 \(application/json\)"),
        ("500 Oh", "", r"answered 500 \(no content type\)"),
        ("503 No", "<script>/x", r"answered 503 \(no content type\)"),
        ("204 None", "image/png", r"answered 204 \(image/png\)"),
        ("206 Part", "image/png", "answered 206"),
        ("304 Same", "image/png", "answered 304"),
    ],
)
def test_another_status_is_told_with_its_type_and_never_its_body(
    status: str, kind: str, said: str
) -> None:
    upstream = Upstream(answer(b"my secret", f"Content-Type: {kind}", status=status))
    with pytest.raises(InputError, match=said) as caught:
        asyncio.run(fetched(upstream))
    assert caught.value.code == "fetch_failed"
    assert "secret" not in caught.value.message
    assert "script" not in caught.value.message


async def endless(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1000\r\n" + b"a" * 0x1000 + b"\r\n")
        await writer.drain()


async def slow(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
    while True:
        writer.write(b"a")
        await writer.drain()
        await asyncio.sleep(0.02)


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


async def endless_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"A: " + b"a" * 1_000 + b"\r\n")
        await writer.drain()


async def broken(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf")


@pytest.mark.parametrize(
    ("say", "code", "said"),
    [
        (endless, "image_too_large", "larger than the limit of 100000"),
        (answer(b"", "Content-Length: 999999999999"), "image_too_large", "100000"),
        (answer(b"", "Content-Length: " + "9" * 500), "fetch_failed", "did not answer in HTTP"),
        (slow, "fetch_failed", "not all there within 0.4 s"),
        (silent, "fetch_failed", "not all there within"),
        (endless_head, "fetch_failed", "did not answer in HTTP"),
        (broken, "fetch_failed", "did not answer in HTTP"),
        (answer(b"", status="nonsense"), "fetch_failed", "did not answer in HTTP"),
        (answer(b"x", "Content-Encoding: gzip"), "fetch_failed", "compressed"),
        (answer(b"x", "Content-Encoding: br, gzip"), "fetch_failed", "compressed"),
    ],
)
def test_an_upstream_that_is_endless_slow_or_broken_is_given_up(
    say: Say, code: str, said: str
) -> None:
    refused(Upstream(say), code, said, timeout_s=0.4 if code == "fetch_failed" else 20)


def test_nobody_there_is_told_without_a_word_of_the_system() -> None:
    upstream = Upstream(answer(PICTURE))
    refused(upstream, "fetch_failed", "can't be reached", names=Names())

    async def nobody_listens() -> None:
        settings = FetchSettings(hosts=(HOST,), ports=(9,))
        fetcher = Fetcher(settings, 1_000, resolve=Names(pictures_example=[HERE]), allowed=is_here)
        await fetcher.fetch(f"http://{HOST}:9/")

    with pytest.raises(InputError, match="can't be reached") as caught:
        asyncio.run(nobody_listens())
    assert "refused" not in caught.value.message


def test_so_many_are_fetched_at_once_and_no_more() -> None:
    async def run() -> None:
        upstream = Upstream(silent)
        async with await upstream.serve():
            settings = FetchSettings(hosts=(HOST,), ports=(upstream.port,), concurrency=2)
            names = Names(pictures_example=[HERE])
            fetcher = Fetcher(settings, 1_000, resolve=names, allowed=is_here)
            url = f"http://{HOST}:{upstream.port}/"
            held = [asyncio.create_task(fetcher.fetch(url)) for _ in range(2)]
            while len(upstream.asked) < 2:
                await asyncio.sleep(0.01)
            with pytest.raises(Overloaded):
                await fetcher.fetch(url)
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            await fetcher.close()

    asyncio.run(run())


def certificate(folder: Path, host: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """The contexts of a server with a certificate of this name, and of a client that trusts it."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("there is no openssl to make a certificate with")
    key, made = folder / "key.pem", folder / "certificate.pem"
    command = [program, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}"]
    command += ["-keyout", str(key), "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made, key)
    return server, ssl.create_default_context(cafile=str(made))


def test_tls_verifies_the_name_though_an_address_is_connected_to(tmp_path: Path) -> None:
    server, client = certificate(tmp_path, HOST)
    asked = {"scheme": "https", "server_tls": server, "tls": client}
    assert asyncio.run(fetched(Upstream(answer(PICTURE)), **asked)) == PICTURE
    upstream = Upstream(answer(PICTURE))
    refused(upstream, "fetch_failed", "can't be reached", host=OTHER, **asked)
    assert upstream.asked == []
    untrusting = {**asked, "tls": ssl.create_default_context()}
    refused(Upstream(answer(PICTURE)), "fetch_failed", "can't be reached", **untrusting)
    down = Upstream(answer(b"", f"Location: http://{HOST}/", status="302 Found"))
    refused(down, "url_not_allowed", "from https to http", **asked)


@pytest.mark.parametrize("path", ["/search/image", "/embed/image"])
def test_the_service_fetches_nothing_unless_told_to(shared: httpx.Client, path: str) -> None:
    for url in ("https://pictures.example/a.png", "HTTP://127.0.0.1/"):
        error = shared.post(path, json={"image": url}).json()["error"]
        assert (error["code"], error["param"]) == ("not_available", "image")
    batch = {"searches": [{"kind": "image", "image": "https://pictures.example/a.png"}]}
    (one,) = shared.post("/search/batch", json=batch).json()["results"]
    assert one["error"]["code"] == "not_available"


def test_the_service_told_to_never_fetches_from_this_machine() -> None:
    fetch = FetchSettings(hosts=("*",), ports=(80, 443, 1))
    with serving(
        create_app(SMALL.model_copy(update={"fetch": fetch}), load=World().load)
    ) as client:
        for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "169.254.169.254", "0x7f.1"):
            for path in ("/search/image", "/embed/image"):
                refused = client.post(path, json={"image": f"http://{host}:1/a.png"})
                assert refused.status_code == 422
                assert refused.json()["error"]["code"] in ("url_not_allowed", "fetch_failed"), host
        metrics = client.get("/metrics").text
        assert 'hivlp_rejected_total{reason="url_not_allowed"}' in metrics


class Gallery(BaseHTTPRequestHandler):
    """A red picture, and a page that says 200."""

    def do_GET(self) -> None:
        body = RED if self.path == "/red.png" else b"<!doctype html><html>log in</html>"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextlib.contextmanager
def gallery() -> Iterator[int]:
    """Its port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Gallery)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_picture_by_url_is_searched_as_one_that_was_sent() -> None:
    with gallery() as port:
        fetch = FetchSettings(hosts=(HOST,), ports=(port,))
        app = create_app(SMALL.model_copy(update={"fetch": fetch}), load=World().load)
        names = Names(pictures_example=[HERE])
        app.state.hivlp.fetcher = Fetcher(fetch, 30_000, resolve=names, allowed=is_here)
        with serving(app) as client:
            red, page = f"http://{HOST}:{port}/red.png", f"http://{HOST}:{port}/login"
            found = client.post("/search/image", json={"image": red, "k": 1}).json()
            assert found["hits"][0]["id"] == "red"
            with Client(str(client.base_url)) as ours:
                assert ours.search_image(red, k=1).hits[0].id == "red"
            sent = client.post("/embed/image", files={"image": RED}).json()["levels"]
            assert client.post("/embed/image", json={"image": red}).json()["levels"] == sent
            searches = [{"kind": "image", "image": one} for one in (red, page)]
            results = client.post("/search/batch", json={"searches": searches}).json()["results"]
            assert results[0]["hits"][0]["id"] == "red"
            refused = client.post("/search/image", json={"image": page})
            assert (refused.status_code, results[1]["error"]["code"]) == (415, "unsupported_image")
            assert "a web page (HTML)" in refused.json()["error"]["message"]
            assert "log in" not in refused.text
