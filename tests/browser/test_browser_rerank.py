"""The re-rank switch: there only where it can do something, and seen in what is shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from hivlp.service.app import create_app
from hivlp.service.settings import Limits, Settings
from tests.browser.test_browser_page import CARDS, first_name, open_page
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.unit.service.serving_app import serving

pytestmark = [pytest.mark.chromium, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served index whose model has a re-ranker, which likes other colours best."""
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    home = make_home(tmp_path_factory.mktemp("home"), corpus, reranker="unlike", states=True)
    with serving(create_app(Settings(home=home))) as client:
        yield str(client.base_url)


@pytest.fixture(scope="module")
def hurried(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same, without the time to re-rank anything."""
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    home = make_home(tmp_path_factory.mktemp("home"), corpus, reranker="unlike")
    with serving(create_app(Settings(home=home, limits=Limits(max_rerank_ms=1e-6)))) as client:
        yield str(client.base_url)


def test_there_is_no_switch_without_a_reranker(page: Page, address: str) -> None:
    open_page(page, address, "/?q=red&rerank=1")
    assert first_name(page) == "red square"
    assert page.locator("#rerank-choice").is_hidden()
    assert "re-ranked" not in page.locator("#status").inner_text()


def test_turning_it_on_sorts_anew_and_shows_matches(page: Page, pairs: str) -> None:
    open_page(page, pairs, "/?q=red")
    assert first_name(page) == "red square"
    assert not page.locator(f"{CARDS} .score").first.inner_text().endswith("%")
    page.click("#rerank-choice")
    expect(page.locator("#status")).to_contain_text("re-ranked")
    expect(page.locator(f"{CARDS} .score").first).to_have_text("100 %")
    assert first_name(page) != "red square"
    assert page.locator(f"{CARDS} .name").last.inner_text() == "red square"
    told = page.locator(CARDS).first.get_attribute("aria-label")
    assert told is not None
    assert "match 100 %, score " in told
    assert page.url.endswith("/?q=red&rerank=1")
    page.click("#how summary")
    assert page.locator(".lane.rerank .bar").count() == 1
    page.click("#rerank-choice")
    expect(page.locator(f"{CARDS} .name").first).to_have_text("red square")


def test_the_address_holds_it_and_the_keyboard_turns_it(page: Page, pairs: str) -> None:
    open_page(page, pairs, "/?q=blue&rerank=1")
    expect(page.locator("#status")).to_contain_text("re-ranked")
    assert page.is_checked("#rerank")
    page.focus("#rerank")
    page.keyboard.press("Space")
    expect(page.locator(f"{CARDS} .name").first).to_have_text("blue square")
    page.go_back()
    expect(page.locator("#status")).to_contain_text("re-ranked")
    assert page.is_checked("#rerank")


def test_what_is_no_pair_is_searched_as_ever(page: Page, pairs: str) -> None:
    open_page(page, pairs, "/?q=green&rerank=1")
    expect(page.locator("#status")).to_contain_text("re-ranked")
    page.click("label:has-text('Captions')")
    page.wait_for_selector(".quote")
    expect(page.locator("#status")).not_to_contain_text("re-ranked")
    file = {"name": "mine.png", "mimeType": "image/png", "buffer": colour_png("green")}
    page.set_input_files("#file", file)  # a picture and captions are a pair again
    expect(page.locator("#status")).to_contain_text("re-ranked")
    page.click(CARDS)
    page.wait_for_selector("#pill:not([hidden])")
    expect(page.locator("#status")).to_contain_text("results")
    expect(page.locator("#status")).not_to_contain_text("re-ranked")
    assert page.locator("#notice").is_hidden()


def test_want_of_time_is_said(page: Page, hurried: str) -> None:
    open_page(page, hurried, "/?q=red&rerank=1")
    assert first_name(page) == "red square"
    expect(page.locator("#status")).to_contain_text("re-ranking took too long or failed")
    assert not page.locator(f"{CARDS} .score").first.inner_text().endswith("%")


def test_later_pages_behind_what_was_compared_belong_to_the_same_order(
    page: Page, pairs: str
) -> None:
    def answer(route: Route) -> None:
        body = route.fetch().json()
        if route.request.post_data_json["offset"]:  # the corpus has one page only
            hits = [{k: v for k, v in hit.items() if k != "match"} for hit in first["hits"]]
            route.fulfill(json={**first, "hits": hits, "returned": 3})
            return
        first.update(body)
        hits = (body["hits"] * 2)[:30]
        route.fulfill(json={**body, "hits": hits, "returned": len(hits)})

    first: dict[str, Any] = {}
    page.route("**/search/text", answer)
    open_page(page, pairs, "/?q=red&rerank=1")
    expect(page.locator("#status")).to_contain_text("30 results")
    page.click("#more")
    expect(page.locator("#status")).to_contain_text("50 results")
    expect(page.locator("#status")).to_contain_text("re-ranked")
    assert not page.locator(f"{CARDS} .score").last.inner_text().endswith("%")


def test_the_switches_stand_together_and_leave_no_room_without_them(
    page: Page, pairs: str, address: str
) -> None:
    open_page(page, pairs)
    sides, switch = (page.locator(f"#{name}").bounding_box() for name in ("sides", "rerank-choice"))
    assert sides is not None
    assert switch is not None
    assert abs(sides["y"] + sides["height"] / 2 - switch["y"] - switch["height"] / 2) < 2
    open_page(page, address)
    assert page.locator("#sides").is_visible()
    page.evaluate("document.getElementById('sides').hidden = true")
    assert page.locator(".choices").is_hidden()


def test_it_fits_a_narrow_screen(page: Page, pairs: str) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    open_page(page, pairs, "/?q=red&rerank=1")
    expect(page.locator("#status")).to_contain_text("re-ranked")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
