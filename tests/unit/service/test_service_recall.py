"""ANN recall of live queries: what is checked, what counts as found, and nobody waits for it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from hivlp.index.candidates import Candidates
from hivlp.index.searcher import FoundItem
from hivlp.service.app import create_app
from hivlp.service.recall import RecallWatch, share_found
from hivlp.service.serving import ServedVersion
from hivlp.service.settings import Settings
from hivlp.service.watch_settings import RecallSettings, SpareSettings
from tests.unit.service.fakes_service import NAMES, VERSION, FakeSearcher, World
from tests.unit.service.serving_app import serving
from tests.unit.service.test_service_metrics import Samples, read

EVERY = RecallSettings(share=1.0, max_per_s=1_000)
WAIT_S = 30


class Missing(FakeSearcher):
    """An index whose plans never find what is the best at level 1; exact search does."""

    def step(self, searched, stage, queries, previous, *, mask=None):  # type: ignore[no-untyped-def]
        if stage.level > 1:
            return super().step(searched, stage, queries, previous, mask=mask)
        wider = replace(stage, keep=stage.keep + 1)
        (found,) = super().step(searched, wider, queries, previous, mask=mask)
        return [Candidates(found.rows[1:], found.scores[1:])]


class Checking:
    """A served world whose answers are checked, each before the next is asked for."""

    def __init__(self, client: httpx.Client, watch: RecallWatch) -> None:
        self.client = client
        self.watch = watch

    def ask(self, path: str = "text", **body: Any) -> dict[str, Any]:
        body = {"query": "red", **body} if path == "text" else body
        answer = self.client.post(f"/search/{path}", json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def samples(self) -> Samples:
        return read(self.client)

    def total(self, name: str) -> float:
        return sum(v for (n, _), v in self.samples().items() if n == f"hivlp_ann_recall_{name}")

    def until_done(self, count: int) -> Samples:
        end = time.monotonic() + WAIT_S
        while self.total("checks_total") + self.total("skipped_total") < count:
            assert time.monotonic() < end, "nothing was checked"
            time.sleep(0.005)
        return self.samples()

    def skipped(self) -> dict[str, float]:
        return {
            dict(labels)["reason"]: value
            for (name, labels), value in self.samples().items()
            if name == "hivlp_ann_recall_skipped_total"
        }


@contextmanager
def checking(world: World, recall: RecallSettings = EVERY) -> Iterator[Checking]:
    settings = Settings(recall=recall, spare=SpareSettings(core_share=1.0))
    app = create_app(settings, load=world.load)
    with serving(app) as client:
        yield Checking(client, app.state.hivlp.recall)


def of(samples: Samples, name: str, k: str, plan: str = "cascade") -> float:
    labels = {"index": "default", "plan": plan, "k": k}
    return samples[name, tuple(sorted(labels.items()))]


def test_a_live_query_is_answered_again_exactly_and_compared(world: World) -> None:
    with checking(world) as live:
        live.ask(k=3)
        samples = live.until_done(1)
        recent = live.watch.recent("default", VERSION)
    assert of(samples, "hivlp_ann_recall", "asked") == 1.0
    assert of(samples, "hivlp_ann_recall_wanted_total", "asked") == 3
    assert ("hivlp_ann_recall", (("index", "default"), ("k", "10"), ("plan", "cascade"))) not in (
        samples
    )
    assert (recent.mean, recent.checks) == (1.0, 1)
    assert samples["hivlp_ann_recall_cpu_seconds_total", ()] > 0


def test_what_a_plan_misses_shows_at_ten_and_at_the_k_asked() -> None:
    with checking(World(searcher=Missing())) as live:
        live.ask(k=3)
        live.until_done(1)
        live.ask(k=10)
        samples = live.until_done(2)
        recent = live.watch.recent("default", VERSION)
    assert of(samples, "hivlp_ann_recall_found_total", "asked") == 2 + 5
    assert of(samples, "hivlp_ann_recall_wanted_total", "asked") == 3 + len(NAMES)
    assert of(samples, "hivlp_ann_recall", "10") == pytest.approx(5 / 6)
    assert of(samples, "hivlp_ann_recall", "asked") == pytest.approx((2 / 3 + 5 / 6) / 2)
    assert recent.mean == pytest.approx((2 / 3 + 5 / 6) / 2)
    assert recent.checks == 2


def test_a_version_that_was_never_checked_has_no_recall(world: World) -> None:
    with checking(world) as live:
        assert math.isnan(live.watch.recent("default", "another").mean)
        assert live.watch.recent("nowhere", "another").checks == 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("similar", {"id": "red", "k": 3}),
        ("text", {"k": 4}),
        ("text", {"filter": {"field": "length", "range": {"gte": 4}}, "k": 3}),
        ("text", {"modality": "text", "k": 2}),
        ("vector", {"vector": [1.0] * 16, "k": 2}),
    ],
)
def test_every_kind_of_query_is_compared_with_its_own_exact_answer(
    path: str, body: dict[str, Any]
) -> None:
    with checking(World(searcher=Missing())) as live:
        best = live.ask(path, plan="exact", **body)["hits"]
        live.until_done(1)
        answer = live.ask(path, **body)
        samples = live.until_done(2)
        assert live.skipped() == {"unfit": 1}
    both = {hit["id"] for hit in best} & {hit["id"] for hit in answer["hits"]}
    labels = ("asked", answer["plan"])
    assert of(samples, "hivlp_ann_recall_wanted_total", *labels) == len(best)
    assert of(samples, "hivlp_ann_recall_found_total", *labels) == len(both)


@pytest.mark.parametrize(
    "body",
    [
        {"max_level": 1},
        {"plan": "exact"},
        {"offset": 1},
        {"min_score": -1.0},
        {"cascade": [{"level": 1, "keep": 20}]},
    ],
)
def test_an_answer_that_was_asked_to_be_another_says_nothing(
    world: World, body: dict[str, Any]
) -> None:
    with checking(world) as live:
        live.ask(**body)
        live.until_done(1)
        assert live.skipped() == {"unfit": 1}
        assert live.total("checks_total") == 0


def test_a_cached_answer_is_not_checked_again(world: World) -> None:
    with checking(world) as live:
        live.ask()
        live.until_done(1)
        assert live.ask()["cached"]
        live.until_done(2)
        assert live.skipped() == {"cached": 1}


def test_an_early_exit_is_told_apart(world: World) -> None:
    with checking(world) as live:
        live.ask(early_exit=True, k=2)
        samples = live.until_done(1)
    assert of(samples, "hivlp_ann_recall", "asked", "early_exit") == 1.0


class Held(FakeSearcher):
    """Whose exhaustive search takes until it is let go."""

    def hold(self) -> tuple[threading.Event, threading.Event]:
        self.entered, self.go_on = threading.Event(), threading.Event()
        return self.entered, self.go_on

    def exact(self, *given: Any, **more: Any) -> Candidates:
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        return super().exact(*given, **more)


def test_nobody_waits_for_a_check_and_meanwhile_no_other_is_begun() -> None:
    searcher = Held()
    entered, go_on = searcher.hold()
    with checking(World(searcher=searcher)) as live:
        live.ask(k=1)
        assert entered.wait(WAIT_S)
        assert live.ask(k=2)["returned"] == 2  # answered, though the check goes on
        assert live.skipped() == {"busy": 1}
        go_on.set()
        live.until_done(2)
        assert live.total("checks_total") == 1


def test_a_version_that_was_superseded_meanwhile_is_not_compared_with_its_successor() -> None:
    world = World()
    searcher = world.searcher
    with checking(world) as live:
        other = FakeSearcher(info=replace(searcher.info, version="next"))
        before = world.live.served

        def swap(_: int) -> None:
            world.live.served = ServedVersion(other, before.model)

        searcher.before = swap  # as soon as the live query is searched
        live.ask(k=1)
        live.until_done(1)
        assert live.skipped() == {"superseded": 1}


def test_a_check_that_fails_is_counted_and_the_next_one_runs(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    fail = [True]

    class Failing(FakeSearcher):
        def exact(self, *given: Any, **more: Any) -> Candidates:
            if fail.pop():
                raise RuntimeError("a bug")
            return super().exact(*given, **more)

    fail.insert(0, False)
    with checking(World(searcher=Failing())) as live:
        live.ask(k=1)
        live.until_done(1)
        assert live.skipped() == {"failed": 1}
        live.ask(k=2)
        live.until_done(2)
        assert live.total("checks_total") == 1
    assert "could not be checked" in caplog.text


def test_sides_that_are_too_large_to_search_exactly_are_left_out(world: World) -> None:
    with checking(world, EVERY.model_copy(update={"max_rows": 5})) as live:
        live.ask()
        live.until_done(1)
        assert live.skipped() == {"rows": 1}


def test_no_more_a_second_than_the_setting_allows(world: World) -> None:
    with checking(world, EVERY.model_copy(update={"max_per_s": 0.001})) as live:
        live.ask(k=1)
        live.until_done(1)
        live.ask(k=2)
        assert live.skipped() == {"rate": 1}


def test_it_can_be_switched_off(world: World) -> None:
    with checking(world, RecallSettings(share=0.0)) as live:
        live.ask()
        assert not live.watch.on
        assert live.total("skipped_total") == 0


def items(*scores: float) -> list[FoundItem]:
    return [FoundItem(f"i{place}", place, score) for place, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("answered", "best", "k", "expected"),
    [
        ([0.9, 0.8], [0.9, 0.8, 0.7], 2, (2, 2)),
        ([0.9, 0.7], [0.9, 0.8, 0.7], 2, (1, 2)),
        # Of equal ones any is right, also where rounding tells them apart.
        ([0.9, 0.5], [0.9, 0.5, 0.5], 2, (2, 2)),
        ([0.9, 0.5 - 5e-7], [0.9, 0.5], 2, (2, 2)),
        ([0.9, 0.5 - 5e-6], [0.9, 0.5], 2, (1, 2)),
        # Fewer there are than were asked for, or fewer were answered than there are.
        ([0.9], [0.9], 10, (1, 1)),
        ([0.9], [0.9, 0.8, 0.7], 3, (1, 3)),
        ([], [0.9], 1, (0, 1)),
        # The first k alone count.
        ([0.1, 0.2, 0.9], [0.9, 0.8, 0.7], 2, (0, 2)),
    ],
)
def test_what_scores_as_much_as_the_last_of_the_best_is_found(
    answered: Sequence[float], best: Sequence[float], k: int, expected: tuple[int, int]
) -> None:
    assert share_found(answered, items(*best), k) == expected


def test_what_may_exit_early_is_measured_and_says_nothing_of_a_version() -> None:
    """It promises the right item first, not the same ten: two versions differ by who allows it."""
    with checking(World(searcher=Missing())) as live:
        live.ask(k=3, early_exit=True)
        samples = live.until_done(1)
        assert live.watch.recent("default", VERSION).checks == 0
        live.ask(k=3)
        live.until_done(2)
        assert live.watch.recent("default", VERSION).checks == 1
    assert of(samples, "hivlp_ann_recall", "asked", "early_exit") == pytest.approx(2 / 3)


def test_a_window_too_small_to_judge_an_activation_by_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"recall_checks may be at most recall\.window"):
        Settings(recall=RecallSettings(window=99))
    Settings(recall=RecallSettings(window=99, share=0.0))
