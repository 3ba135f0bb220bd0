"""An evaluation as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hivlp.index.evaluation.figures import finest
from hivlp.index.evaluation.plain import ANN_K
from hivlp.index.evaluation.report import (
    DifferenceReport,
    DirectionReport,
    EvaluationReport,
    Figure,
    SystemReport,
)

NAME, CELL = 22, 21


def tables(report: EvaluationReport) -> str:
    """The report as tables."""
    parts = ["\n".join(head(report))]
    parts += [_table(direction, report.at) for direction in report.directions]
    if report.summary:
        parts.append("\n".join(_summary(report)))
    if report.against is not None:
        parts.append("\n".join(_differences(report.against, report.differences)))
    return "\n\n".join(parts)


def head(report: EvaluationReport) -> Iterator[str]:
    """What was measured, and what to know about it, a line each."""
    yield (
        f"{report.index} {report.version}, model {report.model}, {report.items} items, "
        f"{report.protocol}"
    )
    if report.unread:
        yield f"{report.unread} pictures could not be read and were no queries"
    if report.failures:
        yield (
            f"{report.failures} pictures or captions of the corpus are not in the index: figures "
            "of a benchmark need all"
        )
    if report.results > ANN_K:
        yield f"plans are those of searches for {report.results} results, the largest K"
    if report.reranked:
        yield f"re-ranked: the first {report.reranked} rows of a cascade, whose widths stand beside"
    if report.group is not None:
        yield f"any item of the same {report.group!r} is right"


def direction_title(report: DirectionReport) -> str:
    """One direction in words."""
    left = f", {report.left_out} without a right row left out" if report.left_out else ""
    return (
        f"{report.query} to {report.searched}: {report.queries} queries{left}, {report.rows} rows"
    )


def _table(report: DirectionReport, at: Sequence[int]) -> str:
    names = [*(f"R@{k}" for k in at), "ANN@10"]
    lines = [direction_title(report), " " * NAME + "".join(f"{name:<{CELL}}" for name in names)]
    lines[-1] = lines[-1].rstrip()
    lines += [_row(name, own, at) for name, own in report.systems.items()]
    for level, widths in report.by_width.items():
        lines.append(f"ANN recall@10 by K{level}   " + pairs(widths, "{:.3f}"))
    if report.width_needed:
        lines.append("K1 for .99 by N       " + pairs(report.width_needed, "{}"))
    return "\n".join(lines)


def _row(name: str, own: SystemReport, at: Sequence[int]) -> str:
    cells = [share(own.recalls[k]) for k in at]
    cells.append("-" if own.ann10 is None else share(own.ann10))
    said = ""
    if own.keeps:
        said = f"keeps {list(own.keeps)}"
    elif own.shares is not None:
        said = "answered by level " + pairs(own.shares, "{:.1%}")
    return f"{name:<{NAME}}{''.join(f'{cell:<{CELL}}' for cell in cells)}{said}".rstrip()


def _summary(report: EvaluationReport) -> Iterator[str]:
    ks, exact = ", ".join(map(str, report.at)), finest(report.summary)
    yield f"both directions, R@{{{ks}}} in percent: AR is their mean, RSUM their sum"
    last = "" if exact is None else f"AR less {exact}'s, paired"
    yield f"{'':<{NAME}}{'AR':<{CELL}}{'RSUM':<{CELL}}{last}".rstrip()
    for name, own in report.summary.items():
        apart = "" if own.apart is None else _difference(own.apart)
        cells = (percent(own.ar), percent(own.rsum), apart)
        yield f"{name:<{NAME}}{''.join(f'{cell:<{CELL}}' for cell in cells)}".rstrip()


def _differences(against: str, found: Sequence[DifferenceReport]) -> Iterator[str]:
    yield f"less {against}, paired by query (a star: the interval leaves out 0)"
    for own in found:
        where = "both" if own.query is None else f"{own.query} to {own.searched}"
        cells = "  ".join(f"{name} {_difference(figure)}" for name, figure in own.figures.items())
        yield f"{where:<15} {own.system:<20} {own.queries:>7} queries  {cells}"
    yield ""
    yield f"this and {against}, of the queries that both have; overlap@10: first answers of both"
    for own in found:
        where = "both" if own.query is None else f"{own.query} to {own.searched}"
        cells = "  ".join(f"{n} {own.ours[n]:.2f} {own.theirs[n]:.2f}" for n in own.figures)
        if own.overlap10 is not None:
            cells += f"  overlap@10 {percent(own.overlap10)}"
        yield f"{where:<15} {own.system:<20} {cells}"


def _difference(figure: Figure) -> str:
    if figure.low is None or figure.high is None:
        return f"{figure.value:+.2f}"
    star = "*" if figure.low > 0 or figure.high < 0 else ""
    return f"{figure.value:+.2f} ({figure.low:+.2f} to {figure.high:+.2f}){star}"


def share(figure: Figure) -> str:
    """A share from 0 to 1 with its interval."""
    if figure.low is None or figure.high is None:
        return f"{figure.value:.3f}"
    return f"{figure.value:.3f} ({figure.low:.3f}-{figure.high:.3f})"


def percent(figure: Figure) -> str:
    """A figure in percent with its interval."""
    if figure.low is None or figure.high is None:
        return f"{figure.value:.1f}"
    return f"{figure.value:.1f} ({figure.low:.1f}-{figure.high:.1f})"


def pairs(found: Mapping[int, float], shape: str) -> str:
    """`1: 0.5  2: 0.7`."""
    return "  ".join(f"{name}: {shape.format(value)}" for name, value in found.items())
