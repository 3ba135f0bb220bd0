"""Loading: both towers checked and warm, or an error that names the file or the level."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hivlp.models.artifact import MANIFEST_NAME, TowerRecord, read_manifest, write_manifest
from hivlp.models.errors import ArtifactCorrupt, ArtifactError
from hivlp.models.levels import Modality
from hivlp.models.runtime.loading import load_encoders
from tests.tiny_artifact import make_tiny_artifact, replace_file, replace_weights


def edit_tower(
    folder: Path, modality: Modality, edit: Callable[[TowerRecord], TowerRecord]
) -> None:
    manifest = read_manifest(folder)
    towers = tuple(edit(t) if t.modality == modality else t for t in manifest.towers)
    write_manifest(folder, manifest.model_copy(update={"towers": towers}))


def edit_stage(folder: Path, number: int, modality: Modality = "text", **update: Any) -> None:
    def edit(tower: TowerRecord) -> TowerRecord:
        stages = list(tower.stages)
        stages[number - 1] = stages[number - 1].model_copy(update=update)
        return tower.model_copy(update={"stages": tuple(stages)})

    edit_tower(folder, modality, edit)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_artifact(tmp_path)


def test_both_towers_are_ready(folder: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        encoders = load_encoders(folder, threads=2, ahead=pool, device="auto")
        assert encoders.text is not None
        assert encoders.image is not None
        batch = encoders.text.prepare(["red"])
        assert [output.level for output in encoders.text.encode(batch)] == [1, 2, 3]
    assert encoders.artifact.path == folder


@pytest.mark.parametrize("tower", ["text", "image"])
def test_one_tower_is_enough(tmp_path: Path, tower: Modality) -> None:
    encoders = load_encoders(make_tiny_artifact(tmp_path, towers=(tower,)))
    assert (encoders.text is None) == (tower == "image")
    assert (encoders.image is None) == (tower == "text")


FILES = [
    "text/stage1.onnx",
    "text/stage3.onnx",
    "text/tokenizer.json",
    "image/stage2.onnx",
]


@pytest.mark.parametrize("name", FILES)
def test_changed_file_is_named(folder: Path, name: str) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactCorrupt, match=name):
        load_encoders(folder)


@pytest.mark.parametrize("name", FILES)
def test_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ArtifactCorrupt, match=name):
        load_encoders(folder)


@pytest.mark.parametrize("name", FILES)
def test_vouched_for_nonsense_is_named(folder: Path, name: str) -> None:
    replace_file(folder, name, b"nonsense")
    with pytest.raises(ArtifactError, match=name):
        load_encoders(folder)


@pytest.mark.parametrize("name", ["text/stage1.onnx", "text/tokenizer.json"])
def test_file_that_the_manifest_does_not_vouch_for_is_refused(folder: Path, name: str) -> None:
    manifest = read_manifest(folder)
    files = {key: record for key, record in manifest.files.items() if key != name}
    write_manifest(folder, manifest.model_copy(update={"files": files}))
    with pytest.raises(ArtifactCorrupt, match=f"{name}: used, but not listed"):
        load_encoders(folder)


@pytest.mark.parametrize(
    ("number", "update", "message"),
    [
        (1, {"inputs": ("input_ids",)}, r"stage1\.onnx: inputs are"),
        (1, {"states": ()}, r"stage1\.onnx: outputs are"),
        (3, {"states": ("hidden_9",)}, r"stage3\.onnx: outputs are"),
        (1, {"file": "text/stage2.onnx"}, r"stage2\.onnx: inputs are"),
        (3, {"dim": 33}, r"stage3\.onnx: embedding is .*33"),
        (2, {"exit_layer": 9}, r"exit_layer must grow"),
        (2, {"level": 5}, r"numbered 1\.\.3"),
    ],
)
def test_graph_that_is_not_what_the_manifest_says_is_refused(
    tmp_path: Path, number: int, update: dict[str, Any], message: str
) -> None:
    folder = make_tiny_artifact(tmp_path, towers=("text",))
    edit_stage(folder, number, **update)
    with pytest.raises(ArtifactError, match=message):
        load_encoders(folder)


def test_state_that_no_stage_gives_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path, towers=("text",))

    def without_first(tower: TowerRecord) -> TowerRecord:
        stages = [stage.model_copy(update={"level": stage.level - 1}) for stage in tower.stages[1:]]
        return tower.model_copy(update={"stages": tuple(stages)})

    edit_tower(folder, "text", without_first)
    with pytest.raises(ArtifactError, match=r"no earlier stage gives \['hidden_1'\]"):
        load_encoders(folder)


def test_towers_of_other_dims_are_refused(folder: Path) -> None:
    edit_tower(folder, "image", lambda t: t.model_copy(update={"stages": t.stages[:2]}))
    with pytest.raises(ArtifactError, match=r"\(level, dim\) differ"):
        load_encoders(folder)


def test_two_towers_of_one_modality_are_refused(folder: Path) -> None:
    manifest = read_manifest(folder)
    towers = (*manifest.towers, manifest.towers[0])
    write_manifest(folder, manifest.model_copy(update={"towers": towers}))
    with pytest.raises(ArtifactError, match="two towers of one modality"):
        load_encoders(folder)


@pytest.mark.parametrize("modality", ["text", "image"])
def test_tower_without_its_preparation_is_refused(folder: Path, modality: Modality) -> None:
    edit_tower(folder, modality, lambda t: t.model_copy(update={modality: None}))
    with pytest.raises(ArtifactError, match=f"no {modality} tower with"):
        load_encoders(folder)


def test_vectors_that_are_not_normalised_are_found_at_the_warm_up(folder: Path) -> None:
    replace_weights(folder, "image/stage2.onnx", "head", 0.0)
    with pytest.raises(ArtifactError, match="image tower: level 2 has length 0"):
        load_encoders(folder)


def test_level_that_is_not_finite_is_found_at_the_warm_up(folder: Path) -> None:
    replace_weights(folder, "image/stage3.onnx", "layer", float("nan"))
    with pytest.raises(ArtifactError, match=r"image/stage3\.onnx: level 3 is not finite"):
        load_encoders(folder)


def test_folder_that_is_no_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        load_encoders(tmp_path)


@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_every_byte_of_the_manifest_counts(folder: Path, bit: int) -> None:
    path = folder / MANIFEST_NAME
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= bit
        path.write_bytes(bytes(changed))
        with pytest.raises(ArtifactCorrupt, match=MANIFEST_NAME):
            read_manifest(folder)
