"""The feature cache: found again by content, resumed, and never fooled by a damaged chunk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hivlp.models.encoder import EncoderBatch
from hivlp.models.errors import TextError
from hivlp.models.levels import FloatArray
from hivlp.models.network.bert import load_bert
from hivlp.models.network.tower import freeze
from hivlp.models.runtime.images import ImageLimits
from hivlp.models.runtime.texts import Tokenizer
from hivlp.models.training import features
from hivlp.models.training.features import FeatureCache, FeatureReader, TowerExit
from hivlp.models.training.graphs import Arrays
from tests.unit.models_training.checkpoints import TinyVision, make_bert, make_pairs, tokens


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TowerExit:
    return TowerExit(freeze(load_bert(make_bert(tmp_path_factory.mktemp("bert")))), (1, 3))


@pytest.fixture(scope="module", autouse=True)
def one_export_a_tower() -> Iterator[None]:
    """Every reader of one tower runs the same graph: what is tested here is the cache."""
    made: dict[str, Callable[[Arrays], list[FloatArray]]] = {}
    make = features.tower_runner

    def once(reading: TowerExit, *, threads: int) -> Callable[[Arrays], list[FloatArray]]:
        if reading.key not in made:
            made[reading.key] = make(reading, threads=threads)
        return made[reading.key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "tower_runner", once)
        yield


@pytest.fixture
def image(tmp_path: Path) -> TowerExit:
    (tmp_path / "seed.tiny").write_text("1")
    return TowerExit(freeze(TinyVision(tmp_path / "seed.tiny")), (2, 3))


def test_features_are_the_towers_own_in_the_texts_order(tmp_path: Path, text: TowerExit) -> None:
    reader = FeatureReader(text, tmp_path)
    found, broken = reader.texts(["a picture of red", "red", "a picture of red"])
    assert not broken
    with torch.no_grad():
        expected = text.tower.features(tokens([[2, 10, 11, 12, 4, 3], [2, 4, 3]]), (1, 3))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs[[0, 1, 0]], atol=1e-5)


def test_a_second_run_computes_only_what_is_new(
    tmp_path: Path, text: TowerExit, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = FeatureReader(text, tmp_path)
    first, _ = reader.texts(["red", "green"])
    ran: list[int] = []
    make = features.tower_runner

    def counting(*given: object, **named: object) -> object:
        run = make(*given, **named)  # type: ignore[arg-type]

        def counted(arrays: Arrays) -> object:
            ran.append(len(arrays["input_ids"]))
            return run(arrays)

        return counted

    monkeypatch.setattr(features, "tower_runner", counting)
    again, _ = reader.texts(["blue", "green", "red"])
    assert ran == [1]
    np.testing.assert_array_equal(again[0][[2, 1]], first[0])
    reader.texts(["blue"])
    assert ran == [1]


@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_damaged_chunk_is_dropped_and_computed_again(
    tmp_path: Path, text: TowerExit, damage: str
) -> None:
    reader = FeatureReader(text, tmp_path)
    first, _ = reader.texts(["red"])
    (chunk,) = tmp_path.glob("*/*.safetensors")
    whole = chunk.read_bytes()
    inside = whole.index(np.ascontiguousarray(first[1][0, :4]).tobytes())
    changed = whole[:inside] + bytes([whole[inside] ^ 255]) + whole[inside + 1 :]
    chunk.write_bytes({"cut": whole[:40], "empty": b"", "changed": changed}[damage])
    again, _ = reader.texts(["red"])
    np.testing.assert_array_equal(again[1], first[1])


def test_a_text_that_leaves_no_token_is_told_and_the_others_stay(
    tmp_path: Path, text: TowerExit, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Tokenizer.encode

    def strict(self: Tokenizer, texts: list[str], *, param: str = "texts") -> EncoderBatch:
        if "\ue000" in texts:
            raise TextError("empty_text", "nothing is left of the text", param=param)
        return encode(self, texts, param=param)

    monkeypatch.setattr(Tokenizer, "encode", strict)
    found, broken = FeatureReader(text, tmp_path).texts(["red", "\ue000", "blue"])
    assert broken == {1: "nothing is left of the text"}
    whole, _ = FeatureReader(text, tmp_path / "other").texts(["red", "blue"])
    np.testing.assert_allclose(found[1], whole[1], atol=1e-6)


def test_every_file_of_a_tower_counts_but_not_its_name(tmp_path: Path) -> None:
    folder = make_bert(tmp_path / "bert")
    before = TowerExit(load_bert(folder), (1, 3)).key
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2}))
    assert TowerExit(load_bert(folder), (1, 3)).key != before
    (tmp_path / "one.tiny").write_text("1")
    (tmp_path / "two.tiny").write_text("1")
    one, two = (TowerExit(TinyVision(tmp_path / f"{n}.tiny"), (1, 3)) for n in ("one", "two"))
    assert one.key == two.key


def test_a_half_written_chunk_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "abc.part").write_bytes(b"half")
    assert b"x" * 32 not in FeatureCache(tmp_path)


def test_another_tower_or_other_exits_have_a_folder_of_their_own(
    tmp_path: Path, text: TowerExit
) -> None:
    other = TowerExit(load_bert(make_bert(tmp_path / "other", seed=1)), (1, 3))
    keys = {text.key, other.key, TowerExit(text.tower, (2, 3)).key}
    assert len(keys) == 3


def test_pictures_that_cannot_be_read_are_told_apart(tmp_path: Path, image: TowerExit) -> None:
    corpus = make_pairs(tmp_path / "pictures", of_each=1)
    (corpus / "broken.png").write_bytes(b"not a picture")
    (corpus / "empty.png").write_bytes(b"")
    paths = [corpus / name for name in ("red0.png", "broken.png", "blue0.png", "empty.png")]
    reader = FeatureReader(image, tmp_path / "cache")
    found, broken = reader.pictures(paths, limits=ImageLimits())
    assert [f.shape for f in found] == [(2, 8), (2, 8)]
    assert sorted(broken) == [1, 3]
    assert "not a supported picture" in broken[1]
    alone, _ = reader.pictures([paths[2]], limits=ImageLimits())
    np.testing.assert_array_equal(alone[1][0], found[1][1])
