"""The re-ranker's runtime: what it answers, batches, deadlines, broken artifacts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from hivlp.models.artifact import Artifact, read_manifest, write_manifest
from hivlp.models.errors import ArtifactCorrupt, ArtifactError, DeadlinePassed
from hivlp.models.reranker import Reranker
from hivlp.models.runtime.loading import load_encoders, load_reranker
from hivlp.models.runtime.onnx_reranker import MOST_PAIRS, OnnxReranker
from tests.tiny_artifact import (
    CELLS,
    COLOURS,
    STATES_SPACE,
    agreement,
    fail_beyond_one_pair,
    make_tiny_artifact,
    replace_file,
    solid,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_artifact(tmp_path_factory.mktemp("artifact"), reranker="same")


@pytest.fixture(scope="module")
def reranker(folder: Path) -> OnnxReranker:
    return opened(folder)


def opened(folder: Path) -> OnnxReranker:
    found = load_reranker(folder)
    assert found is not None
    return found


def test_a_text_is_scored_against_each_picture_in_the_order_given(reranker: OnnxReranker) -> None:
    pictures = [solid(colour) for colour in COLOURS]
    found = reranker.score("a red square", pictures, searched="image")
    wanted = [agreement("a red square", value) for value in COLOURS.values()]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert found.dtype == np.float32


def test_a_picture_is_scored_against_texts_of_any_lengths(reranker: OnnxReranker) -> None:
    texts = ["red", "a photo of something green", "blue", "is a red blue picture of a square"]
    found = reranker.score(solid("red"), texts, searched="text")
    wanted = [agreement(text, COLOURS["red"]) for text in texts]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_more_pairs_than_one_run_takes_are_scored_as_one_by_one(reranker: OnnxReranker) -> None:
    colours = (list(COLOURS.values()) * 8)[: MOST_PAIRS + 9]
    together = reranker.score("orange", [solid(c) for c in colours], searched="image")
    alone = [float(reranker.score("orange", [solid(c)], searched="image")[0]) for c in colours]
    np.testing.assert_allclose(together, alone, rtol=1e-6)


def test_stored_half_precision_states_score_as_computed_ones(reranker: OnnxReranker) -> None:
    states = reranker.image_states([solid(colour) for colour in COLOURS])
    assert states.shape == (len(COLOURS), *reranker.image_shape) == (len(COLOURS), CELLS**2, 3)
    texts = reranker.text_states(["purple"])
    kept = reranker.match(texts, states.astype(np.float16))
    np.testing.assert_allclose(kept, reranker.match(texts, states), atol=2e-3)


def test_pairs_are_matched_row_by_row(reranker: OnnxReranker) -> None:
    texts = reranker.text_states(["red", "a green one"])
    images = reranker.image_states([solid("red"), solid("green")])
    np.testing.assert_allclose(reranker.match(texts, images), [1.0, 1.0], atol=1e-4)
    np.testing.assert_allclose(
        reranker.match(texts, images[::-1].copy()), [agreement("red", (0, 255, 0))] * 2, atol=1e-4
    )


def test_no_candidates_have_no_scores(reranker: OnnxReranker) -> None:
    assert reranker.score("red", [], searched="image").shape == (0,)
    assert reranker.score(solid("red"), [], searched="text").shape == (0,)


def test_several_threads_at_once_get_what_each_gets_alone(reranker: OnnxReranker) -> None:
    pictures = [solid(colour) for colour in COLOURS]

    def ask(colour: str) -> list[float]:
        return reranker.score(colour, pictures, searched="image").tolist()

    alone = [ask(colour) for colour in COLOURS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, list(COLOURS) * 3)) == alone * 3


def test_it_keeps_the_contract(reranker: OnnxReranker, folder: Path) -> None:
    contract: Reranker = reranker
    assert contract.fits == read_manifest(folder).gallery_space
    assert contract.states_space == STATES_SPACE


def test_identity_changes_with_a_graph_and_with_nothing_else(tmp_path: Path) -> None:
    one = opened(make_tiny_artifact(tmp_path / "one", reranker="same", name="one"))
    same = opened(make_tiny_artifact(tmp_path / "two", reranker="same", name="two"))
    other = opened(make_tiny_artifact(tmp_path / "other", reranker="unlike"))
    assert one.identity == same.identity != other.identity


def test_an_artifact_without_one_opens_and_has_none(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path)
    assert load_reranker(folder) is None
    assert load_reranker(Artifact.open(folder)) is None


def test_a_manifest_from_before_there_were_any_still_opens(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path)
    old = (
        (folder / "manifest.json").read_text(encoding="utf-8").replace('  "reranker": null,\n', "")
    )
    assert "reranker" not in old
    (folder / "manifest.json").write_text(old, encoding="utf-8")
    with pytest.raises(ArtifactCorrupt, match="seal"):
        read_manifest(folder)
    (folder / "manifest.json").write_bytes(_sealed_again(old))
    assert load_encoders(folder).artifact.manifest.reranker is None


def test_a_time_that_is_up_stops_before_anything_runs(reranker: OnnxReranker) -> None:
    past = time.perf_counter() - 1.0
    with pytest.raises(DeadlinePassed):
        reranker.score("red", [solid("red")], searched="image", until=past)


def test_a_run_that_takes_too_long_is_stopped_midway(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path, reranker="same")
    replace_file(folder, "rerank/cross.onnx", _endless(folder / "rerank" / "cross.onnx"))
    slow = OnnxReranker(Artifact.open(folder))  # not warmed up: it would run to its end
    texts, images = slow.text_states(["red"]), slow.image_states([solid("red")])
    with pytest.raises(DeadlinePassed):
        slow.match(texts, images, until=time.perf_counter() + 0.05)


def test_a_graph_that_fails_is_an_error_of_the_artifact(tmp_path: Path) -> None:
    broken = opened(fail_beyond_one_pair(make_tiny_artifact(tmp_path, reranker="same")))
    texts = broken.text_states(["red"])
    assert len(broken.match(texts, broken.image_states([solid("red")]))) == 1
    for until in (None, time.perf_counter() + 60):
        with pytest.raises(ArtifactError, match="the graph of probability failed"):
            broken.match(texts, broken.image_states([solid("red"), solid("blue")]), until=until)


def test_graphs_of_other_names_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path, reranker="same")
    swapped = (folder / "rerank" / "text_states.onnx").read_bytes()
    replace_file(folder, "rerank/image_states.onnx", swapped)
    with pytest.raises(ArtifactError, match=r"image_states\.onnx: reads \['attention_mask'"):
        load_reranker(folder)


def test_states_of_another_shape_than_the_manifest_says_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path, reranker="same")
    manifest = read_manifest(folder)
    assert manifest.reranker is not None
    wrong = manifest.reranker.model_copy(update={"image_tokens": 9})
    write_manifest(folder, manifest.model_copy(update={"reranker": wrong}))
    with pytest.raises(ArtifactError, match=r"image_states\.onnx.*\(1, 9, 3\)"):
        load_reranker(folder)


def test_a_tower_is_needed_for_each_side(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path, reranker="same")
    manifest = read_manifest(folder)
    towers = tuple(t for t in manifest.towers if t.modality == "text")
    write_manifest(folder, manifest.model_copy(update={"towers": towers}))
    with pytest.raises(ArtifactError, match="a text and an image tower"):
        load_reranker(folder)


def test_an_answer_that_is_no_probability_is_an_error(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path, reranker="same")
    model = onnx.load(folder / "rerank" / "cross.onnx")
    model.graph.node[-1].input[0] = "negated"
    replace_file(folder, "rerank/cross.onnx", model.SerializeToString(deterministic=True))
    with pytest.raises(ArtifactError, match=r"cross\.onnx: an answer is no probability"):
        load_reranker(folder)


def test_a_changed_graph_is_found_when_the_artifact_is_opened(tmp_path: Path) -> None:
    folder = make_tiny_artifact(tmp_path, reranker="same")
    path = folder / "rerank" / "cross.onnx"
    path.write_bytes(path.read_bytes()[:-1] + b"\x00")
    with pytest.raises(ArtifactCorrupt, match=r"rerank/cross\.onnx"):
        load_reranker(folder)


def _sealed_again(text: str) -> bytes:
    import hashlib
    import re

    unsealed = re.sub(r'"seal": "[0-9a-f]{64}"', f'"seal": "{"0" * 64}"', text)
    seal = hashlib.sha256(unsealed.encode()).hexdigest()
    return unsealed.replace("0" * 64, seal, 1).encode()


def _endless(path: Path) -> bytes:
    """The pairs' graph, its answer passed through a loop of some 10^9 additions of zero."""
    model = onnx.load(path)
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["go_on_still"]),
            helper.make_node("Add", ["value", "nothing"], ["value_after"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, ["n"]),
        ],
        [
            helper.make_tensor_value_info("go_on_still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value_after", TensorProto.FLOAT, ["n"]),
        ],
        [numpy_helper.from_array(np.array(0.0, np.float32), "nothing")],
    )
    last = model.graph.node.pop()
    model.graph.node.append(
        helper.make_node("Loop", ["turns", "", last.input[0]], ["probability"], body=body)
    )
    model.graph.initializer.append(numpy_helper.from_array(np.array(10**9, np.int64), "turns"))
    return bytes(model.SerializeToString(deterministic=True))
