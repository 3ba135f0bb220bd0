"""Who may change items: programs of this machine, and no page of another site."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.requests import Request

from hivlp.service.errors import ReadOnly
from hivlp.service.settings import ChangeSettings, Settings
from hivlp.service.writers import check_writer

LOCAL = ("127.0.0.1", 50_000)


def request(
    host: str | None = "localhost:8080",
    client: Any = LOCAL,
    server: Any = ("127.0.0.1", 8080),
    **headers: str,
) -> Request:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    if host is not None:
        named["host"] = host
    raw = [(name.encode(), value.encode()) for name, value in named.items()]
    return Request({"type": "http", "headers": raw, "client": client, "server": server})


def settings(writes: bool | None = None, host: str = "127.0.0.1") -> Settings:
    return Settings(host=host, changes=ChangeSettings(writes=writes))


GOOD = [
    request(),
    request("127.0.0.1"),
    request("LOCALHOST"),
    request("[::1]:9", client=("::1", 1), server=("::1", 9)),
    request(client=("::ffff:127.0.0.1", 1)),
    request(origin="http://localhost:8080"),
    request(origin="HTTP://LocalHost:8080"),
]
BAD = [
    (request(client=("192.0.2.7", 1)), "only programs of this machine"),
    (request(server=("192.0.2.7", 8080)), "only programs of this machine"),
    (request(client=None), "only programs of this machine"),
    (request(server=("/run/socket", None)), "only programs of this machine"),
    (request("evil.example:8080"), "not at evil.example:8080"),
    (request("localhost.evil.example"), "not at localhost.evil.example"),
    (request("127.0.0.1.evil.example:8080"), "not at 127"),
    (request(None), "no host"),
    (request(origin="http://evil.example"), "a page of http://evil.example"),
    (request(origin="http://localhost:8081"), "a page of"),
    (request(origin="null"), "a page of null"),
    (request(origin="localhost:8080"), "a page of"),
    (request(forwarded="for=192.0.2.7"), "passed on by a proxy (forwarded)"),
    (request(x_forwarded_for="192.0.2.7"), "x-forwarded-for"),
    (request(x_forwarded_host="example.com"), "x-forwarded-host"),
    (request(via="1.1 squid"), "passed on by a proxy (via)"),
    (request(x_real_ip="192.0.2.7"), "x-real-ip"),
    (request(x_client_ip="192.0.2.7"), "x-client-ip"),
    (request(cf_connecting_ip="192.0.2.7"), "cf-connecting-ip"),
    (request(true_client_ip="192.0.2.7"), "true-client-ip"),
    (request("evil.example", origin="http://evil.example"), "not at evil.example"),
]


@pytest.mark.parametrize("asked", GOOD)
def test_programs_of_this_machine_may_change_items(asked: Request) -> None:
    check_writer(asked, settings())


@pytest.mark.parametrize(("asked", "said"), BAD)
def test_all_others_are_refused_and_told_why(asked: Request, said: str) -> None:
    with pytest.raises(ReadOnly) as caught:
        check_writer(asked, settings())
    assert said in caught.value.message
    assert (caught.value.status, caught.value.code) == (403, "read_only")


def test_a_service_that_is_open_to_all_is_still_closed_to_other_sites() -> None:
    far = {"client": ("192.0.2.7", 1), "server": ("198.51.100.1", 80)}
    open_to_all = settings(writes=True, host="0.0.0.0")
    check_writer(request("shop.example", **far), open_to_all)
    check_writer(request("shop.example", origin="https://shop.example", **far), open_to_all)
    check_writer(request("shop.example", x_forwarded_for="203.0.113.1", **far), open_to_all)
    with pytest.raises(ReadOnly, match="a page of"):
        check_writer(request("shop.example", origin="https://evil.example", **far), open_to_all)


@pytest.mark.parametrize(("writes", "host"), [(False, "127.0.0.1"), (None, "0.0.0.0")])
def test_a_service_that_takes_no_changes_takes_none_from_here_either(
    writes: bool | None, host: str
) -> None:
    with pytest.raises(ReadOnly, match="HIVLP_CHANGES__WRITES"):
        check_writer(request(), settings(writes, host))


@pytest.mark.parametrize("keys", [{"api": "k" * 32}, {"api_file": "/run/keys"}])
def test_where_there_are_api_keys_being_of_this_machine_allows_nothing(keys: Any) -> None:
    closed = Settings(keys=keys)
    assert not closed.writable
    with pytest.raises(ReadOnly):
        check_writer(request(), closed)
    assert Settings(keys={**keys, "admin": "a" * 32}).writable
