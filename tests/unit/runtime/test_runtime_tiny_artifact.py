"""The tiny artifact that other tests build on is real, deterministic, and means what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from hivlp.models.artifact import Artifact
from tests.tiny_artifact import make_tiny_artifact


def test_same_arguments_write_the_same_bytes(tmp_path: Path) -> None:
    first = Artifact.open(make_tiny_artifact(tmp_path / "a"))
    second = Artifact.open(make_tiny_artifact(tmp_path / "b"))
    assert first.manifest == second.manifest


@pytest.mark.parametrize("dims", [(4,), (8, 16), (8, 16, 32, 64)])
def test_dims_set_the_stages(tmp_path: Path, dims: tuple[int, ...]) -> None:
    artifact = Artifact.open(make_tiny_artifact(tmp_path, dims=dims))
    for tower in artifact.manifest.towers:
        assert tuple(spec.dim for spec in tower.levels) == dims


def test_seed_changes_the_space(tmp_path: Path) -> None:
    spaces = {
        Artifact.open(make_tiny_artifact(tmp_path / str(seed), seed=seed)).manifest.gallery_space
        for seed in range(3)
    }
    assert len(spaces) == 3
