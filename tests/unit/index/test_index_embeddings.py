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
