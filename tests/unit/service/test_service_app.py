"""The app as a whole: what importing it costs, its document, its page, its headers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from hivlp.service.app import create_app
from hivlp.service.openapi import document_bytes, main
from hivlp.service.routes.page import PAGES
from hivlp.service.settings import Settings

DOCUMENT = Path(__file__).parents[3] / "docs" / "openapi.json"


def test_importing_the_app_loads_no_torch_and_starts_nothing() -> None:
    code = (
        "import sys, threading, prometheus_client, hivlp.service.app\n"
        "heavy = {'torch', 'transformers', 'hivlp.models.training', 'hivlp.models.network'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
        "names = prometheus_client.REGISTRY._names_to_collectors\n"
        "assert not [name for name in names if name.startswith('hivlp')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_committed_document_is_the_apps() -> None:
    found = document_bytes(create_app(Settings()))
    assert found == DOCUMENT.read_bytes(), "run: python -m hivlp.service.openapi docs/openapi.json"


def test_a_document_that_is_out_of_date_is_found(tmp_path: Path) -> None:
    copy = tmp_path / "openapi.json"
    assert main([str(copy)]) == main(["--check", str(copy)]) == 0
    copy.write_text("{}")
    assert main(["--check", str(copy)]) == 1
    assert copy.read_text() == "{}"


def test_every_reference_of_the_document_leads_somewhere() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    schemas = json.loads(text)["components"]["schemas"]
    parts = text.split('"$ref": "#/components/schemas/')[1:]
    assert {part.partition('"')[0] for part in parts} <= set(schemas)
    assert "HTTPValidationError" not in schemas


@pytest.mark.parametrize("path", sorted(PAGES))
def test_every_file_of_the_page_is_sent_with_safe_headers(shared: httpx.Client, path: str) -> None:
    response = shared.get(path)
    assert response.status_code == 200
    assert response.headers["content-security-policy"].startswith("default-src 'self'")
    assert response.headers["x-content-type-options"] == "nosniff"
    again = shared.get(path, headers={"If-None-Match": response.headers["etag"]})
    assert again.status_code == 304


@pytest.mark.parametrize("page", ["index.html", "docs.html", "app.js", "docs.js", "style.css"])
def test_the_page_needs_nobody_else_and_no_inline_code(shared: httpx.Client, page: str) -> None:
    path = next(path for path, name in PAGES.items() if name == page)
    text = shared.get(path).text
    assert "//cdn" not in text
    assert "innerHTML" not in text
    if page.endswith(".html"):
        assert " style=" not in text
        assert " onclick=" not in text
        assert "<script>" not in text
        assert 'src="http' not in text


@pytest.mark.parametrize("path", ["/static/__init__.py", "/static/../app.py", "/static/"])
def test_nothing_else_of_the_package_is_served(shared: httpx.Client, path: str) -> None:
    assert shared.get(path).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/items/red", "DELETE, GET, PUT"),
        ("OPTIONS", "/items/red/image", "DELETE, GET, PUT"),  # the item red/image, too
        ("GET", "/search/text", "POST"),
        ("DELETE", "/livez", "GET"),
        ("POST", "/", "GET, HEAD"),
    ],
)
def test_a_method_that_is_not_there_is_told_all_that_are(
    shared: httpx.Client, method: str, path: str, allowed: str
) -> None:
    refused = shared.request(method, path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
    assert refused.json()["error"]["code"] == "method_not_allowed"
