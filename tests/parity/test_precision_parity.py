"""Heads that are folded or in 8 bits, against the heads that they stand for."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hivlp.models.artifact import Artifact
from hivlp.models.levels import EarlyOutput
from hivlp.models.network.bert import load_bert
from hivlp.models.network.dual_encoder import DualEncoder
from hivlp.models.network.exits import TowerExits
from hivlp.models.network.heads import ExitHead, HeadShape
from hivlp.models.network.tower import Tower, freeze
from hivlp.models.runtime.onnx_encoder import open_text_encoder
from hivlp.models.training import export as exporting
from hivlp.models.training import precision
from hivlp.models.training.export import ExportNote, export_model
from hivlp.models.training.precision import BLOCK, PrecisionError, pack8, write_reduced
from tests.unit.models_training.checkpoints import COLOURS, TinyVision, make_bert

DIMS, HIDDEN = (8, 12, 16), 24
TEXTS = tuple(
    " ".join(words)
    for words in itertools.product(COLOURS, ("a", "of", "picture", "square"), COLOURS)
)


def _trained(shape: HeadShape) -> ExitHead:
    """A head whose every number is as if fitted, none zero."""
    head = ExitHead(shape)
    with torch.no_grad():
        for number in (*head.parameters(), *head.buffers()):
            number.add_(torch.randn_like(number) * 0.2)
    return head.eval()


def _exits(tower: Tower) -> TowerExits:
    torch.manual_seed(0)
    shapes = [
        HeadShape(tower.width(layer), tower.width(layer), dim, hidden=HIDDEN, layers=2)
        for layer, dim in zip((1, 2, 3), DIMS, strict=True)
    ]
    return TowerExits(freeze(tower), (1, 2, 3), [_trained(shape) for shape in shapes]).eval()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DualEncoder:
    folder = tmp_path_factory.mktemp("towers")
    (folder / "seed.tiny").write_text("1")
    text = _exits(load_bert(make_bert(folder / "bert")))
    return DualEncoder(text, _exits(TinyVision(folder / "seed.tiny")), "nested")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, model: DualEncoder) -> Artifact:
    return export_model(model, tmp_path_factory.mktemp("artifacts") / "full", ExportNote("full"))


@pytest.fixture(scope="module", autouse=True)
def graphs_are_written_once(full: Artifact) -> Iterator[None]:
    """Writing a graph takes seconds: every later export of the model copies those of the first."""

    def copied(*given: object) -> None:
        path = given[-1]
        assert isinstance(path, Path)
        shutil.copyfile(full.path / path.parent.name / path.name, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "write_graph", copied)
        yield


@pytest.fixture(scope="module")
def both(
    tmp_path_factory: pytest.TempPathFactory,
    model: DualEncoder,
    full: Artifact,
    graphs_are_written_once: None,
) -> tuple[Artifact, Artifact]:
    low = ExportNote("low", precision="w8-heads", check_texts=TEXTS)
    return full, export_model(model, tmp_path_factory.mktemp("artifacts") / "low", low)


@pytest.mark.parametrize(
    "shape",
    [
        HeadShape(48, 48, 8, hidden=24, layers=2),
        HeadShape(48, 20, 8, hidden=0),
        HeadShape(48, 8, 16, hidden=24),
    ],
    ids=["square basis", "few directions, no bend", "not worth folding"],
)
def test_parity_of_a_folded_head(shape: HeadShape) -> None:
    torch.manual_seed(1)
    head = _trained(shape)
    folded, features = head.folded(), torch.randn(5, 48)
    with torch.no_grad():
        np.testing.assert_allclose(folded.embed(features), head.embed(features), atol=1e-5)
    count = sum(value.numel() for value in folded.state_dict().values())
    assert count <= sum(value.numel() for value in head.state_dict().values())
    assert (folded is head) == (shape.kept == 8)


@pytest.mark.parametrize("columns", [BLOCK, 3 * BLOCK, 40, 5])
def test_parity_of_packed_weights_to_half_a_step(columns: int) -> None:
    weight = np.random.default_rng(0).normal(1.0, 2.0, (7, columns)).astype(np.float32)
    codes, scales, zeros = pack8(weight)
    assert codes.shape == (7, -(-columns // BLOCK), BLOCK)
    read = (codes.astype(np.float32) - zeros[:, :, None]) * scales[:, :, None]
    apart = np.abs(read.reshape(7, -1)[:, :columns] - weight)
    assert (apart <= 0.51 * np.repeat(scales, BLOCK, axis=1)[:, :columns]).all()


def test_parity_of_8_bit_heads_early_nearly_and_at_the_finest_level_to_the_last_bit(
    both: tuple[Artifact, Artifact],
) -> None:
    full, low = (open_text_encoder(artifact) for artifact in both)
    batch = full.prepare(TEXTS)
    exact, found = list(full.encode(batch)), list(low.encode(batch))
    for one, other in zip(exact[:-1], found[:-1], strict=True):
        assert 0 < np.abs(one.vectors - other.vectors).max() < 0.05
    np.testing.assert_array_equal(exact[-1].vectors, found[-1].vectors)
    (wanted,), (given,) = full.encode_gallery(batch), low.encode_gallery(batch)
    np.testing.assert_array_equal(wanted.vectors, given.vectors)


def test_parity_of_8_bit_heads_alone_and_among_others(both: tuple[Artifact, Artifact]) -> None:
    low = open_text_encoder(both[1])

    def encoded(texts: tuple[str, ...]) -> list[EarlyOutput]:
        return list(low.encode(low.prepare(texts)))

    together = encoded((*TEXTS[:7], " ".join(["picture"] * 20)))
    for i, text in enumerate(TEXTS[:7]):
        for level, output in enumerate(encoded((text,))):
            apart = np.abs(output.vectors[0] - together[level].vectors[i]).max()
            assert apart < (1e-5 if level == len(DIMS) - 1 else 2e-3)


def test_8_bit_heads_are_another_query_encoder_of_the_same_space(
    both: tuple[Artifact, Artifact],
) -> None:
    full, low = (artifact.manifest for artifact in both)
    assert (full.precision, low.precision) == ("fp32", "w8-heads")
    assert full.gallery_space == low.gallery_space
    assert full.query_encoder != low.query_encoder
    assert {f"overlap_with_fp32_level{level}" for level in (1, 2, 3)} <= set(low.measured)
    assert low.measured["overlap_with_fp32_level3"] == 1.0
    same = {name for name, record in full.files.items() if low.files[name] == record}
    assert set(full.files) - same == {"text/stage1.onnx", "text/stage2.onnx"}


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("LEAST_OVERLAP", 1.01, "level 1: 8-bit heads keep .* export with --precision fp32"),
        ("MOST_APART_EARLY", -1.0, "level 1: a query's scores change by .* with its batch"),
    ],
)
def test_a_model_that_does_not_tolerate_it_is_not_written(
    tmp_path: Path,
    model: DualEncoder,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: float,
    told: str,
) -> None:
    monkeypatch.setattr(precision, field, value)
    note = ExportNote("low", precision="w8-heads", check_texts=TEXTS)
    with pytest.raises(PrecisionError, match=told):
        export_model(model, tmp_path / "artifact", note)
    assert list(tmp_path.iterdir()) == []


def test_8_bit_heads_are_refused_without_texts_and_where_they_make_gallery_vectors(
    tmp_path: Path, model: DualEncoder
) -> None:
    few = ExportNote("low", precision="w8-heads", check_texts=TEXTS[:99])
    with pytest.raises(PrecisionError, match=r"99 different texts .* at least 100"):
        export_model(model, tmp_path / "artifact", few)
    of_each = DualEncoder(model.text, model.image, "per_exit")
    with pytest.raises(PrecisionError, match="per_exit: the early heads make gallery vectors"):
        export_model(of_each, tmp_path / "artifact", ExportNote("low", precision="w8-heads"))
    assert list(tmp_path.iterdir()) == []


def test_a_graph_without_a_head_is_named(both: tuple[Artifact, Artifact], tmp_path: Path) -> None:
    reduced = both[1].path / "text/stage1.onnx"
    with pytest.raises(PrecisionError, match=r"stage1\.onnx: no head's weights"):
        write_reduced(reduced, tmp_path / "again.onnx")


def test_texts_that_say_the_same_to_the_tower_count_once(
    both: tuple[Artifact, Artifact], tmp_path: Path
) -> None:
    own, _ = both
    tower = own.manifest.tower("text")
    assert tower is not None
    files = [own.path / stage.file for stage in tower.stages]
    same = ["red", "Red", "RED", " red "] * 50
    with pytest.raises(PrecisionError, match="1 different texts"):
        precision.check_ranking(own.path, tower, files, same)


def test_a_batch_that_answers_nan_is_not_let_through() -> None:
    moved = [np.array([1e-6]), np.array([np.nan])]
    with pytest.raises(PrecisionError, match="change by nan"):
        precision._judge(1, 1.0, float(np.max([part.max() for part in moved])), 1e-3)
