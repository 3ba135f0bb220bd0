"""Reports of users of services like this one (docs/field-reports.md) that no other test is about,
over a real model, a real index and real HTTP.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.model import Model
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.encoder import EncoderBatch
from hivlp.models.runtime.onnx_encoder import OnnxEncoder
from hivlp.service.app import create_app
from hivlp.service.loading import load_catalogue
from hivlp.service.settings import CacheSettings, ChangeSettings, Settings
from tests.integration.served_home import colour_png, make_corpus, make_home
from tests.tiny_artifact import COLOURS, make_tiny_artifact, png, solid
from tests.unit.service.pictures_service import noisy_jpeg
from tests.unit.service.serving_app import serving

# In scripts without spaces, from right to left, beyond the first 65,536 characters, and composed.
SCRIPTS = {"hebrew": "שלום", "arabic": "مرحبا", "japanese": "漢字", "emoji": "🧡", "hindi": "नमस्ते"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    return make_home(tmp_path_factory.mktemp("home"), corpus)


@pytest.fixture(scope="module")
def client(home: Path) -> Iterator[httpx.Client]:
    with serving(create_app(Settings(home=home, cache=CacheSettings(max_bytes=0)))) as client:
        yield client


def late_broken_png() -> bytes:
    """Opens, and fails in its data."""
    data = bytearray(png(solid("red", (90, 90))))
    place = data.index(b"IDAT") + 8
    data[place : place + 8] = b"\xff" * 8
    return bytes(data)


BAD = {
    "late error": late_broken_png(),
    "cut short": noisy_jpeg()[:-200],
    "nothing": b"",
    "text": b"no picture",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
}


@pytest.mark.parametrize("kind", [*BAD, "one pixel"])
def test_whatever_picture_came_before_the_next_one_is_answered(
    client: httpx.Client, kind: str
) -> None:
    data = BAD[kind] if kind in BAD else png(solid("red", (1, 1)))
    for _ in range(3):  # more often than there are workers
        answer = client.post("/search/image", files={"image": ("photo.jpg", data)})
        expected = {200} if kind == "one pixel" else {415, 422}
        assert answer.status_code in expected, answer.text
    found = client.post("/search/image", files={"image": colour_png("green")}, data={"k": "1"})
    assert found.json()["hits"][0]["id"].startswith("green/")
    assert client.get("/readyz").status_code == 200


def test_words_of_every_script_find_their_own_captions(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.png").write_bytes(png(solid("red")))
    rows = [
        {"id": name, "file_name": "a.png", "captions": [word]} for name, word in SCRIPTS.items()
    ]
    (folder / "metadata.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    characters = sorted({char for word in SCRIPTS.values() for char in word})
    words = [*SCRIPTS.values(), *characters, *(f"##{char}" for char in characters)]
    artifact = make_tiny_artifact(tmp_path / "artifacts" / "scripts", words=words)
    store = SnapshotStore(tmp_path)
    build = BuildSettings(quiet=True, sample=20)
    build_index(open_corpus(folder), Model.load(artifact), store, "default", build)
    with serving(create_app(Settings(home=tmp_path))) as client:
        for name, word in SCRIPTS.items():
            body = {"query": f" {word} ", "modality": "text", "k": 1}
            hit = client.post("/search/text", json=body).json()["hits"][0]
            assert (hit["id"], hit["text"]) == (name, word)


def test_both_towers_and_every_side_have_run_before_it_is_ready(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []
    encode = OnnxEncoder.encode

    def noted(self: OnnxEncoder[Any], batch: EncoderBatch) -> Any:
        for output in encode(self, batch):
            ran.append((self.modality, output.level))
            yield output

    monkeypatch.setattr(OnnxEncoder, "encode", noted)
    catalogue = load_catalogue(Settings(home=home))
    for live in catalogue.indexes.values():
        live.close()
    for modality in ("text", "image"):
        levels = [level for ran_modality, level in ran if ran_modality == modality]
        assert set(levels) == {1, 2, 3}
        assert len(levels) >= 2 * 2 * 3  # two sides, two plans


def test_an_index_whose_last_item_went_is_empty_and_says_so(tmp_path: Path, corpus: Path) -> None:
    home = make_home(tmp_path, corpus)
    with serving(create_app(Settings(home=home))) as client:
        for colour in COLOURS:
            for side in (24, 300):
                gone = client.delete(f"/items/{colour}/{side}")
                assert gone.status_code == 200, gone.text
        for path, body in (
            ("text", {"query": "red"}),
            ("text", {"query": "red", "modality": "text", "plan": "exact"}),
            ("vector", {"vector": [1.0] * 32}),
        ):
            answer = client.post(f"/search/{path}", json=body)
            assert answer.status_code == 422, answer.text
            assert "holds no" in answer.json()["error"]["message"]
        assert client.get("/readyz").status_code == 200
        assert client.put("/items/back", json={"texts": ["red"]}).status_code == 200
        body = {"query": "red", "modality": "text"}
        assert client.post("/search/text", json=body).json()["hits"][0]["id"] == "back"


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
def test_fifty_swaps_leave_memory_where_it_was(tmp_path: Path, corpus: Path) -> None:
    """Between two versions with models of their own: graphs are loaded anew each time."""
    home = make_home(tmp_path, corpus)
    store = SnapshotStore(home)
    other = make_tiny_artifact(home / "artifacts" / "other", seed=7)
    build = BuildSettings(quiet=True, sample=20, activate=False)
    build_index(open_corpus(corpus), Model.load(other), store, "default", build)
    versions = store.versions("default")
    settings = Settings(home=home, changes=ChangeSettings(poll_s=0.02, keep_s=0))
    with serving(create_app(settings)) as client:

        def swap(turn: int) -> None:
            version = versions[(turn + 1) % 2]
            store.activate("default", version)
            end = time.monotonic() + 30
            while client.get("/health").json()["indexes"]["default"] != version:
                assert time.monotonic() < end, "it was never served"
                time.sleep(0.005)

        for turn in range(10):  # whatever is made once
            swap(turn)
        gc.collect()
        before = resident_bytes()
        for turn in range(10, 60):
            swap(turn)
        gc.collect()
        assert resident_bytes() < 1.1 * before  # observed 1.00 to 1.02
