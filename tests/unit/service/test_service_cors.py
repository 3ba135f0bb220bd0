"""Pages of other sites: none may read an answer unless its origin is listed."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from pydantic import SecretStr

from hivlp.service.app import create_app
from hivlp.service.cors import CorsSettings
from hivlp.service.keys import KeySettings
from hivlp.service.settings import ChangeSettings
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, serving

SHOP, EVIL = "https://shop.example", "https://evil.example"
KEY = "key-of-the-shop-0123"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


@pytest.fixture(scope="module")
def listed() -> Iterator[httpx.Client]:
    more = {
        "cors": CorsSettings(origins=(SHOP,)),
        "keys": KeySettings(api=(SecretStr(KEY),)),
        "changes": ChangeSettings(writes=True),
    }
    with serving(create_app(SMALL.model_copy(update=more), load=World().load)) as client:
        yield client


def allowed(response: httpx.Response) -> str | None:
    return response.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("origin", [SHOP, EVIL, "null", "http://localhost"])
def test_without_a_list_no_page_is_let_in(shared: httpx.Client, origin: str) -> None:
    headers = {"Origin": origin}
    asked = shared.options("/search/text", headers={**headers, **PREFLIGHT})
    answered = shared.post("/search/text", json={"query": "red"}, headers=headers)
    assert asked.status_code == 405
    assert allowed(asked) is allowed(answered) is None


def test_a_listed_page_asks_first_without_a_key_and_then_with_one(listed: httpx.Client) -> None:
    asked = listed.options("/search/text", headers={"Origin": SHOP, **PREFLIGHT})
    assert (asked.status_code, allowed(asked)) == (200, SHOP)
    assert "authorization" in asked.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in asked.headers
    assert "x-request-id" in asked.headers
    headers = {"Origin": SHOP, "Authorization": f"Bearer {KEY}"}
    answered = listed.post("/search/text", json={"query": "red"}, headers=headers)
    assert (answered.status_code, allowed(answered)) == (200, SHOP)
    assert "origin" in answered.headers["vary"].lower()


def test_a_listed_page_can_read_why_it_was_refused(listed: httpx.Client) -> None:
    for headers, status in (({}, 401), ({"X-API-Key": "nobody's"}, 403)):
        refused = listed.get("/info", headers={"Origin": SHOP, **headers})
        assert (refused.status_code, allowed(refused)) == (status, SHOP)
        assert refused.json()["error"]["code"] in ("missing_key", "wrong_key")
    headers = {"Origin": SHOP, "X-API-Key": KEY}
    refused = listed.post("/search/text", json={"query": ""}, headers=headers)
    assert (refused.status_code, allowed(refused)) == (422, SHOP)


@pytest.mark.parametrize("origin", [EVIL, "null", "http://shop.example", f"{SHOP}.evil.example"])
def test_others_are_let_in_by_no_list(listed: httpx.Client, origin: str) -> None:
    asked = listed.options("/search/text", headers={"Origin": origin, **PREFLIGHT})
    assert (asked.status_code, allowed(asked)) == (400, None)
    headers = {"Origin": origin, "X-API-Key": KEY}
    assert allowed(listed.get("/info", headers=headers)) is None


def test_a_listed_page_may_change_items_and_another_may_not(listed: httpx.Client) -> None:
    for origin, said in ((SHOP, "can't be changed over HTTP here"), (EVIL, f"a page of {EVIL}")):
        headers = {"Origin": origin, "X-API-Key": KEY}
        refused = listed.delete("/items/red", headers=headers)
        # The fake world takes no changes; that it says so shows that the page was let through.
        assert said in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "origin", ["*", "shop.example", "https://shop.example/", "https://a@b", "HTTPS://SHOP.EXAMPLE"]
)
def test_what_is_no_origin_is_no_setting(origin: str) -> None:
    with pytest.raises(ValueError, match="must be an origin"):
        CorsSettings(origins=(origin,))
