"""A server whose active version fails: it starts on the last good one and says so everywhere."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.model import Model
from hivlp.index.errors import NoGoodVersion
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service import loading
from hivlp.service.app import create_app
from hivlp.service.loading import load_catalogue
from hivlp.service.settings import Settings, load_settings
from hivlp.service.state import ServingState
from tests.integration.served_home import make_corpus, make_home
from tests.unit.service.serving_app import serving

ROWS = "text/rows.npy"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with two versions of one index."""
    root = tmp_path_factory.mktemp("serving")
    home = make_home(root / "home", make_corpus(root / "corpus"))
    model = Model.load(home / "artifacts" / "tiny")
    settings = BuildSettings(quiet=True, sample=20)
    build_index(open_corpus(root / "corpus"), model, SnapshotStore(home), "default", settings)
    return home


@pytest.fixture
def store(made: Path, tmp_path: Path) -> SnapshotStore:
    shutil.copytree(made, tmp_path / "home")
    return SnapshotStore(tmp_path / "home")


def flip_last(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def searched(client: httpx.Client) -> str:
    """The version that answers."""
    body = client.post("/search/text", json={"query": "a red square", "k": 1}).json()
    assert body["hits"][0]["id"].startswith("red/")
    return str(body["snapshot"])


def test_it_starts_on_the_last_good_version_and_says_so(
    store: SnapshotStore, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = store.versions("default")
    flip_last(store.path("default", second) / ROWS)
    with serving(create_app(Settings(home=store.home))) as client:
        assert searched(client) == first
        metrics = client.get("/metrics").text
    assert 'hivlp_snapshot_quarantined{index="default"} 1.0' in metrics
    assert f'hivlp_snapshot_info{{index="default",model="tiny",version="{first}"}} 1.0' in metrics
    loud = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert any(second in line and ROWS in line and "NOT SERVED" in line for line in loud)
    assert any(first in line and "last good" in line for line in loud)


def test_a_version_that_was_verified_again_is_served_again(store: SnapshotStore) -> None:
    _, second = store.versions("default")
    file = store.path("default", second) / ROWS
    data = file.read_bytes()
    flip_last(file)
    load_catalogue(Settings(home=store.home, warm=False))
    file.write_bytes(data)
    store.verify("default", second)
    with serving(create_app(Settings(home=store.home))) as client:
        assert searched(client) == second
        assert 'hivlp_snapshot_quarantined{index="default"} 0.0' in client.get("/metrics").text


def test_where_no_version_is_whole_it_is_not_ready_and_names_each(store: SnapshotStore) -> None:
    for version in store.versions("default"):
        flip_last(store.path("default", version) / ROWS)
    with pytest.raises(NoGoodVersion) as error:
        load_catalogue(Settings(home=store.home))
    assert all(version in str(error.value) for version in store.versions("default"))


def test_an_unreadable_pointer_is_logged_and_the_newest_version_serves(
    store: SnapshotStore, caplog: pytest.LogCaptureFixture
) -> None:
    _, second = store.versions("default")
    (store.folder("default") / "CURRENT").write_text("{")
    with serving(create_app(Settings(home=store.home))) as client:
        assert searched(client) == second
    assert any("unreadable pointer" in r.message for r in caplog.records if r.levelname == "ERROR")


def state_of(app: object) -> ServingState:
    state = app.state.hivlp  # type: ignore[attr-defined]
    assert isinstance(state, ServingState)
    return state


def test_damage_that_opening_did_not_see_is_scrubbed_and_the_last_good_version_served_at_once(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "HASH_UP_TO_BYTES", 0)
    first, second = store.versions("default")
    flip_last(store.path("default", second) / ROWS)
    with serving(create_app(Settings(home=store.home, scrub_mib_per_s=1_000))) as client:
        until = time.monotonic() + 60
        while searched(client) != first and time.monotonic() < until:
            time.sleep(0.01)
        assert searched(client) == first
        time.sleep(0.6)  # two more looks at the pointer, which still names the damaged one
        assert searched(client) == first
        metrics = client.get("/metrics").text
    assert 'hivlp_scrub_failures_total{index="default"} 1.0' in metrics
    assert 'hivlp_snapshot_quarantined{index="default"} 1.0' in metrics
    with serving(create_app(Settings(home=store.home))) as client:
        assert searched(client) == first


def test_what_changed_upon_a_version_found_damaged_holds_upon_the_last_good_one(
    store: SnapshotStore,
) -> None:
    first, second = store.versions("default")
    app = create_app(Settings(home=store.home, scrub_mib_per_s=0))
    with serving(app) as client:
        item = client.post("/search/text", json={"query": "red", "k": 1}).json()["hits"][0]["id"]
        client.delete(f"/items/{quote(item, safe='')}").raise_for_status()
        client.put("/items/late", json={"texts": ["late riser"]}).raise_for_status()
        flip_last(store.path("default", second) / ROWS)
        state_of(app).scrubbing.on_corrupt("default", second, ROWS)
        assert client.get(f"/items/{quote(item, safe='')}").status_code == 404
        assert client.get("/items/late").status_code == 200
        assert client.put("/items/more", json={"texts": ["more"]}).status_code == 200
        manifest = store.manifest("default")
        assert manifest.changes is not None
        assert manifest.changes.since == first


def test_scrubbing_can_be_turned_off(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "HASH_UP_TO_BYTES", 0)
    monkeypatch.setenv("HIVLP_SCRUB_MIB_PER_S", "0")
    _, second = store.versions("default")
    flip_last(store.path("default", second) / ROWS)
    with serving(create_app(load_settings(home=store.home))) as client:
        assert searched(client) == second
        assert 'hivlp_scrub_failures_total{index="default"} 0.0' in client.get("/metrics").text
    assert store.quarantine("default").entries() == []
