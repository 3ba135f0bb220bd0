"""The page of a service that asks for a key, and what the browser lets that page do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from pydantic import SecretStr

from hivlp.service.app import create_app
from hivlp.service.keys import KeySettings
from hivlp.service.settings import Settings
from tests.integration.served_home import make_corpus, make_home
from tests.unit.service.serving_app import serving

pytestmark = [pytest.mark.chromium, pytest.mark.xdist_group("browser")]
KEY = "key-of-the-page-0123456789"
CARDS = "#grid button.hit"


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an index that is served to holders of a key."""
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    home = make_home(tmp_path_factory.mktemp("home"), corpus)
    settings = Settings(home=home, keys=KeySettings(api=(SecretStr(KEY),)))
    with serving(create_app(settings)) as client:
        yield str(client.base_url)


def enter(page: Page, key: str) -> None:
    page.fill("input[name=key]", key)
    page.keyboard.press("Enter")


def test_the_page_asks_for_a_key_and_searches_with_it(page: Page, closed: str) -> None:
    page.goto(f"{closed}/?q=red")
    page.wait_for_selector("input[name=key]")
    assert page.locator("input[name=key]").evaluate("n => n === document.activeElement")
    assert page.input_value("#query") == ""
    enter(page, "key-of-somebody-else")
    expect(page.locator("#notice")).to_contain_text("not one of this service")
    enter(page, KEY)
    expect(page.locator(f"{CARDS} .name").first).to_have_text("red square")
    image = page.locator(f"{CARDS} img").first
    expect(image).to_have_js_property("complete", True)
    assert image.evaluate("node => node.naturalWidth") > 0
    page.click(CARDS)
    expect(page.locator("#pill-image")).to_have_js_property("complete", True)
    assert page.locator("#pill-image").evaluate("node => node.naturalWidth") > 0
    assert page.locator(".foot .keyed").is_hidden()


def test_a_key_is_kept_by_its_tab_alone(page: Page, closed: str) -> None:
    page.goto(closed)
    page.wait_for_selector("input[name=key]")
    enter(page, KEY)
    expect(page.locator("#holding")).to_contain_text("items")
    page.reload()
    expect(page.locator("#holding")).to_contain_text("items")
    page.goto(f"{closed}/docs")
    page.wait_for_selector(".route")
    assert page.evaluate("Object.keys(localStorage).length") == 0
    assert page.evaluate("document.cookie") == ""
    assert KEY not in page.url
    other = page.context.new_page()
    other.goto(closed)
    other.wait_for_selector("input[name=key]")


def test_the_documentation_asks_for_a_key_too(page: Page, closed: str) -> None:
    page.goto(f"{closed}/docs")
    enter(page, KEY)
    page.wait_for_selector(".route")


def test_what_can_be_no_key_is_not_sent(page: Page, closed: str) -> None:
    page.goto(closed)
    enter(page, "schlüssel mit leer")
    assert not page.locator("input[name=key]").evaluate("node => node.validity.valid")


def test_a_key_that_is_taken_back_is_asked_for_again(page: Page, closed: str) -> None:
    page.goto(closed)
    page.wait_for_selector("input[name=key]")
    enter(page, KEY)
    expect(page.locator("#holding")).to_contain_text("items")
    error = {"code": "wrong_key", "message": "no", "param": None, "request_id": "1"}
    page.route("**/search/text", lambda route: route.fulfill(status=403, json={"error": error}))
    page.fill("#query", "blue")
    page.keyboard.press("Enter")
    page.wait_for_selector("input[name=key]")
    assert page.evaluate("sessionStorage.length") == 0
    page.unroute("**/search/text")
    enter(page, KEY)
    expect(page.locator(f"{CARDS} .name").first).to_have_text("blue square")


ELSEWHERE = "http://127.0.0.2:9"


@pytest.mark.parametrize(
    ("harm", "directive"),
    [
        (("script", "text", "window.bad = 1"), "script-src-elem"),
        (("script", "src", f"{ELSEWHERE}/x.js"), "script-src-elem"),
        (("img", "src", f"{ELSEWHERE}/x.png"), "img-src"),
        (("iframe", "src", f"{ELSEWHERE}/"), "frame-src"),
        (("object", "data", "/static/favicon.svg"), "object-src"),
        (("base", "href", f"{ELSEWHERE}/"), "base-uri"),
        (("style", "textContent", "p {}"), "style-src-elem"),
    ],
)
def test_the_browser_stops_what_the_page_never_does(
    browser: Browser, address: str, harm: tuple[str, str, str], directive: str
) -> None:
    page = browser.new_page()
    try:
        page.goto(address)
        stopped = page.evaluate(
            """([tag, name, value]) => new Promise((resolve) => {
                document.addEventListener(
                    "securitypolicyviolation", (event) => resolve(event.effectiveDirective)
                );
                document.body.append(Object.assign(document.createElement(tag), {[name]: value}));
            })""",
            harm,
        )
        assert stopped == directive
        assert page.evaluate("window.bad") is None
    finally:
        page.close()


def test_no_other_site_can_frame_the_page(browser: Browser, address: str) -> None:
    page = browser.new_page()
    try:
        page.set_content(f"<iframe src='{address}'></iframe>")
        page.wait_for_timeout(500)
        inner = page.frames[1]
        assert inner.locator("#form").count() == 0
    finally:
        page.close()
