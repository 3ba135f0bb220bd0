"""One chromium for all browser tests, and a page that fails on any error it meets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from hivlp.service.app import create_app
from hivlp.service.settings import Settings
from tests.integration.served_home import make_corpus, make_home
from tests.unit.service.serving_app import serving

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
TIMEOUT_MS = 15_000


# Not for the session: the driver's event loop would stay in this thread, under other tests.
@pytest.fixture(scope="module")
def browser(chromium_path: str) -> Iterator[Browser]:
    with sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=chromium_path, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A served index of coloured squares."""
    corpus: Path = make_corpus(tmp_path_factory.mktemp("corpus"))
    home = make_home(tmp_path_factory.mktemp("home"), corpus)
    with serving(create_app(Settings(home=home))) as client:
        yield str(client.base_url)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A fresh page; scripts that fail, and anything the content policy stops, fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on(
        "console",
        lambda message: (
            troubles.append(message.text) if "Content Security Policy" in message.text else None
        ),
    )
    yield page
    context.close()
    assert not troubles
