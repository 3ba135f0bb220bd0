"""The encoder: levels in order, batches that change nothing, and one stage ahead at most."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.models.artifact import Artifact
from hivlp.models.encoder import Encoder, RgbImage
from hivlp.models.errors import ArtifactError, TextError
from hivlp.models.levels import EarlyOutput, nested_prefix
from hivlp.models.runtime.onnx_encoder import (
    OnnxEncoder,
    open_image_encoder,
    open_text_encoder,
)
from tests.tiny_artifact import COLOURS, make_tiny_artifact, replace_weights, solid

DIMS = (8, 16, 32)
TEXTS = ("red", "a picture of something blue and green", "zebra " * 30, "a", "yellow square")


class IdleExecutor(Executor):
    """Takes work and never begins it; remembers every future."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]


class RecordingPool(ThreadPoolExecutor):
    """A pool of one thread that remembers every future."""

    def __init__(self) -> None:
        super().__init__(1)
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.futures.append(super().submit(fn, *args, **kwargs))
        return self.futures[-1]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return Artifact.open(make_tiny_artifact(tmp_path_factory.mktemp("artifact"), dims=DIMS))


@pytest.fixture(scope="module")
def text(artifact: Artifact) -> OnnxEncoder[str]:
    return open_text_encoder(artifact)


@pytest.fixture(scope="module")
def image(artifact: Artifact) -> OnnxEncoder[RgbImage]:
    return open_image_encoder(artifact)


@pytest.fixture
def pool() -> Iterator[RecordingPool]:
    with RecordingPool() as made:
        yield made


def assert_same(found: list[EarlyOutput], expected: list[EarlyOutput]) -> None:
    assert [output.level for output in found] == [output.level for output in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.vectors, other.vectors)


def test_both_towers_are_encoders(
    artifact: Artifact, text: OnnxEncoder[str], image: OnnxEncoder[RgbImage]
) -> None:
    as_text: Encoder[str] = text
    as_image: Encoder[RgbImage] = image
    assert (as_text.modality, as_image.modality) == ("text", "image")
    for encoder in (as_text, as_image):
        assert [spec.dim for spec in encoder.levels] == list(DIMS)
        assert encoder.gallery == "nested"
        assert encoder.gallery_space == artifact.manifest.gallery_space
        assert encoder.query_encoder == artifact.manifest.query_encoder


def test_levels_come_coarse_first_and_normalised(text: OnnxEncoder[str]) -> None:
    outputs = list(text.encode(text.prepare(TEXTS)))
    assert [output.level for output in outputs] == [1, 2, 3]
    for output, dim in zip(outputs, DIMS, strict=True):
        assert output.vectors.shape == (len(TEXTS), dim)
        assert output.vectors.dtype == np.float32
        assert output.vectors.flags.c_contiguous
        np.testing.assert_allclose(np.linalg.norm(output.vectors, axis=1), 1.0, atol=1e-5)


def test_each_text_equals_its_row_of_a_mixed_batch(text: OnnxEncoder[str]) -> None:
    together = list(text.encode(text.prepare(TEXTS)))
    for row, one in enumerate(TEXTS):
        for level, output in enumerate(text.encode(text.prepare([one]))):
            np.testing.assert_allclose(
                output.vectors[0], together[level].vectors[row], atol=1e-5, rtol=0
            )


def test_each_picture_equals_its_row_of_a_batch(image: OnnxEncoder[RgbImage]) -> None:
    pictures = [solid("red"), solid("blue", (1, 1)), solid("green", (300, 7))]
    together = list(image.encode(image.prepare(pictures)))
    for row, picture in enumerate(pictures):
        for level, output in enumerate(image.encode(image.prepare([picture]))):
            np.testing.assert_allclose(
                output.vectors[0], together[level].vectors[row], atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("template", ["{}", "a {} picture", "a photo of something {}"])
def test_colour_words_find_their_pictures_at_every_level(
    text: OnnxEncoder[str], image: OnnxEncoder[RgbImage], template: str
) -> None:
    gallery = image.encode_gallery(image.prepare([solid(colour) for colour in COLOURS]))
    assert [output.level for output in gallery] == [3]
    queries = [template.format(colour) for colour in COLOURS]
    for output, dim in zip(text.encode(text.prepare(queries)), DIMS, strict=True):
        scores = output.vectors @ nested_prefix(gallery[0].vectors, dim).T
        assert scores.argmax(axis=1).tolist() == list(range(len(COLOURS)))


def test_per_exit_gallery_has_every_level(tmp_path: Path) -> None:
    artifact = Artifact.open(make_tiny_artifact(tmp_path, gallery="per_exit"))
    encoder = open_text_encoder(artifact)
    batch = encoder.prepare(TEXTS)
    assert_same(list(encoder.encode_gallery(batch)), list(encoder.encode(batch)))


def test_nested_gallery_is_the_finest_level(text: OnnxEncoder[str]) -> None:
    batch = text.prepare(TEXTS)
    assert_same(list(text.encode_gallery(batch)), list(text.encode(batch))[-1:])


def test_one_stage_is_enough(tmp_path: Path, pool: RecordingPool) -> None:
    artifact = Artifact.open(make_tiny_artifact(tmp_path, dims=(8,)))
    for ahead in (None, pool):
        encoder = open_text_encoder(artifact, ahead=ahead)
        assert [output.level for output in encoder.encode(encoder.prepare(["red"]))] == [1]
    assert pool.futures == []


def test_nothing_in_gives_empty_levels(text: OnnxEncoder[str]) -> None:
    batch = text.prepare([])
    shapes = [output.vectors.shape for output in text.encode(batch)]
    assert shapes == [(0, dim) for dim in DIMS]
    assert [output.vectors.shape for output in text.encode_gallery(batch)] == [(0, 32)]


def test_prepare_names_the_bad_text(text: OnnxEncoder[str]) -> None:
    with pytest.raises(TextError) as caught:
        text.prepare(["red", ""])
    assert caught.value.param == "texts[1]"


def test_running_ahead_gives_what_the_sequence_gives(
    artifact: Artifact, text: OnnxEncoder[str], pool: RecordingPool
) -> None:
    batch = text.prepare(TEXTS)
    ahead = open_text_encoder(artifact, ahead=pool)
    assert_same(list(ahead.encode(batch)), list(text.encode(batch)))
    assert len(pool.futures) == 2


def test_next_stage_ends_while_the_consumer_is_busy(
    artifact: Artifact, pool: RecordingPool
) -> None:
    encoder = open_text_encoder(artifact, ahead=pool)
    outputs = encoder.encode(encoder.prepare(TEXTS))
    next(outputs)
    assert pool.futures[0].result(timeout=30).output.level == 2
    assert len(pool.futures) == 1
    assert next(outputs).level == 2
    assert pool.futures[1].result(timeout=30).output.level == 3


def test_stage_that_nobody_began_is_computed_by_the_consumer(
    artifact: Artifact, text: OnnxEncoder[str]
) -> None:
    idle = IdleExecutor()
    encoder = open_text_encoder(artifact, ahead=idle)
    batch = text.prepare(TEXTS)
    assert_same(list(encoder.encode(batch)), list(text.encode(batch)))
    assert all(future.cancelled() for future in idle.futures)


def test_encoding_inside_its_own_full_pool_ends(artifact: Artifact, text: OnnxEncoder[str]) -> None:
    with ThreadPoolExecutor(1) as pool:
        encoder = open_text_encoder(artifact, ahead=pool)
        batch = text.prepare(TEXTS)
        found = pool.submit(lambda: list(encoder.encode(batch))).result(timeout=30)
    assert_same(found, list(text.encode(batch)))


def test_closing_early_drops_what_runs_ahead(artifact: Artifact) -> None:
    idle = IdleExecutor()
    encoder = open_text_encoder(artifact, ahead=idle)
    for levels_taken in (1, 2):
        outputs = encoder.encode(encoder.prepare(["red"]))
        for _ in range(levels_taken):
            next(outputs)
        outputs.close()  # type: ignore[attr-defined]
    assert len(idle.futures) == 3
    assert all(future.cancelled() for future in idle.futures)


def test_closing_while_a_stage_runs_lets_it_end(artifact: Artifact, pool: RecordingPool) -> None:
    encoder = open_text_encoder(artifact, ahead=pool)
    outputs = encoder.encode(encoder.prepare(["red"]))
    next(outputs)
    outputs.close()  # type: ignore[attr-defined]
    pool.shutdown(wait=True)
    assert all(future.done() for future in pool.futures)


def test_encoding_that_is_never_begun_runs_nothing(artifact: Artifact) -> None:
    idle = IdleExecutor()
    encoder = open_text_encoder(artifact, ahead=idle)
    encoder.encode(encoder.prepare(["red"]))
    assert idle.futures == []


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("ahead", [False, True])
def test_level_that_is_not_finite_reaches_the_consumer_as_an_error(
    tmp_path: Path, pool: RecordingPool, value: float, ahead: bool
) -> None:
    make_tiny_artifact(tmp_path)
    replace_weights(tmp_path, "text/stage2.onnx", "head", value)
    encoder = open_text_encoder(Artifact.open(tmp_path), ahead=pool if ahead else None)
    outputs = encoder.encode(encoder.prepare(["red", "blue"]))
    assert next(outputs).level == 1
    with pytest.raises(ArtifactError, match="level 2 is not finite for 2 of 2") as caught:
        next(outputs)
    assert "stage2.onnx" in str(caught.value)
    assert all(future.done() for future in pool.futures)


def test_zero_vector_stays_zero(tmp_path: Path) -> None:
    make_tiny_artifact(tmp_path)
    replace_weights(tmp_path, "text/stage3.onnx", "head", 0.0)
    encoder = open_text_encoder(Artifact.open(tmp_path))
    assert not list(encoder.encode(encoder.prepare(["red"])))[2].vectors.any()


@pytest.mark.parametrize("with_pool", [False, True])
def test_threads_at_once_get_what_one_caller_gets(
    artifact: Artifact, text: OnnxEncoder[str], pool: RecordingPool, with_pool: bool
) -> None:
    encoder = open_text_encoder(artifact, ahead=pool if with_pool else None)
    expected = [list(text.encode(text.prepare([one]))) for one in TEXTS]
    start = threading.Barrier(4)

    def work(first: int) -> list[list[EarlyOutput]]:
        start.wait(timeout=30)
        order = [(first + i) % len(TEXTS) for i in range(20)]
        return [list(encoder.encode(encoder.prepare([TEXTS[i]]))) for i in order]

    with ThreadPoolExecutor(4) as callers:
        for first, found in enumerate(callers.map(work, range(4))):
            for i, outputs in enumerate(found):
                assert_same(outputs, expected[(first + i) % len(TEXTS)])
