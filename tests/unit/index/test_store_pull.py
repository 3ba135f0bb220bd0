"""Pulling and pushing: whole or not at all, nothing fetched twice, nothing led astray."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from hivlp.index.errors import (
    SnapshotCorrupt,
    SnapshotError,
    SnapshotMissing,
    SnapshotQuarantined,
)
from hivlp.index.snapshot import remote as remote_module
from hivlp.index.snapshot.manifest import MANIFEST_NAME, SnapshotManifest
from hivlp.index.snapshot.pull import PullReport, pull, push
from hivlp.index.snapshot.remote import Remote
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.artifact import UNSEALED, FileRecord, sealed_json
from hivlp.models.errors import InputError, MissingExtra
from tests.fakes import unit_vectors, write_snapshot

ROWS = "image/rows.npy"
Place = Callable[..., str]


@pytest.fixture
def origin(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "origin")


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return SnapshotStore(tmp_path / "here")


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where versions are pushed to and pulled from."""
    if request.param == "folder":
        yield str(tmp_path / "bucket" / "indexes")
        return
    yield "memory://bucket/indexes"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def publish(store: SnapshotStore, seed: int = 0, **options: bool) -> str:
    return write_snapshot(store, images=unit_vectors(10, 16, seed), **options)


def fetch(store: SnapshotStore, source: str, **options: Any) -> PullReport:
    return pull(store, source, "default", options.pop("version", None), quiet=True, **options)


def change(place: str, name: str, edit: Callable[[bytes], bytes | None]) -> None:
    """Edit or remove a file there."""
    files, root = fsspec.core.url_to_fs(f"{place}/default/{name}")
    data = edit(files.cat_file(root))
    files.rm_file(root)
    if data is not None:
        files.pipe_file(root, data)


def visible(store: SnapshotStore) -> list[str]:
    folder = store.folder("default")
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_what_was_pushed_is_pulled_verified_and_active(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    version = publish(origin)
    sent = push(origin, place, "default", quiet=True)
    done = fetch(store, place)
    size = sum(record.size_bytes for record in origin.manifest("default").files.values())
    assert (sent.version, sent.sent_bytes, sent.kept_bytes) == (version, size, 0)
    assert (done.version, done.fetched_bytes, done.already, done.active) == (
        version, size, False, True,
    )  # fmt: skip
    store.verify("default")
    assert store.current("default") == version
    assert visible(store) == sorted([".lock", "CURRENT", version])


def test_a_store_can_be_pulled_from_as_it_is(origin: SnapshotStore, store: SnapshotStore) -> None:
    first, second = publish(origin), publish(origin, 1)
    assert fetch(store, str(origin.root)).version == second
    assert fetch(store, str(origin.root), version=first, activate=False).active is False
    assert store.versions("default") == [first, second]
    assert store.current("default") == second


def test_doing_either_twice_is_fine_and_says_so(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    first = publish(origin)
    push(origin, place, "default", quiet=True)
    again = push(origin, place, "default", quiet=True)
    assert again.sent_bytes == 0
    assert again.kept_bytes > 0
    fetch(store, place, activate=False)
    assert fetch(store, place, activate=False) == PullReport("default", first, True, False)
    assert fetch(store, place) == PullReport("default", first, True, True)
    assert fetch(store, place) == PullReport("default", first, True, True)
    assert store.history("default") == [first]


def test_files_of_a_local_version_are_linked_not_fetched(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    first = publish(origin)
    push(origin, place, "default", quiet=True)
    fetch(store, place)
    second = publish(origin)  # the same vectors
    push(origin, place, "default", quiet=True)
    done = fetch(store, place)
    assert (done.version, done.fetched_bytes) == (second, 0)
    assert done.linked_bytes > 0
    ours, theirs = (store.path("default", version) / ROWS for version in (first, second))
    assert ours.stat().st_ino == theirs.stat().st_ino
    store.verify("default", second)


def test_a_local_file_that_is_damaged_is_fetched_and_never_written_to(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    first = publish(origin)
    push(origin, place, "default", quiet=True)
    fetch(store, place)
    ours = store.path("default", first) / ROWS
    damaged = ours.read_bytes()[:-1] + b"\x01"
    ours.write_bytes(damaged)
    second = publish(origin)
    push(origin, place, "default", quiet=True)
    done = fetch(store, place)
    assert done.fetched_bytes == ours.stat().st_size
    store.verify("default", second)
    assert ours.read_bytes() == damaged


@pytest.mark.parametrize("edit", ["truncated", "longer", "flipped", "missing"])
@pytest.mark.parametrize("name", [ROWS, "items.arrow", MANIFEST_NAME])
def test_a_file_that_is_wrong_there_is_named_and_nothing_is_visible(
    origin: SnapshotStore, store: SnapshotStore, place: str, name: str, edit: str
) -> None:
    version = publish(origin)
    push(origin, place, "default", quiet=True)
    edits: dict[str, Callable[[bytes], bytes | None]] = {
        "truncated": lambda data: data[:-10],
        "longer": lambda data: data + b"x",
        "flipped": lambda data: data[:-40] + bytes([data[-40] ^ 1]) + data[-39:],
        "missing": lambda data: None,
    }
    change(place, f"{version}/{name}", edits[edit])
    with pytest.raises(SnapshotError, match=name.replace(".", r"\.")):
        fetch(store, place)
    assert store.versions("default") == []
    assert store.names() == []
    assert set(visible(store)) <= {".lock", f".pulling-{version}"}


def test_a_pull_goes_on_where_the_one_before_stopped(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    version = publish(origin)
    push(origin, place, "default", quiet=True)
    whole: list[bytes] = []

    def cut(data: bytes) -> bytes:
        whole.append(data)
        return data[:100]

    last = list(origin.manifest("default").files)[-1]
    change(place, f"{version}/{last}", cut)
    with pytest.raises(SnapshotCorrupt, match=rf"{last}: in .*: 100 bytes of {len(whole[0])}"):
        fetch(store, place)
    stray = store.folder("default") / f".pulling-{version}" / "stray"
    stray.write_text("x")
    change(place, f"{version}/{last}", lambda _: whole[0])
    done = fetch(store, place)
    assert done.fetched_bytes == len(whole[0])
    assert done.kept_bytes > 0
    store.verify("default", version)


class Cut(io.RawIOBase):
    """A connection that breaks after some bytes."""

    def __init__(self, data: bytes) -> None:
        self._left = [data]

    def read(self, size: int = -1) -> bytes:
        if not self._left:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        return self._left.pop()


def test_a_connection_that_breaks_names_the_file_and_leaves_nothing_visible(
    origin: SnapshotStore, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(origin)
    push(origin, "memory://bucket/indexes", "default", quiet=True)
    real = MemoryFileSystem.open

    def breaks(self: Any, path: str, mode: str = "rb", **options: Any) -> Any:
        return Cut(b"some") if path.endswith(ROWS) else real(self, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "open", breaks)
    with pytest.raises(
        SnapshotError, match=r"memory://bucket/indexes/default/.*/image/rows\.npy: "
    ):
        fetch(store, "memory://bucket/indexes")
    assert store.versions("default") == []
    MemoryFileSystem.store.clear()


def hostile(origin: SnapshotStore, place: str, version: str, name: str) -> None:
    """A manifest that is well sealed and names a file where none may be."""
    manifest = origin.manifest("default", version)
    files = {**manifest.files, name: FileRecord(sha256="0" * 64, size_bytes=1)}
    bad: SnapshotManifest = manifest.model_copy(update={"files": files, "seal": UNSEALED})
    change(place, f"{version}/{MANIFEST_NAME}", lambda _: sealed_json(bad))


@pytest.mark.parametrize(
    "name",
    ["../up", "a/../../up", "/etc/passwd", "..", ".", "", "a\\b", "..\\up", "a//b", "./a", "a/",
     "C:/x", "x\0y", MANIFEST_NAME],
)  # fmt: skip
def test_a_name_that_leads_out_of_the_folder_is_refused(
    origin: SnapshotStore, store: SnapshotStore, place: str, name: str, tmp_path: Path
) -> None:
    version = publish(origin)
    push(origin, place, "default", quiet=True)
    hostile(origin, place, version, name)
    before = sorted(path for path in tmp_path.rglob("up"))
    with pytest.raises(SnapshotCorrupt, match="leads out of the snapshot"):
        fetch(store, place)
    assert store.versions("default") == []
    assert sorted(path for path in tmp_path.rglob("up")) == before


@pytest.mark.parametrize("name", ["CURRENT", MANIFEST_NAME])
def test_a_pointer_or_manifest_without_end_is_not_read_to_its_end(
    origin: SnapshotStore,
    store: SnapshotStore,
    place: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    version = publish(origin)
    push(origin, place, "default", quiet=True)
    whole = name if name == "CURRENT" else f"{version}/{name}"
    change(place, whole, lambda data: data + b" " * 20_000)
    monkeypatch.setattr(remote_module, "MOST_BYTES", 10_000)
    with pytest.raises(SnapshotError, match=rf"{name} has more than 10000 bytes"):
        fetch(store, place, version=None if name == "CURRENT" else version)


def test_a_foreign_version_name_is_refused(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    publish(origin)
    push(origin, place, "default", quiet=True)
    for version in ("..", "../other", "", "latest", "99999999T999999-999999"):
        with pytest.raises(SnapshotMissing, match="is no version"):
            fetch(store, place, version=version)
    change(place, "CURRENT", lambda _: json.dumps({"history": ["../../etc"]}).encode())
    with pytest.raises(SnapshotError, match="unreadable pointer in"):
        fetch(store, place)
    assert visible(store) == []


def test_an_index_that_is_not_there_is_named_with_those_that_are(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    publish(origin)
    push(origin, place, "default", quiet=True)
    with pytest.raises(SnapshotMissing, match=r"'other'.*indexes there: default"):
        pull(store, place, "other", quiet=True)
    with pytest.raises(InputError, match="no index name"):
        pull(store, place, "../default", quiet=True)


def test_a_version_of_another_index_is_refused(
    origin: SnapshotStore, store: SnapshotStore, tmp_path: Path
) -> None:
    publish(origin)
    (origin.root / "default").rename(origin.root / "other")
    with pytest.raises(SnapshotCorrupt, match="belongs to index 'default'"):
        pull(store, str(origin.root), "other", quiet=True)


def test_a_version_that_is_half_pushed_is_not_what_others_pull(
    origin: SnapshotStore, store: SnapshotStore, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = publish(origin)
    push(origin, place, "default", quiet=True)
    second = publish(origin, 1)
    real = Remote.put
    order: list[str] = []

    def dies(self: Remote, source: Path, name: str, *parts: str) -> None:
        order.append(parts[-1])
        if parts[-1] == MANIFEST_NAME:
            raise SnapshotError(name, parts[0], "the network is gone")
        real(self, source, name, *parts)

    monkeypatch.setattr(Remote, "put", dies)
    with pytest.raises(SnapshotError, match="network is gone"):
        push(origin, place, "default", quiet=True)
    monkeypatch.undo()
    assert order[-1] == MANIFEST_NAME
    assert fetch(store, place).version == first
    again = push(origin, place, "default", quiet=True)
    assert again.sent_bytes == 0
    assert fetch(store, place).version == second


def test_a_file_of_the_right_size_that_is_wrong_there_is_sent_again(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    version = publish(origin)
    push(origin, place, "default", quiet=True)
    change(place, f"{version}/{ROWS}", lambda data: bytes(len(data)))
    again = push(origin, place, "default", quiet=True)
    assert again.sent_bytes == (origin.path("default", version) / ROWS).stat().st_size
    fetch(store, place)


def test_what_is_corrupt_or_quarantined_is_not_pushed(origin: SnapshotStore, place: str) -> None:
    first, second = publish(origin), publish(origin, 1)
    rows = origin.path("default", second) / ROWS
    rows.write_bytes(rows.read_bytes()[:-1] + b"\x01")
    origin.quarantine("default").add(first, ROWS, "spoilt")
    with pytest.raises(SnapshotCorrupt, match=r"rows\.npy"):
        push(origin, place, "default", quiet=True)
    with pytest.raises(SnapshotQuarantined):
        push(origin, place, "default", first, quiet=True)
    assert Remote.at(place).names() == []


def test_pushing_without_activating_leaves_the_pointer_there(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    first = publish(origin)
    push(origin, place, "default", quiet=True)
    second = publish(origin, 1)
    push(origin, place, "default", activate=False, quiet=True)
    assert Remote.at(place).history("default") == [first]
    assert fetch(store, place, version=second).version == second


def test_two_pulls_of_one_version_do_not_meet(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    version = publish(origin)
    push(origin, place, "default", quiet=True)
    with (
        store.stage_pull("default", version),
        pytest.raises(SnapshotError, match="another process"),
    ):
        fetch(store, place)
    assert fetch(store, place).version == version


def test_a_version_quarantined_here_is_not_activated_by_pulling_it_again(
    origin: SnapshotStore, store: SnapshotStore, place: str
) -> None:
    first, second = publish(origin), publish(origin, 1)
    for version in (first, second):
        push(origin, place, "default", version, quiet=True)
        fetch(store, place)
    store.quarantine("default").add(first, ROWS, "spoilt")
    with pytest.raises(SnapshotQuarantined):
        fetch(store, place, version=first)


@pytest.mark.parametrize(("url", "extra"), [("s3://bucket/x", "s3"), ("gs://bucket/x", "gcs")])
def test_a_store_whose_client_is_absent_names_the_extra(
    store: SnapshotStore, url: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(url: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(remote_module.fsspec.core, "url_to_fs", absent)
    with pytest.raises(MissingExtra, match=rf"hivlp\[{extra}\]"):
        fetch(store, url)


def test_a_protocol_nobody_knows_is_an_error_of_the_source(store: SnapshotStore) -> None:
    with pytest.raises(InputError, match="nonsense://"):
        fetch(store, "nonsense://bucket")


def test_bytes_come_from_the_disk_only_once_they_are_flushed(
    origin: SnapshotStore, store: SnapshotStore, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = publish(origin)
    push(origin, place, "default", quiet=True)
    flushed: list[str] = []
    real = remote_module.sync

    def note(path: Path) -> None:
        flushed.append(path.name)
        real(path)

    monkeypatch.setattr("hivlp.index.snapshot.durable.sync", note)
    fetch(store, place)
    files = {Path(name).name for name in store.manifest("default", version).files}
    assert files <= set(flushed)


def test_secrets_of_a_url_are_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "memory://robot:hunter2@bucket/indexes?sig=abcdef"
    remote = Remote.at(url)
    assert remote.url == "memory://...@bucket/indexes?..."

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(f"403 for {url}: robot, hunter2, abcdef")

    monkeypatch.setattr(MemoryFileSystem, "open", refused)
    with pytest.raises(SnapshotError) as caught:
        remote.history("default")
    with pytest.raises(InputError) as unknown:
        Remote.at("nothing://robot:hunter2@bucket/x")
    for said in (str(caught.value), str(unknown.value)):
        assert "...@bucket" in said
        assert not any(secret in said for secret in ("robot", "hunter2", "abcdef"))
