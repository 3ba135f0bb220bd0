"""The embedding cache gives back what it was given, and survives what may happen to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hivlp.index.build.embeddings import EmbeddingCache, content_key
from hivlp.index.errors import BuildError
from tests.fakes import SPACE, unit_vectors


def test_what_was_put_is_found_again_in_any_order(tmp_path: Path) -> None:
    vectors = unit_vectors(1_200, 8)
    keys = [content_key("text", b"%d" % i) for i in range(1_200)]
    with EmbeddingCache(tmp_path, SPACE, 8) as cache:
        cache.put(keys, vectors)
    with EmbeddingCache(tmp_path, SPACE, 8) as cache:
        order = np.random.default_rng(0).permutation(1_200)
        np.testing.assert_array_equal(cache.get([keys[i] for i in order]), vectors[order])
        new = content_key("text", b"new")
        assert cache.missing([keys[3], new, keys[4], new]) == [new]
        assert cache.missing([]) == []
        assert cache.get([]).shape == (0, 8)


def test_a_content_of_another_modality_is_another_key() -> None:
    assert content_key("text", b"x") != content_key("image", b"x")


def test_an_absent_key_is_an_error(tmp_path: Path) -> None:
    with (
        EmbeddingCache(tmp_path, SPACE, 8) as cache,
        pytest.raises(BuildError, match="an embedding is gone"),
    ):
        cache.get([b"nobody"])


def test_another_width_is_an_error(tmp_path: Path) -> None:
    with EmbeddingCache(tmp_path, SPACE, 8) as cache:
        cache.put([b"a"], unit_vectors(1, 8))
    with (
        EmbeddingCache(tmp_path, SPACE, 4) as cache,
        pytest.raises(BuildError, match="another width"),
    ):
        cache.get([b"a"])


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / f"{SPACE}.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(BuildError, match=r"\.sqlite"):
        EmbeddingCache(tmp_path, SPACE, 8)


def test_spaces_do_not_mix(tmp_path: Path) -> None:
    with EmbeddingCache(tmp_path, SPACE, 8) as cache:
        cache.put([b"a"], unit_vectors(1, 8))
    with EmbeddingCache(tmp_path, "7" * 64, 8) as cache:
        assert cache.missing([b"a"]) == [b"a"]


def _bytes_of(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


@pytest.mark.parametrize("journal", ["delete", "wal", "persist"])
def test_forgotten_vectors_are_in_no_file(tmp_path: Path, journal: str) -> None:
    """In random order and of a size that needs overflow pages, so that SQLite moves cells about."""
    vectors = unit_vectors(240, 768)
    keys = [content_key("text", b"%d" % i) for i in range(240)]
    with EmbeddingCache(tmp_path, SPACE, 768) as cache:
        cache._base.execute(f"PRAGMA journal_mode = {journal}")
        for start in range(0, 240, 32):
            cache.put(keys[start : start + 32], vectors[start : start + 32])
        gone, kept = range(0, 240, 3), range(1, 240, 3)
        pieces = [vectors[i].tobytes()[at : at + 48] for i in gone for at in range(0, 3072, 1024)]
        assert all(piece in _bytes_of(tmp_path) for piece in pieces)
        assert cache.forget([keys[i] for i in gone]) == len(gone)
        assert cache.forget([keys[0]]) == 0
        assert cache.missing(keys) == [keys[i] for i in gone]
        np.testing.assert_array_equal(cache.get([keys[i] for i in kept]), vectors[list(kept)])
        left = _bytes_of(tmp_path)  # while the file is open: no log and no journal of it is kept
        assert not [piece for piece in pieces if piece in left]
        assert not [i for i in gone if keys[i] in left]
        assert vectors[1].tobytes()[:48] in left


def test_vectors_that_are_being_written_by_another_cannot_be_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.index.build.embeddings.WAIT_S", 0.05)
    with EmbeddingCache(tmp_path, SPACE, 8) as cache, EmbeddingCache(tmp_path, SPACE, 8) as other:
        cache.put([b"a"], unit_vectors(1, 8))
        other._base.execute("BEGIN IMMEDIATE")
        with pytest.raises(BuildError, match="can't be removed"):
            cache.forget([b"a"])
        other._base.rollback()
        assert cache.forget([b"a"]) == 1


def test_what_an_older_file_keeps_in_its_free_space_goes_too(tmp_path: Path) -> None:
    vectors = unit_vectors(40, 768)
    with EmbeddingCache(tmp_path, SPACE, 768) as cache:
        cache._base.execute("PRAGMA secure_delete = OFF")
        cache.put([b"%d" % i for i in range(40)], vectors)
        with cache._base:
            cache._base.execute("DELETE FROM vectors WHERE key != ?", (b"0",))
    pieces = [vectors[i].tobytes()[1024:1072] for i in range(1, 40)]
    assert any(piece in _bytes_of(tmp_path) for piece in pieces)
    with EmbeddingCache(tmp_path, SPACE, 768) as cache:
        assert cache.forget([]) == 0
        assert not [piece for piece in pieces if piece in _bytes_of(tmp_path)]
        np.testing.assert_array_equal(cache.get([b"0"]), vectors[:1])
