"""The report page: everything in one file, nothing from outside unescaped, plots that are right."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from hivlp.index.evaluation.page import page, page_path, write_page
from hivlp.index.evaluation.plots import Dot, Line, dot_plot, line_plot
from hivlp.index.evaluation.report import (
    DifferenceReport,
    DirectionReport,
    EvaluationReport,
    Figure,
    SummaryReport,
    SystemReport,
    ThresholdReport,
    WidthReport,
)
from hivlp.index.evaluation.samples import EACH, Sample, Shown, picked, thumbnail
from hivlp.index.snapshot.uploads import PictureRoots

EVIL = "<script>alert(1)</script>\"'&"


def report(name: str = "default") -> EvaluationReport:
    recalls = {1: Figure(0.5, 0.4, 0.6), 10: Figure(0.9, 0.8, 0.95)}
    plain = SystemReport(recalls, Figure(0.7, 0.6, 0.8))
    direction = DirectionReport(
        query="text",
        searched="image",
        queries=40,
        left_out=2,
        rows=90,
        systems={
            "level 1": plain,
            "cascade": SystemReport(recalls, Figure(0.99), (50, 20, 10)),
            "cascade, re-ranked": SystemReport(recalls, None),
            "early exit": SystemReport(
                recalls, Figure(0.8), shares={1: 0.3, 2: 0.2, 3: 0.5}, threshold=0.9
            ),
        },
        by_width={1: {10: 0.5, 50: 0.9}},
        width_needed={90: 71},
        thresholds=tuple(
            ThresholdReport(t, {1: 1 - t, 2: 0.0, 3: t}, {1: 0.5 * t, 10: 0.9}, t)
            for t in (0.99, 0.9, 0.5)
        ),
        widths=tuple(
            WidthReport(level, keep, (keep, 20, 10), {1: 0.4, 10: 0.8}, 0.9, 40)
            for level in (1, 2)
            for keep in (10, 50, 90)
        ),
    )
    both = SummaryReport(Figure(70.0, 65.0, 75.0), Figure(420.0))
    apart = (
        DifferenceReport("text", "image", "level 1", 40, {"R@1": Figure(-0.5, -2.0, 1.0)}),
        DifferenceReport("text", "image", "cascade", 40, {"R@1": Figure(1.5, 0.2, 2.5)}),
        DifferenceReport(None, None, "cascade", 80, {"AR": Figure(0.25)}),
    )
    return EvaluationReport(
        index=name,
        version="v1",
        model=name,
        items=90,
        group=name,
        protocol="full gallery",
        at=(1, 10),
        unread=1,
        directions=(direction,),
        summary={"level 3": both, "cascade": replace(both, apart=Figure(-0.75, -1.5, -0.1))},
        failures=3,
        reranked=20,
        against=name,
        differences=apart,
    )


def samples(text: str = "a red heart") -> list[Sample]:
    picture = "data:image/jpeg;base64,AAAA"
    hits = ((Shown(text, None, picture), True), (Shown("b", None, None), False))
    return [Sample("text", "image", Shown("q", text, None), rank, hits) for rank in (1, 7, None)]


class Tags(HTMLParser):
    """The tags of a document, and those that are open at its end."""

    VOID = ("meta", "img", "path", "circle", "rect")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def parsed(document: str) -> Tags:
    tags = Tags()
    tags.feed(document)
    tags.close()
    assert tags.open == []
    return tags


def test_the_page_shows_figures_intervals_and_samples() -> None:
    document = page(report(), samples())
    words = re.sub(r"<[^>]+>", " ", document)
    for word in ("full gallery", "40 queries", "2 without a right row", "70.0", "65.0–75.0"):
        assert word in words
    for word in ("cascade, re-ranked", "keeps 50, 20, 10", "found first", "found at 7"):
        assert word in words
    for word in ("not found", "+1.50", "no picture", "sampled rows", "Early exit by its threshold"):
        assert word in words
    assert document.count("<svg") == 6


def test_differences_are_bold_where_their_interval_leaves_out_nothing() -> None:
    document = page(report(), [])
    assert document.count('class="apart"') == 2
    assert '<span class="apart">-0.75<small>-1.50 to -0.10</small></span>' in document
    assert '<span class="apart">+1.50<small>+0.20 to +2.50</small></span>' in document
    assert "<td>-0.50<small>-2.00 to +1.00</small></td>" in document
    assert document.index("<th>AR</th>") < document.index("+0.25") < document.index("-0.50")


def test_nothing_from_outside_is_unescaped_and_nothing_is_loaded() -> None:
    tags = parsed(page(report(EVIL), samples(EVIL)))
    assert {tag for tag, _ in tags.seen}.isdisjoint({"script", "link", "iframe", "object", "a"})
    for tag, attributes in tags.seen:
        assert not any(name.startswith("on") for name in attributes), (tag, attributes)
        assert "href" not in attributes
        if tag == "img":
            assert (attributes["src"] or "").startswith("data:image/jpeg;base64,")
    policy = next(own for tag, own in tags.seen if tag == "meta" and "http-equiv" in own)
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_an_evaluation_of_nothing_is_a_page_too() -> None:
    empty = EvaluationReport(
        index="a",
        version="v",
        model="m",
        items=0,
        group=None,
        protocol="full gallery",
        at=(1,),
        unread=0,
        directions=(),
        summary={},
    )
    assert "<h1>Evaluation of a</h1>" in page(empty, [])
    parsed(page(empty, []))


@pytest.mark.parametrize(
    ("given", "file"), [("out", "out/index.html"), ("a/b.html", "a/b.html"), ("x.HTM", "x.HTM")]
)
def test_a_folder_gets_an_index_page(given: str, file: str, tmp_path: Path) -> None:
    assert page_path(Path(given)) == Path(file)
    write_page(tmp_path / file, report(), samples())
    assert [p.name for p in (tmp_path / file).parent.iterdir()] == [Path(file).name]


def svg(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + 6])


def test_a_line_goes_through_its_points() -> None:
    """On a log scale ten to a hundred is as far as a hundred to a thousand; more is higher."""
    line = Line("R@1", [(10, 0.5), (100, 0.75), (1000, 1.0)], 0)
    drawn = svg(line_plot("title", [line], "K1", log=True, mark=(100, "as planned")))
    marks = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawn.iter("circle")]
    (x0, y0), (x1, y1), (x2, y2) = marks
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert y0 > y1 > y2
    (path,) = [p.attrib["d"] for p in drawn.iter("path") if "line" in p.attrib["class"]]
    assert path == "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in marks)
    (mark,) = [p.attrib["d"] for p in drawn.iter("path") if p.attrib["class"] == "mark"]
    assert mark.startswith(f"M{x1:.1f} ")
    titles = [c.findtext("title") for c in drawn.iter("circle")]
    assert titles[1] == "R@1: 75.0% at 100"


@pytest.mark.parametrize("points", [[(5.0, 0.0)], [(0.0, 1.0), (1.0, 1.0)], [(0.97, 0.4)] * 2])
def test_few_points_make_a_plot_too(points: list[tuple[float, float]]) -> None:
    drawn = svg(line_plot("t", [Line("a", points, 0)], "x"))
    assert len(list(drawn.iter("circle"))) == len(points)
    for element in drawn.iter("circle"):
        assert 0 <= float(element.attrib["cx"]) <= 480
        assert 0 <= float(element.attrib["cy"]) <= 260


def test_dots_stand_as_high_as_their_values_and_say_their_intervals() -> None:
    dots = {"level 1": [Dot(0.5, 0.4, 0.6), Dot(1.0)], "cascade": [Dot(0.0, 0.0, 0.1), Dot(0.25)]}
    drawn = svg(dot_plot("t", dots, ["R@1", "R@10"]))
    half, whole, none, quarter = (float(c.attrib["cy"]) for c in drawn.iter("circle"))
    assert none - half == pytest.approx((none - whole) / 2, abs=0.2)
    assert none - quarter == pytest.approx((none - whole) / 4, abs=0.2)
    whiskers = [p.attrib for p in drawn.iter("path") if "whisker" in p.attrib["class"]]
    assert [own["class"] for own in whiskers] == ["whisker s0", "whisker s0"]
    top, foot = (none - share * (none - whole) for share in (0.6, 0.4))
    ends = re.findall(r"[\d.]+", whiskers[0]["d"])[1:]
    assert [float(end) for end in ends] == pytest.approx([foot, top], abs=0.2)
    assert drawn.findtext("circle/title") == "level 1, R@1: 50.0% (40.0% to 60.0%)"


@pytest.mark.parametrize(
    ("least", "ticks"),
    [
        (0.05, ["0%", "20%", "40%", "60%", "80%", "100%"]),
        (0.37, ["20%", "40%", "60%", "80%", "100%"]),
        (0.55, ["50%", "60%", "70%", "80%", "90%", "100%"]),
        (0.99, ["80%", "90%", "100%"]),
    ],
)
def test_a_scale_of_shares_begins_below_all_and_ends_at_all(least: float, ticks: list[str]) -> None:
    drawn = svg(dot_plot("t", {"a": [Dot(least), Dot(1.0)]}, ["x", "y"]))
    assert [text.text for text in drawn.iter("text")][: len(ticks)] == ticks


def test_some_right_and_some_wrong_answers_are_picked() -> None:
    ranks = np.array([1.0] * 30 + [2.0, np.inf, 40.0, 3.0, 9.0])
    chosen = picked(ranks)
    assert (ranks[chosen] == 1).sum() == EACH
    assert (ranks[chosen] > 1).sum() == EACH
    assert len(picked(np.array([1.0, 5.0]))) == 2
    assert len(picked(np.array([]))) == 0


def test_a_thumbnail_is_small_and_none_of_what_is_gone(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (900, 600, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    found = thumbnail(PictureRoots(tmp_path, None), "a.png")
    assert found is not None
    assert found.startswith("data:image/jpeg;base64,")
    assert len(found) < 60_000
    assert thumbnail(PictureRoots(tmp_path, None), "gone.png") is None
    assert thumbnail(PictureRoots(tmp_path, None), "../a.png") is None
