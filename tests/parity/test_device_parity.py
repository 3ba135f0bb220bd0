"""On every device the graphs of an artifact say the same: encoders and the re-ranker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.models.encoder import Encoder
from hivlp.models.levels import Modality
from hivlp.models.runtime.loading import load_encoders, load_reranker
from hivlp.models.runtime.providers import Device
from tests.tiny_artifact import COLOURS, agreement, make_tiny_artifact, solid

TEXTS = ["red", "a picture of something blue and green", "a"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_artifact(tmp_path_factory.mktemp("artifact"), reranker="same")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("modality", ["text", "image"])
def test_every_level_is_what_an_item_alone_gets_on_a_cpu(
    folder: Path, device: Device, modality: Modality
) -> None:
    items = TEXTS if modality == "text" else [solid(colour) for colour in COLOURS]
    alone, here = tower(folder, modality, "cpu"), tower(folder, modality, device)
    together = list(here.encode(here.prepare(items)))
    for row, item in enumerate(items):
        for output, batched in zip(alone.encode(alone.prepare([item])), together, strict=True):
            np.testing.assert_allclose(batched.vectors[row], output.vectors[0], atol=1e-4)


def tower(folder: Path, modality: Modality, device: Device) -> Encoder[Any]:
    """An opened tower of the artifact."""
    encoders = load_encoders(folder, device=device)
    found: Encoder[Any] | None = encoders.text if modality == "text" else encoders.image
    assert found is not None
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_score_as_they_should(folder: Path, device: Device) -> None:
    reranker = load_reranker(folder, device=device)
    assert reranker is not None
    found = reranker.score("red", [solid(colour) for colour in COLOURS], searched="image")
    wanted = [agreement("red", value) for value in COLOURS.values()]
    np.testing.assert_allclose(found, wanted, atol=1e-3)
