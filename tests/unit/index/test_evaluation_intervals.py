"""Intervals: as slow loops find them, wide where they must be, and paired."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.errors import BuildError
from hivlp.index.evaluation.against import differences
from hivlp.index.evaluation.bootstrap import Column, draws, interval, resampled
from hivlp.index.evaluation.figures import Figures
from hivlp.index.evaluation.measure import Measured, Scored
from hivlp.index.evaluation.ranks_file import RanksWriter, read_ranks
from hivlp.index.evaluation.report import Figure
from hivlp.index.evaluation.tally import Tally


def column(seed: int, folds: int = 1) -> Column:
    """Items of one to four queries each, about three in four of them right."""
    rng = np.random.default_rng(seed)
    items = np.repeat(np.arange(40), rng.integers(1, 5, 40))
    values = (rng.random(len(items)) < 0.75).astype(np.float64)
    return Column(values, items, items * folds // 40)


def plainly(columns: list[Column], resamples: int, seed: int) -> list[list[float]]:
    """The same with loops: every draw lists items, every item brings its queries."""
    rng = np.random.default_rng(seed)
    means: list[list[list[float]]] = [[[] for _ in columns] for _ in range(resamples)]
    for fold in sorted({int(f) for own in columns for f in own.folds}):
        inside = sorted({int(i) for own in columns for i in own.items[own.folds == fold]})
        picked = rng.integers(0, len(inside), (resamples, len(inside)))
        for draw in range(resamples):
            for place, own in enumerate(columns):
                values = [
                    value
                    for pick in picked[draw]
                    for value, item, at in zip(own.values, own.items, own.folds, strict=True)
                    if item == inside[pick] and at == fold
                ]
                means[draw][place].append(sum(values) / len(values))
    return [[float(np.mean(each)) for each in own] for own in means]


@pytest.mark.parametrize("folds", [1, 3])
def test_resampling_is_what_slow_loops_do(folds: int) -> None:
    columns = [column(1, folds), column(2, folds)]
    assert resampled(columns, 5, seed=3) == pytest.approx(np.array(plainly(columns, 5, 3)))


def test_every_draw_is_of_as_many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draws(np.random.default_rng(0), 50, 12)
    assert drawn.shape == (50, 12)
    assert (drawn.sum(axis=1) == 12).all()
    monkeypatch.setattr("hivlp.index.evaluation.bootstrap.BLOCK", 100)
    in_blocks = resampled([column(1)], 30, seed=5)
    assert in_blocks.shape == (30, 1)
    assert len(np.unique(in_blocks)) > 10


def test_an_interval_covers_as_often_as_it_says() -> None:
    """300 samples of 200 items with three equal queries each, of a share of .3: nominal 95 %."""
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(300):
        items = np.repeat(np.arange(200), 3)
        values = np.repeat(rng.random(200) < 0.3, 3).astype(np.float64)
        low, high = interval(resampled([Column(values, items, items * 0)], 200, seed=1)[:, 0])
        inside += low <= 0.3 <= high
    assert 0.90 <= inside / 300 <= 0.98  # observed 0.95; drawing single queries 0.73


def test_captions_of_one_picture_are_not_independent() -> None:
    """Five equal captions a picture: the interval is that of the pictures, not of the captions."""
    right = (np.arange(100) % 4 > 0).astype(np.float64)
    ones = Column(right, np.arange(100), np.zeros(100, np.int64))
    items = np.repeat(np.arange(100), 5)
    fives = Column(np.repeat(right, 5), items, items * 0)
    alone = interval(resampled([ones], 500)[:, 0])
    assert interval(resampled([fives], 500)[:, 0]) == pytest.approx(alone)


def test_without_queries_there_is_no_interval() -> None:
    low, high = interval(np.array([np.nan, np.nan]))
    assert np.isnan(low)
    assert np.isnan(high)


def tally(
    query: str, searched: str, ranks: list[float], items: int = 4, **others: list[float]
) -> Tally:
    """The cascade's ranks, and those of other systems: `level_2`."""
    own = Tally(query, searched, 9, {})  # type: ignore[arg-type]
    systems = {
        name.replace("_", " "): Scored(np.array(found), np.full(len(ranks), np.nan))
        for name, found in {"cascade": ranks, **others}.items()
    }
    rows = np.arange(len(ranks))
    own.add(Measured(rows, rows % items, systems, None, {}), 0)
    return own


def test_ar_is_the_mean_of_six_and_rsum_their_sum() -> None:
    both = [
        tally("text", "image", [1, 1, 4, 8, 20, 1, 2, float("inf")]),
        tally("image", "text", [1, 3, 6, 11]),
    ]
    found = Figures(both, (1, 5, 10), 200).summary()["cascade"]
    six = [3 / 8, 5 / 8, 6 / 8, 1 / 4, 2 / 4, 3 / 4]
    assert found.ar.value == pytest.approx(100 * np.mean(six), abs=1e-3)
    assert found.rsum.value == pytest.approx(100 * np.sum(six), abs=1e-2)
    assert found.ar.low is not None
    assert found.ar.high is not None
    assert found.ar.low < found.ar.value < found.ar.high
    assert found.rsum.low == pytest.approx(6 * found.ar.low, abs=0.01)


def test_what_a_system_loses_is_surer_than_what_it_finds() -> None:
    """One query in forty is lost by the cascade: the interval says so, and no more than that."""
    rng = np.random.default_rng(3)
    exact = [float(rank) for rank in rng.integers(1, 20, 40)]
    coarse = [20 - rank for rank in exact]
    lost = [99.0 if place == exact.index(1.0) else rank for place, rank in enumerate(exact)]
    ways = (("text", "image"), ("image", "text"))
    both = [tally(*way, lost, 40, level_2=exact, level_1=coarse) for way in ways]
    found = Figures(both, (1, 5, 10), 400).summary()
    assert found["level 2"].apart is None
    apart = found["cascade"].apart
    assert apart is not None
    assert apart.value == pytest.approx(-100 / 40, abs=1e-3)
    assert apart.low is not None
    assert apart.high is not None
    assert apart.low < apart.value <= apart.high <= 0
    ar = found["cascade"].ar
    assert ar.low is not None
    assert ar.high is not None
    assert apart.high - apart.low < 0.5 * (ar.high - ar.low)
    assert found["level 1"].apart is not None
    plain = Figures(both, (1, 5, 10), 0).summary()["cascade"].apart
    assert plain == Figure(apart.value)


def test_of_one_direction_alone_there_is_no_ar() -> None:
    assert Figures([tally("text", "image", [1, 2])], (1,), 10).summary() == {}


def ranks_file(path: Path, ranks: dict[str, list[float]]) -> Path:
    """Two captions a picture, systems by name; ANN recall is 1 / rank."""
    with RanksWriter(path) as writer:
        for system, own in ranks.items():
            found = np.array(own)
            items = [f"i{n // 2}" for n in range(len(own))]
            names = [f"i{n // 2}#{n % 2}" for n in range(len(own))]
            scored = Scored(found, 1 / found)
            writer.add(("text", "image"), system, 0, (names, items), scored)
    return path


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_what_is_written_is_read_again(tmp_path: Path, ending: str) -> None:
    path = ranks_file(tmp_path / f"r.{ending}", {"cascade": [1, 3, float("inf")], "funnel": [2]})
    rows = read_ranks(path).to_pylist()
    assert [row["rank"] for row in rows] == [1, 3, None, 2]
    assert rows[1] == {
        "query": "i0#1",
        "item": "i0",
        "from": "text",
        "to": "image",
        "system": "cascade",
        "rank": 3,
        "ann10": pytest.approx(1 / 3),
        "found": None,
    }
    assert [p.name for p in tmp_path.iterdir()] == [f"r.{ending}"]


def test_a_writing_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = ranks_file(tmp_path / "r.jsonl", {"cascade": [1]})
    before = path.read_bytes()
    with pytest.raises(KeyError), RanksWriter(path):
        raise KeyError
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_paired_difference_is_surer_than_either_figure(tmp_path: Path) -> None:
    """400 captions, of which the other loses each twentieth: far inside either's own interval."""
    rng = np.random.default_rng(0)
    ours = np.where(rng.random(400) < 0.5, 1.0, 7.0)
    theirs = np.where(np.arange(400) % 20 == 0, 7.0, ours)
    lost = float((ours != theirs).mean())
    left = ranks_file(tmp_path / "a.parquet", {"cascade": ours.tolist()})
    right = ranks_file(tmp_path / "b.jsonl", {"cascade": theirs.tolist()})
    (found,) = differences(left, right)
    figure = found.figures["R@1"]
    assert found.queries == 400
    assert figure.value == pytest.approx(100 * lost)
    assert figure.low is not None
    assert figure.high is not None
    assert 0 < figure.low < figure.value < figure.high
    own = interval(resampled([Column(ours == 1, np.arange(400) // 2, np.zeros(400, int))])[:, 0])
    assert (figure.high - figure.low) < 50 * (own[1] - own[0])


def test_the_same_ranks_differ_by_nothing(tmp_path: Path) -> None:
    path = ranks_file(tmp_path / "a.parquet", {"cascade": [1, 9, 2, float("inf")]})
    (found,) = differences(path, path)
    assert all((f.value, f.low, f.high) == (0, 0, 0) for f in found.figures.values())


def told(path: Path, found: dict[str, list[str] | None], **ranks: int) -> Path:
    """A ranks file that says what each query was answered with."""
    own = {"from": "text", "to": "image", "system": "cascade", "item": "x"}
    rows = [
        {"query": query, "rank": ranks.get(query, 1), "found": names, **own}
        for query, names in found.items()
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_the_share_of_answers_that_both_give_is_told_beside_what_each_found(
    tmp_path: Path,
) -> None:
    ours = told(tmp_path / "a.jsonl", {"q": ["a", "b", "c", "d"], "r": ["a"], "only": ["z"]}, q=7)
    theirs = told(tmp_path / "b.jsonl", {"r": ["a"], "q": ["d", "c", "x", "y"]})
    (found,) = differences(ours, theirs, at=(1, 10))
    assert found.queries == 2
    assert (found.ours["R@1"], found.theirs["R@1"]) == (50.0, 100.0)
    assert found.figures["R@1"].value == -50.0
    assert found.overlap10 is not None
    assert found.overlap10.value == pytest.approx(100 * (0.5 + 1.0) / 2)
    assert found.overlap10.low is not None


@pytest.mark.parametrize("unknown", [{"q": None}, {}])
def test_where_one_does_not_tell_its_answers_their_overlap_is_not_known(
    tmp_path: Path, unknown: dict[str, list[str] | None]
) -> None:
    ours = told(tmp_path / "a.jsonl", {"q": ["a"], "r": ["a"]})
    theirs = told(tmp_path / "b.jsonl", {"r": ["a"], "q": ["a"], **unknown})
    if not unknown:
        theirs = ranks_file(tmp_path / "b.parquet", {"cascade": [1]})
        ours = ranks_file(tmp_path / "a.parquet", {"cascade": [1]})
    (found,) = differences(ours, theirs, at=(1,))
    assert found.overlap10 is None


def test_only_queries_and_systems_that_both_have_are_compared(tmp_path: Path) -> None:
    left = ranks_file(tmp_path / "a.parquet", {"cascade": [1, 1, 1, 9], "funnel": [1]})
    right = ranks_file(tmp_path / "b.parquet", {"cascade": [9, 1], "level 1": [1]})
    (found,) = differences(left, right, at=(1,))
    assert (found.system, found.queries) == ("cascade", 2)
    assert found.figures["R@1"].value == 50.0
    (tmp_path / "c.jsonl").write_text(
        json.dumps({**dict.fromkeys(("query", "item", "from", "to", "system"), "x"), "rank": 1})
    )
    assert differences(left, tmp_path / "c.jsonl") == ()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("r.csv", "", "ends in neither .parquet nor .jsonl"),
        ("r.jsonl", "no json", "not readable"),
        ("r.parquet", "no parquet", "not readable"),
        ("r.jsonl", '{"query": "a"}', "no column 'item'"),
        ("gone.jsonl", None, "not readable"),
        (
            "r.jsonl",
            '{"query": "a", "item": "a", "from": "t", "to": "i", "system": "s", "rank": 0}',
            "rank 0; the first is 1",
        ),
        (
            "r.jsonl",
            '{"query": "a", "item": "a", "from": "t", "to": "i", "system": "s", "rank": "x"}',
            "of another type",
        ),
    ],
)
def test_a_file_that_is_no_ranks_file_is_refused(
    tmp_path: Path, name: str, content: str | None, words: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(BuildError, match=words):
        read_ranks(tmp_path / name)
