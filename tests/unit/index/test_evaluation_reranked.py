"""Ranks after re-ranking: capped by the cascade, ties against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.errors import BuildError
from hivlp.index.evaluation.evaluate import DIRECTIONS, EvaluationSettings, evaluate
from hivlp.index.evaluation.tables import tables
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.encoder import RgbImage
from hivlp.models.levels import FloatArray, Modality, normalise
from hivlp.models.reranker import StatesArray, TextStates
from tests.fakes import SPACE, FakeEncoder, fake_model, unit_vectors, write_snapshot
from tests.tiny_artifact import png

ITEMS = 60
DEPTH = 8


@dataclass(frozen=True)
class Likes:
    """A re-ranker: states are numbers of captions and pictures, `likes` makes a probability of two.

    A text's number is its last word; a picture's is its first red byte.
    """

    likes: Callable[[int, int], float]
    fits: str = SPACE
    identity: str = "likes"
    states_space: str = "likes"
    image_shape: tuple[int, int] = (1, 1)

    def text_states(self, texts: Sequence[str], *, until: float | None = None) -> TextStates:
        numbers = np.array([int(text.split()[-1]) for text in texts], np.float32)
        return TextStates(numbers.reshape(-1, 1, 1), np.ones((len(texts), 1), np.int64))

    def image_states(self, images: Sequence[RgbImage], *, until: float | None = None) -> FloatArray:
        return np.array([image[0, 0, 0] for image in images], np.float32).reshape(-1, 1, 1)

    def match(
        self, texts: TextStates, images: StatesArray, *, until: float | None = None
    ) -> FloatArray:
        pairs = np.broadcast_arrays(texts.states.ravel(), images.ravel())
        found = [self.likes(int(text), int(image)) for text, image in zip(*pairs, strict=True)]
        return np.array(found, np.float32)

    def score(
        self,
        query: str | RgbImage,
        candidates: Sequence[str] | Sequence[RgbImage],
        *,
        searched: Modality,
        until: float | None = None,
    ) -> FloatArray:
        raise AssertionError("states are made once, and matched")


class Given(FakeEncoder[Any]):
    """Encodes text n, or a picture whose first red byte is n, as vector n of a table."""

    table: FloatArray

    def _vector(self, item: Any) -> FloatArray:
        number = int(item.split()[-1]) if isinstance(item, str) else int(item[0, 0, 0])
        row: FloatArray = self.table[number]
        return row


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Sixty pictures of a caption each; what `evaluate` finds with a re-ranker."""
    monkeypatch.chdir(tmp_path)
    Path("nowhere").mkdir()
    for number in range(ITEMS):
        pixels = np.full((4, 4, 3), number, np.uint8)
        Path(f"nowhere/{number}.png").write_bytes(png(pixels))
    images = unit_vectors(ITEMS, 16)
    texts = normalise(images + 2.5 * unit_vectors(ITEMS, 16, seed=1))
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=images, texts=texts, text_items=list(range(ITEMS)))
    text, image = Given("text", noise=0.0), Given("image", noise=0.0)
    object.__setattr__(text, "table", texts)
    object.__setattr__(image, "table", images)
    model = replace(fake_model(tmp_path), text=text, image=image)

    def run(likes: Callable[[int, int], float], rerank: int = DEPTH) -> Any:
        settings = EvaluationSettings(
            None, at=(1, 5, 8), rerank=rerank, directions=DIRECTIONS[:2], quiet=True, resamples=0
        )
        own = replace(model, reranker=Likes(likes))
        return evaluate(store.open("default"), own, settings)

    return run


def shares(run: Any, system: str) -> list[list[float]]:
    """R@K of both directions."""
    return [
        [figure.value for figure in direction.systems[system].recalls.values()]
        for direction in run.report.directions
    ]


def test_a_perfect_reranker_is_capped_by_what_the_cascade_found(
    measured: Callable[..., Any],
) -> None:
    run = measured(lambda text, image: float(text == image))
    for before, after in zip(
        shares(run, "cascade"), shares(run, "cascade, re-ranked"), strict=True
    ):
        assert before[0] < before[2] < 1
        assert after == [before[2]] * 3
    assert (
        run.report.summary["cascade, re-ranked"].ar.value > run.report.summary["cascade"].ar.value
    )
    assert "re-ranked: the cascade's first 8 rows" in tables(run.report)


def test_a_reranker_that_finds_all_alike_puts_right_ones_last(measured: Callable[..., Any]) -> None:
    run = measured(lambda text, image: 0.5)
    for before, after in zip(
        shares(run, "cascade"), shares(run, "cascade, re-ranked"), strict=True
    ):
        assert after == [0.0, 0.0, before[2]]


def test_what_lies_behind_is_as_it_was(measured: Callable[..., Any]) -> None:
    """By one that likes nothing less than the right row: ranks 1 to 8 become 8, others stay."""
    run = measured(lambda text, image: float(text != image) / 2)
    for tally in run.tallies:
        before = tally.systems["cascade"].ranks
        after = tally.systems["cascade, re-ranked"].ranks
        assert (after == np.where(before <= DEPTH, DEPTH, before)).all()
        assert np.isnan(tally.systems["cascade, re-ranked"].ann).all()


def test_an_order_of_the_rerankers_own(measured: Callable[..., Any]) -> None:
    """Likes by number, plainly: 1 + how many of the cascade's wrong ones have a higher one."""
    run = measured(lambda text, image: (7 * text * image % 61) / 61)
    (tally, _) = run.tallies
    before, after = (tally.systems[n].ranks for n in ("cascade", "cascade, re-ranked"))
    assert (after[before <= DEPTH] != before[before <= DEPTH]).any()
    assert (after[before <= DEPTH] <= DEPTH).all()
    assert (after[before > DEPTH] == before[before > DEPTH]).all()


def test_pictures_that_are_gone_are_compared_last(measured: Callable[..., Any]) -> None:
    for number in range(0, ITEMS, 2):
        Path(f"nowhere/{number}.png").unlink()
    run = measured(lambda text, image: float(text == image))
    tally = run.tallies[0]
    before, after = (tally.systems[n].ranks for n in ("cascade", "cascade, re-ranked"))
    gone = tally.items % 2 == 0
    assert (after[(before <= DEPTH) & ~gone] == 1).all()
    assert (after[(before <= DEPTH) & gone] == DEPTH).all()


def test_a_model_without_one_is_refused(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=unit_vectors(3, 16))
    with pytest.raises(BuildError, match="rerank: the model 'fake' has no re-ranker"):
        evaluate(store.open("default"), fake_model(tmp_path), EvaluationSettings(rerank=5))


def test_one_of_another_space_is_refused(tmp_path: Path) -> None:
    store = SnapshotStore(tmp_path)
    write_snapshot(store, images=unit_vectors(3, 16))
    model = replace(fake_model(tmp_path), reranker=Likes(lambda *_: 0.5, fits="9" * 64))
    with pytest.raises(BuildError, match="another space"):
        evaluate(store.open("default"), model, EvaluationSettings(rerank=5))
