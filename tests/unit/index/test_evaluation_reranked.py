"""Ranks after re-ranking: capped by the cascade, ties against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hivlp.index.cascade import PlanName
from hivlp.index.errors import BuildError
from hivlp.index.evaluation.evaluate import DIRECTIONS, EvaluationSettings, evaluate
from hivlp.index.evaluation.tables import tables
from hivlp.index.snapshot.manifest import ExitRecord, GateRecord, WidthRecord
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.encoder import RgbImage
from hivlp.models.levels import FloatArray, Modality, nested_prefix, normalise
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


def width(plan: PlanName, k: int) -> WidthRecord:
    """Texts find 10 pictures among 20, then 15, and 20 among 40, then 30."""
    keeps = (2 * k, 3 * k // 2) if plan == "cascade" else (2 * k,)
    return WidthRecord(
        searched="image", query="text", plan=plan, k=k, keeps=keeps, target=0.99,
        recall_chosen_on=1.0, recall_held_out=1.0, queries=9,
    )  # fmt: skip


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
    gate = GateRecord(level=1, weights=(0.0,) * 7, bias=0.0)
    early = ExitRecord(
        searched="image", query="text", signal="margin", loss="ann", most_lost=0.005,
        threshold=0.5, gates=(gate,), queries=9, full={}, tried=(),
    )  # fmt: skip
    write_snapshot(
        store,
        images=images,
        texts=texts,
        text_items=list(range(ITEMS)),
        widths=[width(plan, k) for plan in ("cascade", "funnel") for k in (10, 20)],
        exits=[early],
        metadata=[{"hue": f"{number % 7}"} for number in range(ITEMS)],
    )
    text, image = Given("text", noise=0.0), Given("image", noise=0.0)
    object.__setattr__(text, "table", texts)
    object.__setattr__(image, "table", images)
    model = replace(fake_model(tmp_path), text=text, image=image)

    def run(likes: Callable[[int, int], float], rerank: int = DEPTH, **more: Any) -> Any:
        given = {"at": (1, 5, 8), "directions": DIRECTIONS[:2], **more}
        settings = EvaluationSettings(None, rerank=rerank, quiet=True, resamples=0, **given)
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
    assert "re-ranked: the first 8 rows of a cascade, whose widths stand" in tables(run.report)


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


def systems(run: Any) -> Any:
    """What answered texts that search pictures."""
    return run.report.directions[0].systems


def test_asking_for_a_reranked_row_changes_no_other(measured: Callable[..., Any]) -> None:
    """The plans are those of a search for ten, however many are re-ranked; these have their own."""
    plain, beside = (measured(lambda text, image: 0.5, rerank=n) for n in (0, 20))
    assert systems(plain)["cascade"].keeps == (20, 15, 10)
    assert systems(beside)["cascade, re-ranked"].keeps == (40, 30, 20)
    assert list(systems(beside)) == [
        *("level 1", "level 2", "level 3"),
        *("cascade", "cascade, re-ranked", "funnel", "early exit"),
    ]
    for name, own in systems(plain).items():
        assert systems(beside)[name] == own
    early = [run.measurers(0)["text", "image"].early for run in (plain, beside)]
    assert early[0] == early[1] is not None
    assert plain.report.reranked == 0
    assert "re-ranked" not in tables(plain.report)


def test_what_is_reranked_was_found_by_the_wider_cascade(measured: Callable[..., Any]) -> None:
    """By a perfect one: as many as the cascade of twenty finds, more than that of ten does."""
    run = measured(lambda text, image: float(text == image), rerank=20)
    (tally, _) = run.tallies
    images = unit_vectors(ITEMS, 16)
    texts = normalise(images + 2.5 * unit_vectors(ITEMS, 16, seed=1))
    found = np.zeros((ITEMS, 2), bool)
    for i, text in enumerate(texts):
        for place, keeps in enumerate(((20, 15, 10), (40, 30, 20))):
            rows = np.arange(ITEMS)
            for dim, keep in zip((4, 8, 16), keeps, strict=True):
                query = nested_prefix(text[None], dim)[0]
                scores = nested_prefix(images[rows], dim) @ query
                rows = rows[np.argsort(-scores, kind="stable")[:keep]]
            found[i, place] = i in rows
    assert found[:, 0].sum() < found[:, 1].sum() < ITEMS
    assert (np.isfinite(tally.systems["cascade"].ranks) == found[:, 0]).all()
    again = tally.systems["cascade, re-ranked"].ranks
    assert (again[found[:, 1]] == 1).all()
    assert np.isinf(again[~found[:, 1]]).all()


def test_given_widths_may_be_narrower_than_what_was_to_be_reranked(
    measured: Callable[..., Any],
) -> None:
    run = measured(lambda text, image: float(text == image), rerank=20, keeps=((1, 15), (2, 12)))
    both = [systems(run)[name] for name in ("cascade", "cascade, re-ranked")]
    assert [own.keeps for own in both] == [(15, 12, 10)] * 2
    (tally, _) = run.tallies
    before, after = (tally.systems[n].ranks for n in ("cascade", "cascade, re-ranked"))
    assert (after == np.where(before <= 10, 1, before)).all()


def test_a_larger_k_is_planned_for_and_said(measured: Callable[..., Any]) -> None:
    run = measured(lambda text, image: 0.5, rerank=0, at=(1, 20))
    assert systems(run)["cascade"].keeps == (40, 30, 20)
    assert systems(run)["funnel"].keeps == (40, 20)
    assert run.report.results == 20
    assert "plans are those of searches for 20 results, the largest K" in tables(run.report)
    assert "plans" not in tables(measured(lambda text, image: 0.5).report)


def test_where_nothing_is_reranked_nothing_is_said_of_it(measured: Callable[..., Any]) -> None:
    run = measured(lambda text, image: 0.5, directions=DIRECTIONS[2:], group="hue")
    assert [(d.query, d.searched) for d in run.report.directions] == list(DIRECTIONS[2:])
    assert run.report.reranked == 0
    assert "re-ranked" not in tables(run.report)


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
