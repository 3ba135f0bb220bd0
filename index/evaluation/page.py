"""An evaluation as one HTML file: tables, plots and sample results, nothing loaded from elsewhere.

Notable: ids, captions and names come from a corpus that anyone may have written. All of it is
escaped, and the page's own policy forbids scripts and everything that isn't in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from hivlp.index.evaluation.figures import finest
from hivlp.index.evaluation.plots import COLOURS, Dot, Line, dot_plot, line_plot
from hivlp.index.evaluation.report import (
    DifferenceReport,
    DirectionReport,
    EvaluationReport,
    Figure,
    SystemReport,
    ThresholdReport,
    WidthReport,
)
from hivlp.index.evaluation.reranked import CASCADE
from hivlp.index.evaluation.samples import Sample, Shown
from hivlp.index.evaluation.tables import direction_title, head
from hivlp.index.evaluation.tally import EARLY

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
ANN_COLOUR, OTHER_COLOUR = 3, 4


def write_page(path: Path, report: EvaluationReport, samples: Sequence[Sample]) -> None:
    """Write the page, under another name until it is whole. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(page(report, samples), encoding="utf-8")
    partial.replace(path)


def page_path(given: Path) -> Path:
    """The file that a path names: itself where it ends in .html, else `index.html` in it."""
    return given if given.suffix.lower() in (".html", ".htm") else given / "index.html"


def page(report: EvaluationReport, samples: Sequence[Sample]) -> str:
    """The whole document."""
    title = f"{report.index} {report.version}"
    body = "".join(_body(report, samples))
    style = files("hivlp.index.evaluation").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>Evaluation of {escape(title)}</title><style>{style}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _body(report: EvaluationReport, samples: Sequence[Sample]) -> Iterator[str]:
    yield f"<h1>Evaluation of {escape(report.index)}</h1>"
    yield from (f'<p class="soft">{escape(line)}</p>' for line in head(report))
    if report.summary:
        yield "<h2>Both directions</h2>" + _summary(report)
    if report.against is not None:
        yield f"<h2>Less {escape(report.against)}</h2>" + _differences(report)
    for direction in report.directions:
        yield f"<h2>{_way(direction.query, direction.searched)}</h2>"
        yield f'<p class="soft">{escape(direction_title(direction))}</p>'
        yield _systems(direction, report.at)
        yield f'<div class="plots">{"".join(_plots(direction, report.at))}</div>'
        if direction.width_needed:
            yield _needed(direction.width_needed)
        own = [s for s in samples if (s.query, s.searched) == (direction.query, direction.searched)]
        if own:
            yield "<h3>Some answers of the cascade</h3>"
            yield f'<div class="card">{"".join(map(_sample, own))}</div>'
    yield _footer(report)


def _way(query: str, searched: str) -> str:
    words = {"text": "Texts", "image": "Pictures"}
    return f"{words[query]} that search {words[searched].lower()}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already; each with its own <td>."""
    top = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="card wide">{table}</div>'


def _summary(report: EvaluationReport) -> str:
    exact = finest(report.summary)
    rows = [
        [
            _name(name),
            _cell(own.ar, 1.0),
            _cell(own.rsum, 1.0),
            *([] if exact is None else [f"<td>{_apart(own.apart)}</td>"]),
        ]
        for name, own in report.summary.items()
    ]
    ks = ", ".join(map(str, report.at))
    heads = ["", f"AR, mean of R@{ks} both ways", "RSUM, their sum"]
    return _table(heads if exact is None else [*heads, f"AR less {exact}'s, paired"], rows)


def _differences(report: EvaluationReport) -> str:
    """AR of both directions, then each direction's own."""
    note = (
        '<p class="note">Points of a hundred, paired by query. Bold: the 95 % interval leaves out '
        "0.</p>"
    )
    ways = dict.fromkeys((own.query, own.searched) for own in report.differences)
    tables = []
    for query, searched in sorted(ways, key=lambda way: way[0] is not None):
        own = [d for d in report.differences if (d.query, d.searched) == (query, searched)]
        if query is not None and searched is not None:
            tables.append(f"<h3>{_way(query, searched)}</h3>")
        tables.append(_apart_table(own))
    return note + "".join(tables)


def _apart_table(found: Sequence[DifferenceReport]) -> str:
    names = list(dict.fromkeys(name for own in found for name in own.figures))
    rows = [
        [
            _name(own.system),
            *(f"<td>{_apart(own.figures.get(name))}</td>" for name in names),
            f"<td>{own.queries:,}</td>",
        ]
        for own in found
    ]
    return _table(["", *names, "queries"], rows)


def _apart(figure: Figure | None) -> str:
    if figure is None:
        return "–"
    if figure.low is None or figure.high is None:
        return f"{figure.value:+.2f}"
    said = f"{figure.value:+.2f}<small>{figure.low:+.2f} to {figure.high:+.2f}</small>"
    return f'<span class="apart">{said}</span>' if figure.low > 0 or figure.high < 0 else said


def _systems(direction: DirectionReport, at: Sequence[int]) -> str:
    heads = ["", *(f"R@{k}" for k in at), "ANN@10", ""]
    rows = [
        [
            _name(name),
            *(_cell(own.recalls[k], 100.0) for k in at),
            "<td>–</td>" if own.ann10 is None else _cell(own.ann10, 100.0),
            f'<td class="words">{escape(_said(own))}</td>',
        ]
        for name, own in direction.systems.items()
    ]
    return _table(heads, rows)


def _said(own: SystemReport) -> str:
    if own.keeps:
        return "keeps " + ", ".join(f"{keep:,}" for keep in own.keeps)
    if own.shares is not None:
        shares = ", ".join(f"{share:.1%} by level {n}" for n, share in own.shares.items())
        return f"answered {shares}"
    return ""


def _needed(widths: Mapping[int, int]) -> str:
    cells = "".join(f"<td>{width:,}</td>" for width in widths.values())
    table = _table(["rows", *(f"{size:,}" for size in widths)], [[_name("K1"), cells]])
    return (
        "<h3>The K1 that the gallery's size asks for</h3>"
        '<p class="note">What level 1 must keep to hold .99 of the exact top 10, in galleries of '
        f"sampled rows.</p>{table}"
    )


def _name(name: str) -> str:
    return f'<td class="system">{escape(name)}</td>'


def _cell(figure: Figure, times: float) -> str:
    value = f"{times * figure.value:.1f}"
    if figure.low is None or figure.high is None:
        return f"<td>{value}</td>"
    return f"<td>{value}<small>{times * figure.low:.1f}–{times * figure.high:.1f}</small></td>"


def _plots(direction: DirectionReport, at: Sequence[int]) -> Iterator[str]:
    names = [f"R@{k}" for k in at]
    yield dot_plot(
        "Recall, level by level and plan by plan",
        {name: [_dot(own.recalls[k]) for k in at] for name, own in direction.systems.items()},
        names,
    )
    for level in sorted({width.level for width in direction.widths}):
        yield _width_plot(direction, [w for w in direction.widths if w.level == level], at)
    yield from _exit_plots(direction, at)
    if any(len(widths) > 1 for widths in direction.by_width.values()):
        lines = [
            Line(f"level {n}", list(own.items()), place % COLOURS)
            for place, (n, own) in enumerate(direction.by_width.items())
        ]
        yield line_plot("Share of the exact top 10 among a level's first K", lines, "K", log=True)


def _dot(figure: Figure) -> Dot:
    return Dot(figure.value, figure.low, figure.high)


def _curves(
    points: Sequence[tuple[float, ThresholdReport | WidthReport]], at: Sequence[int]
) -> list[Line]:
    """R@K and ANN recall by a number, in the colours that they have everywhere."""
    ordered = sorted(points, key=lambda point: point[0])
    lines = [
        Line(f"R@{k}", [(x, own.recalls[k]) for x, own in ordered], place % ANN_COLOUR)
        for place, k in enumerate(at)
    ]
    ann = [(x, own.ann10) for x, own in ordered]
    return [*lines, Line("ANN@10", ann, ANN_COLOUR, dashed=True)]


def _width_plot(
    direction: DirectionReport, widths: Sequence[WidthReport], at: Sequence[int]
) -> str:
    level = widths[0].level
    planned = direction.systems[CASCADE].keeps
    return line_plot(
        f"The cascade by K{level}, what level {level} keeps: {widths[0].queries:,} queries",
        _curves([(float(width.keep), width) for width in widths], at),
        f"K{level}",
        log=True,
        mark=(float(planned[level - 1]), "as planned") if len(planned) > level else None,
    )


def _exit_plots(direction: DirectionReport, at: Sequence[int]) -> Iterator[str]:
    """By threshold, and by the share that stops early: two views of one thing."""
    points = direction.thresholds
    own = direction.systems.get(EARLY)
    if len(points) < 2 or own is None or own.shares is None or own.threshold is None:
        return
    last = max(own.shares)
    early = sorted((point.threshold, 1 - point.shares[last]) for point in points)
    curves = _curves([(point.threshold, point) for point in points], at)
    yield line_plot(
        "Early exit by its threshold",
        [Line("answered early", early, OTHER_COLOUR), curves[0], curves[-1]],
        "threshold",
        mark=(own.threshold, "as calibrated"),
    )
    yield line_plot(
        "Recall by the share answered early",
        _curves([(1 - point.shares[last], point) for point in points], at),
        "share of queries that an early level answers",
        span=(0.0, 1.0),
        mark=(1 - own.shares[last], "as calibrated"),
    )


def _sample(sample: Sample) -> str:
    asked = sample.asked
    if sample.rank == 1:
        stood = '<span class="yes">found first</span>'
    elif sample.rank is None:
        stood = '<span class="no">not found</span>'
    else:
        stood = f'<span class="no">found at {sample.rank:,}</span>'
    said = f"<q>{escape(asked.text)}</q>" if asked.text is not None else _tile(asked)
    texts = " texts" if sample.searched == "text" else ""
    hits = "".join(_hit(shown, right, sample.searched) for shown, right in sample.hits)
    below = f'<small class="soft">{escape(asked.id)}</small> <small>{stood}</small>'
    return (
        f'<div class="sample"><div class="asked">{said}{below}</div>'
        f'<ol class="hits{texts}">{hits}</ol></div>'
    )


def _hit(shown: Shown, right: bool, searched: str) -> str:
    kind = ' class="right"' if right else ""
    mark = '<b class="yes">✓</b> ' if right else ""
    if searched == "text":
        return f"<li{kind}>{mark}{escape(shown.text or '')}</li>"
    return f"<li{kind}>{_tile(shown)}<span>{mark}{escape(shown.id)}</span></li>"


def _tile(shown: Shown) -> str:
    if shown.picture is None:
        return '<div class="tile">no picture</div>'
    return f'<div class="tile"><img alt="{escape(shown.id)}" src="{shown.picture}"></div>'


def _footer(report: EvaluationReport) -> str:
    return (
        '<footer class="note"><p>R@K: the share of queries of which a right item is among the '
        "first K, in percent. ANN@10: the share of the finest level's exact top 10 that is found. "
        "Ties count against: of equal scores the right row stands last. Beside each figure its "
        "95 % interval, by the bootstrap over items.</p>"
        f"<p>Model {escape(report.model)}, version {escape(report.version)}.</p></footer>"
    )
