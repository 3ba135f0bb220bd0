"""A real service, model and index: whatever is asked of it, it never answers with a 5xx.

`make fuzz` does the same for much longer.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from hivlp.service.app import create_app
from hivlp.service.settings import Limits, Settings
from tests.integration.served_home import make_corpus, make_home
from tests.property.mutated import CHANGES, mutations, rounds, seeds, texts
from tests.unit.service.serving_app import serving

SEEDS = seeds()
# 504 is what whoever sets too short a deadline asks for.
CONFIGURED = '[checks]\nnot_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]\n'
UNASKED = "positive_data_acceptance,unsupported_method,allow_header_conformance"
SCHEMATHESIS = (sys.executable, "-m", "schemathesis.cli")
BODY = {"query": "red", "k": 3, "filter": {"field": "name", "in": ["red"]}, "explain": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    home = make_home(tmp_path_factory.mktemp("home"), corpus)
    limits = Limits(max_pixels=1_000_000, max_decoding_pixels=2_000_000)
    with serving(create_app(Settings(home=home, limits=limits))) as client:
        yield client


def check(response: httpx.Response) -> None:
    """An answer, or an error of the sender's in our form; 429 and 503 would be neither."""
    assert response.status_code in (200, 400, 404, 408, 413, 415, 422), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"code", "message", "param", "request_id"}


@pytest.mark.parametrize("name", sorted(SEEDS))
def test_a_mutated_picture_is_searched_or_refused(client: httpx.Client, name: str) -> None:
    for data in mutations(SEEDS[name], list(SEEDS.values()), len(name), rounds(6)):
        check(client.post("/search/image", files={"image": data}))
        encoded = base64.b64encode(data).decode()
        check(client.post("/embed/image", json={"image": encoded}))
    check(client.post("/search/image", files={"image": SEEDS[name]}))


def test_any_text_is_searched_or_refused(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    for text in texts(11, rounds(150)):
        body = json.dumps({"query": text}).encode()
        check(client.post("/search/text", content=body, headers=headers))


def test_a_mutated_body_is_answered_or_refused(client: httpx.Client) -> None:
    random, body = np.random.default_rng(5), json.dumps(BODY).encode()
    for _ in range(rounds(200)):
        changed = bytearray(body)
        CHANGES[int(random.integers(len(CHANGES)))](changed, random, [body])
        headers = {"Content-Type": "application/json"}
        check(client.post("/search/text", content=bytes(changed), headers=headers))


def test_every_endpoint_keeps_to_its_document(client: httpx.Client, tmp_path: Path) -> None:
    """Statuses, content types, headers and bodies are those that openapi.json tells of.

    Not asked: that what the document allows is accepted, for it can't say what filters mean; and
    that no other method is known, for PUT /items/a/image puts the item `a/image`.
    """
    long = rounds(0) > 0
    phases = "examples,coverage,fuzzing,stateful" if long else "examples,fuzzing"
    arguments = (
        *("run", f"{client.base_url}/openapi.json", "--no-color", "--warnings", "off"),
        *("--phases", phases, "--max-examples", str(max(4, rounds(0) // 50)), "--seed", "1"),
        *("--exclude-checks", UNASKED, "--generation-database", "none"),
    )
    command = (*SCHEMATHESIS, *arguments)
    (tmp_path / "schemathesis.toml").write_text(CONFIGURED)
    # It keeps what it found beside itself.
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    assert "fuzzing" in done.stdout.lower()
