"""The page as people use it: by keyboard, by mouse, with words and with pictures."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, Route, expect

from tests.integration.served_home import ATTRIBUTION, colour_png

pytestmark = [pytest.mark.chromium, pytest.mark.xdist_group("browser")]
CARDS = "#grid button.hit"


def first_name(page: Page) -> str:
    page.wait_for_selector(CARDS)
    return page.locator(f"{CARDS} .name").first.inner_text()


def open_page(page: Page, address: str, path: str = "/") -> None:
    page.goto(address + path)
    expect(page.locator("#holding")).not_to_be_empty()


def test_typing_a_sentence_shows_pictures_with_name_and_score(page: Page, address: str) -> None:
    open_page(page, address)
    assert page.locator("#query").evaluate("node => node === document.activeElement")
    page.keyboard.type("a red square")
    page.keyboard.press("Enter")
    assert first_name(page) == "red square"
    assert page.locator(f"{CARDS} .score").first.inner_text().startswith("0.")
    image = page.locator(f"{CARDS} img").first
    expect(image).to_have_js_property("complete", True)
    assert image.evaluate("node => node.naturalWidth") > 0
    assert image.is_visible()
    status = page.locator("#status").inner_text()
    assert status.startswith("20 results in ")
    assert "cascade, level 3" in status
    assert page.url.endswith("/?q=a+red+square")
    assert page.title() == "a red square · hivlp"


def test_an_address_is_a_search_and_back_goes_back(page: Page, address: str) -> None:
    open_page(page, address, "/?q=blue")
    assert first_name(page) == "blue square"
    page.fill("#query", "green")
    page.keyboard.press("Enter")
    expect(page.locator(f"{CARDS} .name").first).to_have_text("green square")
    page.go_back()
    expect(page.locator(f"{CARDS} .name").first).to_have_text("blue square")
    assert page.input_value("#query") == "blue"
    page.click("#home")
    page.wait_for_selector("h1")
    assert page.locator(CARDS).count() == 0


def test_the_timeline_draws_encoding_and_searching(page: Page, address: str) -> None:
    open_page(page, address, "/?q=cyan")
    first_name(page)
    page.click("#how summary")
    assert page.locator(".lane.encode .bar").count() == 3
    assert page.locator(".lane.search .bar").count() == 3
    widths = page.locator(".bar").evaluate_all("bars => bars.map(b => b.offsetWidth)")
    assert all(width >= 3 for width in widths)


def test_a_click_asks_for_more_like_this(page: Page, address: str) -> None:
    open_page(page, address, "/?q=yellow")
    first_name(page)
    page.click(CARDS)
    page.wait_for_selector("#pill:not([hidden])")
    expect(page.locator("#status")).to_contain_text("19 results")
    assert page.locator("#pill-name").inner_text() == "Like yellow square"
    assert first_name(page) == "yellow square"
    assert "like=yellow%2F" in page.url
    page.click("#pill-clear")
    page.wait_for_selector("h1")


def test_a_picked_picture_is_searched(page: Page, address: str) -> None:
    open_page(page, address)
    page.set_input_files(
        "#file", {"name": "mine.png", "mimeType": "image/png", "buffer": colour_png("green")}
    )
    assert first_name(page) == "green square"
    assert page.locator("#pill-name").inner_text() == "mine.png"


@pytest.mark.parametrize("how", ["drop", "paste"])
def test_a_dropped_or_pasted_picture_is_searched(page: Page, address: str, how: str) -> None:
    open_page(page, address)
    page.evaluate(
        """([how, bytes]) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "x.png", {type: "image/png"}));
            const more = {bubbles: true, cancelable: true};
            const event = how === "drop"
                ? new DragEvent("drop", {...more, dataTransfer: data})
                : new ClipboardEvent("paste", {...more, clipboardData: data});
            document.body.dispatchEvent(event);
        }""",
        [how, list(colour_png("blue"))],
    )
    assert first_name(page) == "blue square"


def test_what_is_no_picture_is_explained_and_the_next_search_works(
    page: Page, address: str
) -> None:
    open_page(page, address)
    file = {"name": "notes.png", "mimeType": "image/png", "buffer": b"hello"}
    page.set_input_files("#file", file)
    page.wait_for_selector("#notice.bad")
    assert "Not a supported picture" in page.locator("#notice").inner_text()
    page.click("#pill-clear")
    page.click("#chips button >> nth=0")
    page.wait_for_selector(CARDS)
    assert page.locator("#notice").is_hidden()


def test_captions_can_be_searched(page: Page, address: str) -> None:
    open_page(page, address, "/?q=magenta")
    first_name(page)
    page.click("label:has-text('Captions')")
    page.wait_for_selector(".quote")
    assert "magenta" in page.locator(".quote").first.inner_text()
    assert "in=text" in page.url


def test_loading_and_unreachable_are_shown(page: Page, address: str) -> None:
    open_page(page, address)
    held = []
    page.route("**/search/text", lambda route: held.append(route))
    page.fill("#query", "red")
    page.keyboard.press("Enter")
    page.wait_for_selector(".ghost")
    assert page.locator("#results").get_attribute("aria-busy") == "true"
    held[0].abort()
    page.wait_for_selector("#notice.bad")
    page.unroute("**/search/text")
    page.click("#notice button")
    assert first_name(page) == "red square"


def test_a_page_opened_too_early_waits_for_the_server(page: Page, address: str) -> None:
    error = {"code": "not_ready", "message": "loading", "param": None, "request_id": "1"}
    page.route("**/info", lambda route: route.fulfill(status=503, json={"error": error}))
    page.goto(address + "/?q=red")
    page.wait_for_selector("#notice:has-text('Just a moment')")
    page.unroute("**/info")
    assert first_name(page) == "red square"


def test_trying_again_begins_anew_where_the_server_was_never_reached(
    page: Page, address: str
) -> None:
    page.route("**/info", lambda route: route.abort())
    page.goto(address + "/?q=red")
    page.wait_for_selector("#notice.bad")
    page.unroute("**/info")
    page.click("#notice button")
    assert first_name(page) == "red square"


def test_results_stay_when_more_of_them_do_not_come(page: Page, address: str) -> None:
    def answer(route: Route) -> None:
        if route.request.post_data_json["offset"]:
            route.abort()
            return
        body = route.fetch().json()
        hits = (body["hits"] * 2)[:30]
        route.fulfill(json={**body, "hits": hits, "returned": len(hits)})

    page.route("**/search/text", answer)
    open_page(page, address, "/?q=red")
    page.click("#more")
    expect(page.locator("#status")).to_contain_text("No more came")
    assert page.locator(CARDS).count() == 30
    assert page.locator("#more").is_enabled()


def test_everything_can_be_done_by_keyboard(page: Page, address: str) -> None:
    open_page(page, address, "/?q=red")
    first_name(page)
    page.locator(CARDS).first.focus()
    page.keyboard.press("ArrowRight")
    second = page.locator(CARDS).nth(1)
    assert second.evaluate("node => node === document.activeElement")
    page.keyboard.press("/")
    assert page.locator("#query").evaluate("node => node === document.activeElement")
    assert page.input_value("#query") == "red"


def test_every_control_has_a_name(page: Page, address: str) -> None:
    open_page(page, address, "/?q=red")
    first_name(page)
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, a")].filter((node) => {
            const label = node.getAttribute("aria-label") || node.textContent.trim()
                || node.labels?.[0]?.textContent.trim();
            return !label;
        }).map((node) => node.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("[aria-live], [role=status]").count() >= 1


def test_sources_are_credited(page: Page, address: str) -> None:
    open_page(page, address, "/?q=red")
    first_name(page)
    credits = page.locator("#sources").inner_text()
    assert ATTRIBUTION in credits
    assert "CC0-1.0" in credits


def test_markup_in_a_query_is_only_text(page: Page, address: str) -> None:
    open_page(page, address)
    page.fill("#query", "<img src=x onerror=alert(1)>")
    page.keyboard.press("Enter")
    page.wait_for_selector(CARDS)
    assert page.locator("img[src='x']").count() == 0


@pytest.mark.parametrize("path", ["/", "/?q=red", "/docs"])
def test_nothing_is_wider_than_the_screen(page: Page, address: str, path: str) -> None:
    page.goto(address + path)
    page.wait_for_load_state("networkidle")
    for width in (1280, 768, 390, 320):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_api_page_lists_every_endpoint(page: Page, address: str) -> None:
    page.goto(address + "/docs")
    page.wait_for_selector(".route")
    text = page.locator("#routes").inner_text()
    for path in ("/search/text", "/search/image", "/items/{id}", "/readyz"):
        assert path in text
    page.click(".route summary >> nth=0")
    assert page.locator(".route table").first.is_visible()
