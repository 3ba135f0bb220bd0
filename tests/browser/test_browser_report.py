"""The evaluation's page in a real browser: light, dark and narrow, from a file alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser

from hivlp.service.main import main
from tests.integration.served_home import make_corpus, make_home


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = make_home(tmp_path_factory.mktemp("home"), make_corpus(tmp_path_factory.mktemp("c")))
    out = tmp_path_factory.mktemp("report")
    ranks = str(out / "ranks-of-the-last-time-with-a-name-that-no-phone-is-wide-enough-for.jsonl")
    given = ["evaluate", "--home", str(home), "--resamples", "50"]
    assert main([*given, "--ranks", ranks]) == 0
    assert main([*given, "--report", str(out), "--against", ranks]) == 0
    return out / "index.html"


@pytest.mark.chromium
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 360)])
def test_the_report_is_drawn_whole(
    browser: Browser, report: Path, scheme: Literal["light", "dark"], width: int
) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, java_script_enabled=True
    )
    page = context.new_page()
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("request", lambda request: troubles.append(request.url))
    page.goto(report.as_uri())
    assert troubles == [report.as_uri(), *[t for t in troubles[1:] if t.startswith("data:")]]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("svg").count() >= 4
    loaded = page.locator("img").evaluate_all("all => all.map(one => one.naturalWidth)")
    assert loaded
    assert min(loaded) > 0
    colours = page.locator("path.line").evaluate_all(
        "all => all.map(l => getComputedStyle(l).stroke)"
    )
    assert "none" not in colours
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(19, 19, 22)") == (scheme == "dark")
    context.close()
