"""Searching a level goes on while the encoder works on the next: proven with events, not clocks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import httpx
import numpy as np
import pytest

from hivlp.index.candidates import Candidates
from hivlp.index.cascade import Plan, PlanRequest
from hivlp.index.early_exit import SIGNALS, ExitRule, Gate
from hivlp.index.plans import make_plan
from hivlp.models.levels import EarlyOutput
from hivlp.service.app import create_app
from hivlp.service.overlap import EarlyOutputs, PlanRun, levels_wanted, run_plan
from hivlp.service.settings import Settings, Threads
from hivlp.service.timeline import Span, Timeline, overlap_saved_s
from tests.unit.service.fakes_service import (
    LEVELS,
    FakeEncoder,
    FakeSearcher,
    World,
    early_outputs,
)
from tests.unit.service.serving_app import serving

WAIT_S = 20
CASCADE = PlanRequest(searched="image", query="text", need=3, name="cascade")


class Rendezvous:
    """Both sides of one level wait for each other: passed only if they run at once."""

    def __init__(self) -> None:
        self.encoding = {2: threading.Event(), 3: threading.Event()}
        self.searching = {1: threading.Event(), 2: threading.Event()}

    def before_encode(self, level: int) -> None:
        if level in self.encoding:
            self.encoding[level].set()
            assert self.searching[level - 1].wait(WAIT_S), f"search {level - 1} never began"

    def before_search(self, level: int) -> None:
        if level in self.searching:
            self.searching[level].set()
            assert self.encoding[level + 1].wait(WAIT_S), f"encode {level + 1} never began"


def test_each_search_runs_while_the_next_stage_is_computed() -> None:
    meet = Rendezvous()
    encoder = FakeEncoder("text", before=meet.before_encode)
    searcher = FakeSearcher(before=meet.before_search)
    plan = searcher.plan(CASCADE)
    timeline = Timeline()
    with ThreadPoolExecutor(1) as ahead:
        outputs = encoder.encode(encoder.prepare(["red"]))
        stream = early_outputs(outputs, levels_wanted(plan), ahead, timeline)
        found = run_plan(PlanRun(searcher, plan, "image", timeline), stream)
    assert searcher.searched == [1, 2, 3]
    assert encoder.encoded == [1, 2, 3]
    assert found.level == 3
    assert overlap_saved_s(timeline.spans) > 0


def test_over_http_search_and_encoder_overlap_when_requests_are_few() -> None:
    meet = Rendezvous()
    world = World()
    with serving(create_app(Settings(threads=Threads(workers=2)), load=world.load)) as client:
        world.text.before = meet.before_encode
        world.searcher.before = meet.before_search
        answer = client.post("/search/text", json={"query": "red", "plan": "cascade"}).json()
        stages = {(s["name"], s["level"]): s for s in answer["stages"]}
        for level in (1, 2):
            searching, encoding = stages["search", level], stages["encode", level + 1]
            assert encoding["start_ms"] < searching["start_ms"] + searching["duration_ms"]
            assert searching["start_ms"] < encoding["start_ms"] + encoding["duration_ms"]
        saved = _metric(client, "hivlp_overlap_saved_seconds_total")
    assert saved > 0


def test_the_encoder_does_not_wait_for_a_slow_search() -> None:
    last_began = threading.Event()
    encoder = FakeEncoder("text", before=lambda level: last_began.set() if level == 3 else None)
    searcher = FakeSearcher(before=lambda level: None if level > 1 else _must(last_began))
    with ThreadPoolExecutor(1) as ahead:
        stream = early_outputs(encoder.encode(encoder.prepare(["red"])), 3, ahead, Timeline())
        run_plan(PlanRun(searcher, searcher.plan(CASCADE), "image", Timeline()), stream)
    assert searcher.searched == encoder.encoded == [1, 2, 3]


def test_in_turn_nothing_overlaps_and_the_answer_is_the_same() -> None:
    encoder, searcher = FakeEncoder("text"), FakeSearcher()
    plan = searcher.plan(CASCADE)
    found = []
    for ahead in (None, ThreadPoolExecutor(1)):
        timeline = Timeline()
        stream = early_outputs(encoder.encode(encoder.prepare(["red"])), 3, ahead, timeline)
        found.append(run_plan(PlanRun(searcher, plan, "image", timeline), stream))
        if ahead is None:
            assert overlap_saved_s(timeline.spans) == 0
            encodes = [s for s in timeline.spans if s.name == "encode"]
            searches = [s for s in timeline.spans if s.name == "search"]
            assert all(e.end_s <= s.start_s for e, s in zip(encodes, searches, strict=True))
        else:
            ahead.shutdown()
    in_turn, at_once = found
    assert in_turn.candidates.rows.tolist() == at_once.candidates.rows.tolist()
    assert in_turn.candidates.scores.tolist() == at_once.candidates.scores.tolist()


def test_one_core_never_overlaps() -> None:
    world = World()
    names: set[str] = set()
    world.text.before = lambda _: names.add(threading.current_thread().name)
    with serving(create_app(Settings(threads=Threads(workers=1)), load=world.load)) as client:
        assert client.post("/search/text", json={"query": "red"}).status_code == 200
    assert len(names) == 1
    assert names.pop().startswith("hivlp-search")


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("max_level", [1, 2, 3])
def test_no_stage_is_computed_beyond_what_the_plan_reads(max_level: int, overlapped: bool) -> None:
    encoder, searcher = FakeEncoder("text"), FakeSearcher()
    request = PlanRequest(
        searched="image", query="text", need=3, name="cascade", max_level=max_level
    )
    plan = searcher.plan(request)
    timeline = Timeline()
    with ThreadPoolExecutor(2) as pool:
        ahead = pool if overlapped else None
        outputs = encoder.encode(encoder.prepare(["red"]))
        stream = early_outputs(outputs, levels_wanted(plan), ahead, timeline)
        found = run_plan(PlanRun(searcher, plan, "image", timeline), stream)
        stream.close()
    assert encoder.encoded == list(range(1, max_level + 1))
    assert found.level == max_level
    assert encoder.closed == 1


def test_leaving_early_lets_a_running_stage_end_and_begins_no_other() -> None:
    began, hold = threading.Event(), threading.Event()

    def before(level: int) -> None:
        if level == 2:
            began.set()
            assert hold.wait(WAIT_S)

    encoder = FakeEncoder("text", before=before)
    with ThreadPoolExecutor(1) as ahead:
        stream = early_outputs(encoder.encode(encoder.prepare(["red"])), 3, ahead, Timeline())
        next(stream)
        assert began.wait(WAIT_S)
        stream.close()
        assert encoder.closed == 0
        hold.set()
    assert encoder.encoded == [1, 2]
    assert encoder.closed == 1


def test_an_encoder_that_fails_ahead_fails_the_search() -> None:
    def before(level: int) -> None:
        if level == 2:
            raise RuntimeError("stage 2 broke")

    encoder, searcher = FakeEncoder("text", before=before), FakeSearcher()
    with ThreadPoolExecutor(1) as ahead:
        stream = early_outputs(encoder.encode(encoder.prepare(["red"])), 3, ahead, Timeline())
        with pytest.raises(RuntimeError, match="stage 2 broke"):
            run_plan(PlanRun(searcher, searcher.plan(CASCADE), "image", Timeline()), stream)
    assert searcher.searched == [1]


def test_a_funnel_encodes_fully_and_cuts_its_queries_from_the_finest() -> None:
    encoder, searcher = FakeEncoder("text"), FakeSearcher()
    request = PlanRequest(searched="image", query="text", need=3, name="funnel")
    plan = searcher.plan(request)
    order: list[str] = []
    encoder.before = lambda level: order.append(f"encode {level}")
    searcher.before = lambda level: order.append(f"search {level}")
    stream = early_outputs(encoder.encode(encoder.prepare(["red"])), 3, None, Timeline())
    found = run_plan(PlanRun(searcher, plan, "image", Timeline()), stream)
    assert order == ["encode 1", "encode 2", "encode 3", "search 1", "search 3"]
    assert found.candidates.rows[0] == 0


def test_per_exit_levels_are_queried_by_their_own_outputs() -> None:
    searcher = FakeSearcher()
    info = searcher.info
    searcher.info = type(info)(
        **{field: getattr(info, field) for field in info.__slots__ if field != "gallery"},
        gallery="per_exit",
    )
    encoder = FakeEncoder("text")
    finer = list(encoder.encode(encoder.prepare(["green"])))
    coarse = next(encoder.encode(encoder.prepare(["red"])))
    outputs = iter([EarlyOutput(1, coarse.vectors), *finer[1:]])
    plan = searcher.plan(PlanRequest(searched="image", query="text", need=1, name="funnel"))
    found = run_plan(PlanRun(searcher, plan, "image", Timeline()), outputs)
    assert found.queries[1].tolist() == coarse.vectors.tolist()


def test_overlap_is_the_time_both_were_at_work() -> None:
    spans = [
        Span("encode", 1, 0.0, 1.0),
        Span("encode", 2, 1.0, 3.0),
        Span("search", 1, 1.5, 2.0),
        Span("search", 2, 3.0, 4.0),
        Span("metadata", None, 0.0, 9.0),
    ]
    assert overlap_saved_s(spans) == pytest.approx(0.5)


def _must(event: threading.Event) -> None:
    assert event.wait(WAIT_S), "never came"


def _metric(client: httpx.Client, name: str) -> float:
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[-1])
    raise AssertionError(f"{name} is not there")


class SureSearcher(FakeSearcher):
    """Finds twelve rows at every level."""

    def step(self, searched, stage, queries, previous, *, mask=None):  # type: ignore[no-untyped-def]
        self.before(stage.level)
        self.searched.append(stage.level)
        scores = np.linspace(1, 0, 12, dtype=np.float32)
        return [Candidates(np.arange(12), scores).top(stage.keep)]


def sure_plan(level: int) -> Plan:
    """A cascade that stops at a level."""
    asked = PlanRequest("image", "text", need=3, early_exit=True)
    rule = ExitRule(0.5, {level: Gate((0.0,) * len(SIGNALS), 9.0)})
    return make_plan(asked, LEVELS, {}, 12, exits=rule)


@pytest.mark.parametrize("level", [1, 2])
def test_stages_after_an_early_exit_are_never_computed(level: int) -> None:
    encoder, searcher = FakeEncoder("text"), SureSearcher()
    outputs = encoder.encode(encoder.prepare(["red"]))
    with closing(early_outputs(outputs, 3, None, Timeline())) as stream:
        found = run_plan(PlanRun(searcher, sure_plan(level), "image", Timeline()), stream)
    assert found.level == level
    assert searcher.searched == encoder.encoded == list(range(1, level + 1))
    assert encoder.closed == 1


def test_an_early_exit_leaves_the_stage_that_runs_ahead_to_end_and_no_other_to_begin() -> None:
    began, answered = threading.Event(), threading.Event()

    def before(level: int) -> None:
        if level > 1:
            began.set()
            _must(answered)

    encoder = FakeEncoder("text", before=before)
    searcher = SureSearcher(before=lambda _: _must(began))
    outputs = encoder.encode(encoder.prepare(["red"]))
    with ThreadPoolExecutor(1) as ahead:
        with closing(early_outputs(outputs, 3, ahead, Timeline())) as stream:
            found = run_plan(PlanRun(searcher, sure_plan(1), "image", Timeline()), stream)
        answered.set()
    assert (found.level, searcher.searched) == (1, [1])
    assert encoder.encoded == [1, 2]
    assert encoder.closed == 1


def test_the_first_stage_runs_while_the_plan_is_made_and_the_second_waits_for_it() -> None:
    first, second = threading.Event(), threading.Event()
    encoder = FakeEncoder("text", before=lambda level: (first if level == 1 else second).set())
    with ThreadPoolExecutor(1) as ahead:
        outputs = encoder.encode(encoder.prepare(["red"]))
        with closing(EarlyOutputs(outputs, ahead, Timeline())) as early:
            assert first.wait(WAIT_S)  # nobody has said yet what is wanted
            assert not second.is_set()
            early.want(2)
            assert [output.level for output in early] == [1, 2]
    assert encoder.encoded == [1, 2]


def test_a_plan_that_can_not_be_made_stops_the_encoder_and_frees_its_thread() -> None:
    world = World()
    with serving(create_app(Settings(threads=Threads(workers=2)), load=world.load)) as client:
        body = {"query": "red", "plan": "cascade", "filter": {"field": "nothing", "eq": 1}}
        for _ in range(6):  # more often than there are threads ahead
            assert client.post("/search/text", json=body).status_code in (400, 422)
        answer = client.post("/search/text", json={"query": "red", "plan": "cascade"})
        assert answer.json()["hits"][0]["id"] == "red"
    assert world.text.encoded.count(2) == 1
