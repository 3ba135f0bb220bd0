"""A store that nobody can write to: searched, listed, leased and checked; never changed.

As root, whom no permission stops, on a file system mounted read-only; else in folders without the
permission to write.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from hivlp.index.errors import NoGoodVersion, SnapshotQuarantined
from hivlp.index.snapshot.pull import pull, push
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.service.app import create_app
from hivlp.service.main import main
from hivlp.service.settings import Settings
from tests.fakes import unit_vectors, write_snapshot
from tests.faults.mounts import remount, tmpfs
from tests.integration.served_home import make_corpus, make_home
from tests.unit.service.serving_app import serving

ROWS = "image/rows.npy"


def publish(store: SnapshotStore, seed: int) -> str:
    return write_snapshot(store, images=unit_vectors(10, 16, seed))


def spoil(store: SnapshotStore, version: str) -> None:
    file = store.path("default", version) / ROWS
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


class Sealable:
    """A home that can be made read-only once it is filled."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def seal(self) -> None:
        if os.geteuid() == 0:
            remount(self.home.parent, "ro")
        else:
            for path in (self.home, *self.home.rglob("*")):
                path.chmod(path.stat().st_mode & ~0o222)

    def unseal(self) -> None:
        if os.geteuid() == 0:
            remount(self.home.parent, "rw")
        else:
            for path in (self.home, *self.home.rglob("*")):
                path.chmod(path.stat().st_mode | stat.S_IWUSR)


@pytest.fixture
def sealable(tmp_path: Path) -> Iterator[Sealable]:
    if os.geteuid() == 0:
        with tmpfs(tmp_path / "mount", 64 << 20) as folder:
            made = Sealable(folder / "home")
            yield made
            made.unseal()
            return
    made = Sealable(tmp_path / "home")
    yield made
    made.unseal()


def test_it_really_is_read_only(sealable: Sealable) -> None:
    publish(SnapshotStore(sealable.home), 0)
    sealable.seal()
    with pytest.raises(OSError, match=r"Read-only|denied"):
        (sealable.home / "indexes" / "x").write_text("x")


def test_versions_are_opened_leased_listed_and_verified(sealable: Sealable) -> None:
    store = SnapshotStore(sealable.home)
    first, second = publish(store, 0), publish(store, 1)
    sealable.seal()
    snapshot = store.open("default")
    assert store.in_use("default", second)
    assert not store.in_use("default", first)
    snapshot.close()
    assert not store.in_use("default", second)
    assert [entry.version for entry in store.listing("default")] == [first, second]
    assert store.verify("default").version == second
    report = store.gc("default", keep=1, older_than=timedelta(0), dry_run=True)
    assert [gone.name for gone in report.removed] == [first]


def test_what_would_change_it_fails_and_changes_nothing(sealable: Sealable, tmp_path: Path) -> None:
    store, other = SnapshotStore(sealable.home), SnapshotStore(tmp_path / "other")
    publish(other, 3)
    first, second = publish(store, 0), publish(store, 1)
    before = sorted(sealable.home.rglob("*"))
    sealable.seal()
    for attempt in (
        lambda: store.activate("default", first),
        lambda: store.rollback("default"),
        lambda: store.gc("default", keep=1),
        lambda: store.remove("default", first),
        lambda: publish(store, 2),
        lambda: pull(store, str(other.root), "default", quiet=True),
    ):
        with pytest.raises(OSError, match=r"Read-only|denied"):
            attempt()
    assert store.history("default") == [first, second]
    assert sorted(sealable.home.rglob("*")) == before


def test_the_command_says_it_in_a_line(
    sealable: Sealable, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(SnapshotStore(sealable.home), 0)
    publish(SnapshotStore(sealable.home), 1)
    sealable.seal()
    assert main(["snapshots", "rollback", "--home", str(sealable.home)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "Read-only" in line or "denied" in line


def test_the_last_good_version_serves_and_the_log_says_that_only_this_process_knows(
    sealable: Sealable, caplog: pytest.LogCaptureFixture
) -> None:
    store = SnapshotStore(sealable.home)
    first, second = publish(store, 0), publish(store, 1)
    spoil(store, second)
    sealable.seal()
    snapshot, passed = store.open_last_good("default")
    assert snapshot.manifest.version == first
    assert [entry.version for entry in passed] == [second]
    assert "only this process knows" in caplog.text
    assert [entry.version for entry in store.quarantine("default").entries()] == [second]
    assert not (store.folder("default") / "QUARANTINE").exists()
    with pytest.raises(SnapshotQuarantined):
        store.activate("default", second)


def test_where_no_version_is_whole_each_is_named(sealable: Sealable) -> None:
    store = SnapshotStore(sealable.home)
    versions = [publish(store, seed) for seed in (0, 1)]
    for version in versions:
        spoil(store, version)
    sealable.seal()
    with pytest.raises(NoGoodVersion) as error:
        store.open_last_good("default")
    assert all(f"{version}: {ROWS}" in str(error.value) for version in versions)


def test_it_can_be_pushed_and_pulled_from(sealable: Sealable, tmp_path: Path) -> None:
    store = SnapshotStore(sealable.home)
    version = publish(store, 0)
    sealable.seal()
    other = SnapshotStore(tmp_path / "other")
    assert pull(other, str(store.root), "default", quiet=True).version == version
    assert push(store, str(tmp_path / "bucket"), "default", quiet=True).version == version


def test_a_server_answers_from_it(sealable: Sealable, tmp_path: Path) -> None:
    home = make_home(tmp_path / "made", make_corpus(tmp_path / "corpus"))
    shutil.copytree(home, sealable.home)
    sealable.seal()
    with serving(create_app(Settings(home=sealable.home))) as client:
        found = client.post("/search/text", json={"query": "a red square", "k": 1}).json()
    assert found["hits"][0]["id"].startswith("red/")
