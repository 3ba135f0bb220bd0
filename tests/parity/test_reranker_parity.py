"""An exported re-ranker against torch, from texts and pictures to probabilities."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hivlp.models.artifact import Artifact
from hivlp.models.errors import TrainingError
from hivlp.models.network.bert import load_bert
from hivlp.models.network.cross_modal import CrossModalEncoder, CrossModalShape
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.network.tower import Tower, freeze
from hivlp.models.network.vision import VisionShape, VisionTower
from hivlp.models.runtime.loading import load_encoders, load_reranker
from hivlp.models.runtime.onnx_reranker import OnnxReranker
from hivlp.models.training.export import ExportNote, export_model
from hivlp.models.training.export_reranker import RerankerParityError, check_reranker
from hivlp.models.training.parity import TOLERANCE
from tests.unit.models_training.checkpoints import WIDTH, TinyVision, make_bert

PIXELS, PATCH, IMAGE_WIDTH = 12, 4, 20
SHAPE = CrossModalShape(depth=2, width=24, heads=4, text=WIDTH, image=IMAGE_WIDTH)
TEXTS = ["a red square", "blue", "a picture of a green square"]


def _exits(tower: Tower) -> TowerExits:
    head = ExitHead(HeadShape(tower.width(tower.depth), 8, 8, hidden=4))
    return TowerExits(freeze(tower), (tower.depth,), [head]).eval()


def _louder(module: torch.nn.Module) -> None:
    """Weights large enough that every part is heard."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_(std=0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DualEncoder:
    folder = tmp_path_factory.mktemp("towers")
    torch.manual_seed(0)
    text = _exits(load_bert(make_bert(folder / "bert")))
    shape = VisionShape(depth=2, width=IMAGE_WIDTH, heads=4, image_size=PIXELS, patch=PATCH)
    vision = VisionTower(shape)
    _louder(vision)
    return DualEncoder(text, _exits(vision), "nested")


@pytest.fixture(scope="module")
def cross() -> CrossModalEncoder:
    torch.manual_seed(1)
    made = CrossModalEncoder(SHAPE).eval()
    _louder(made)
    return made


@pytest.fixture(scope="module")
def artifact(
    tmp_path_factory: pytest.TempPathFactory, model: DualEncoder, cross: CrossModalEncoder
) -> Artifact:
    folder = tmp_path_factory.mktemp("exported") / "artifact"
    return export_model(model, folder, ExportNote("small"), cross)


def _opened(artifact: Artifact) -> OnnxReranker:
    found = load_reranker(artifact)
    assert found is not None
    return found


def _pictures(n: int) -> list[NDArray[np.uint8]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8) for _ in range(n)]


def _by_torch(model: DualEncoder, cross: CrossModalEncoder, artifact: Artifact) -> torch.Tensor:
    """(texts, pictures) probabilities, one pair at a time and each text without padding."""
    towers = load_encoders(artifact.path)
    assert towers.text is not None
    assert towers.image is not None
    rows = []
    for text in TEXTS:
        inputs = {k: torch.tensor(v) for k, v in towers.text.prepare([text]).inputs.items()}
        words = _states(model.text.tower, inputs)
        row = []
        for picture in _pictures(4):
            pixels = {k: torch.tensor(v) for k, v in towers.image.prepare([picture]).inputs.items()}
            seen = _states(model.image.tower, pixels)
            row.append(cross.probability(words, inputs["attention_mask"], seen))
        rows.append(torch.cat(row))
    return torch.stack(rows)


def _states(tower: Tower, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    state = tower.advance(tower.begin(inputs), inputs, 0, tower.depth)
    return tower.sequence(state, inputs)


def test_parity_of_probabilities_from_texts_and_pictures(
    model: DualEncoder, cross: CrossModalEncoder, artifact: Artifact
) -> None:
    with torch.no_grad():
        wanted = _by_torch(model, cross, artifact).numpy()
    assert wanted.std() > 0.01, "every pair is the same: nothing would be compared"
    reranker = _opened(artifact)
    assert reranker.image_shape == (1 + (PIXELS // PATCH) ** 2, IMAGE_WIDTH)
    for text, row in zip(TEXTS, wanted, strict=True):
        found = reranker.score(text, _pictures(4), searched="image")
        np.testing.assert_allclose(found, row, atol=TOLERANCE)
    for place, picture in enumerate(_pictures(4)):
        found = reranker.score(picture, TEXTS, searched="text")
        np.testing.assert_allclose(found, wanted[:, place], atol=TOLERANCE)


def test_states_kept_in_half_precision_score_nearly_the_same(artifact: Artifact) -> None:
    reranker = _opened(artifact)
    texts, images = reranker.text_states(["a red square"]), reranker.image_states(_pictures(4))
    kept = reranker.match(texts, images.astype(np.float16))
    np.testing.assert_allclose(kept, reranker.match(texts, images), atol=5e-3)


def test_parity_is_checked_for_every_graph(
    model: DualEncoder, cross: CrossModalEncoder, artifact: Artifact
) -> None:
    record = artifact.manifest.reranker
    assert record is not None
    assert check_reranker(model, cross, artifact.path, record) < TOLERANCE / 2
    changed = copy.deepcopy(cross)
    with torch.no_grad():
        changed.answer.bias += 0.1
    with pytest.raises(RerankerParityError, match="probability: the graph differs"):
        check_reranker(model, changed, artifact.path, record)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.image.tower.blocks[0].feed.inner.bias += 1.0  # type: ignore[index,union-attr]
    with pytest.raises(RerankerParityError, match="image_states: the graph differs"):
        check_reranker(other, cross, artifact.path, record)


def test_the_rest_of_the_artifact_is_as_without_a_reranker(
    tmp_path: Path, model: DualEncoder, artifact: Artifact
) -> None:
    without = export_model(model, tmp_path / "artifact", ExportNote("small"))
    assert without.manifest.reranker is None
    assert without.manifest.gallery_space == artifact.manifest.gallery_space
    assert without.manifest.query_encoder == artifact.manifest.query_encoder
    for name, record in without.manifest.files.items():
        assert artifact.manifest.files[name] == record


def test_towers_of_another_width_are_refused_and_nothing_is_written(
    tmp_path: Path, model: DualEncoder
) -> None:
    narrow = CrossModalEncoder(CrossModalShape(depth=1, width=8, heads=2, text=WIDTH, image=9))
    with pytest.raises(TrainingError, match=r"image tower's states are .* reads \(n, t, 9\)"):
        export_model(model, tmp_path / "artifact", ExportNote("small"), narrow)
    assert list(tmp_path.iterdir()) == []


def test_a_tower_without_token_states_is_refused(
    tmp_path: Path, model: DualEncoder, cross: CrossModalEncoder
) -> None:
    (tmp_path / "seed.tiny").write_text("1")
    flat = DualEncoder(model.text, _exits(TinyVision(tmp_path / "seed.tiny")), "nested")
    with pytest.raises(TrainingError, match="states"):
        export_model(flat, tmp_path / "artifact", ExportNote("small"), cross)
    assert not (tmp_path / "artifact").exists()
