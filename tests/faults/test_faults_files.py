"""Every file of a snapshot, cut short, changed, missing, or one too many: the last good one serves.

Opened as a server does, without hashing what is large, and then scrubbed: a changed byte is found
by one or the other, and the file is named.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hivlp.index.errors import SnapshotCorrupt
from hivlp.index.snapshot.scrub import Scrubber
from hivlp.index.snapshot.store import SnapshotStore
from tests.faults.spoilt import FILES, KINDS, SPOIL, files_of, finds_itself, publish

SEEDS = (10, 20)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("whole")
    for name in FILES:
        for seed in SEEDS:
            publish(SnapshotStore(home), name, seed)
    return home


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> SnapshotStore:
    """Two versions of each index, to be spoilt."""
    shutil.copytree(whole / "indexes", tmp_path / "indexes")
    return SnapshotStore(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_these_are_all_the_files(store: SnapshotStore, name: str) -> None:
    assert files_of(store.path(name, store.current(name))) == sorted(FILES[name])


@pytest.mark.parametrize("how", SPOIL)
@pytest.mark.parametrize(("name", "file"), KINDS)
def test_the_version_before_serves_and_the_file_is_named(
    store: SnapshotStore, name: str, file: str, how: str
) -> None:
    good, bad = store.versions(name)
    SPOIL[how](store.path(name, bad) / file)
    named = f"{file}.extra" if how == "extra" else file
    snapshot, passed = store.open_last_good(name, hash_up_to_bytes=0)
    if snapshot.manifest.version == bad:
        assert how == "flipped"  # everything else is seen without hashing
        told: list[tuple[str, str, str]] = []
        scrub = Scrubber(
            store,
            hash_up_to_bytes=0,
            bytes_per_s=float(1 << 40),
            on_corrupt=lambda *found: told.append(found),
        )
        scrub.watch(name, bad)
        assert scrub.wait_idle(60)
        scrub.close()
        assert told == [(name, bad, named)]
        snapshot.close()
        snapshot, passed = store.open_last_good(name, hash_up_to_bytes=0)
    assert snapshot.manifest.version == good
    assert [(entry.version, entry.file) for entry in passed] == [(bad, named)]
    assert finds_itself(snapshot, SEEDS[0])
    snapshot.close()
    assert store.current(name) == bad


@pytest.mark.parametrize("how", SPOIL)
def test_every_damage_of_every_file_is_found_by_verifying(store: SnapshotStore, how: str) -> None:
    for name, file in KINDS:
        version = store.current(name)
        folder = store.path(name, version)
        copy = folder.parent / "copy"
        shutil.copytree(folder, copy)
        SPOIL[how](folder / file)
        with pytest.raises(SnapshotCorrupt, match=file.replace(".", r"\.")):
            store.verify(name, version)
        shutil.rmtree(folder)
        copy.rename(folder)
    for name in FILES:
        store.verify(name)
