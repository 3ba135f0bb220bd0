"""What was measured of an index, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from hivlp.index.snapshot.manifest import ExitRecord, ExitTrial, SnapshotManifest


def measured_tables(manifest: SnapshotManifest) -> list[str]:
    """One table a kind of measurement, those that there are."""
    tables = (
        recall_table(manifest),
        retrieval_table(manifest),
        exit_table(manifest),
        pace_table(manifest),
    )
    return [table for table in tables if table]


def recall_table(manifest: SnapshotManifest) -> str:
    """What was measured for every direction, family, plan and k."""
    lines = [
        f"{'direction':<16}{'family':<7}{'plan':<9}{'k':>4}  {'keeps':<14}{'ef':<11}"
        f"{'chosen on':>10}{'held out':>10}{'at least':>10}"
    ]
    for r in manifest.widths:
        lower = "-" if r.recall_lower is None else f"{r.recall_lower:.4f}"
        keeps, efs = (" ".join(str(n) for n in some) or "-" for some in (r.keeps, r.efs))
        lines.append(
            f"{f'{r.query} to {r.searched}':<16}{r.family:<7}{r.plan:<9}{r.k:>4}  {keeps:<14}"
            f"{efs:<11}{r.recall_chosen_on:>10.4f}{r.recall_held_out:>10.4f}{lower:>10}"
            + ("" if r.reached else f"  under {r.target:g}")
        )
    return "\n".join(lines)


def retrieval_table(manifest: SnapshotManifest) -> str:
    """R@K of queries with right answers, by exact search and by plan; empty without such."""
    lines = [
        f"{f'{r.query} to {r.searched}':<16}{r.plan:<9}{r.queries:>8}"
        + "".join(f"{value:>8.4f}" for value in r.recalls.values())
        for r in manifest.retrieval
    ]
    if not lines:
        return ""
    names = "".join(f"{f'R@{k}':>8}" for k in manifest.retrieval[0].recalls)
    return "\n".join([f"\n{'direction':<16}{'plan':<9}{'queries':>8}{names}", *lines])


def exit_table(manifest: SnapshotManifest) -> str:
    """Early exits by direction and signal, the one in use marked; empty where none was measured."""
    lines = [line for record in manifest.exits for line in _exit_lines(record)]
    if not lines:
        return ""
    head = (
        f"\n{'early exit':<16}{'signals':<12}{'queries stop at':<18}{'encoder saved':>13}"
        f"{'R@1':>8}{'R@10':>8}{'ANN@10':>8}"
    )
    return "\n".join([head, *lines])


def _exit_lines(record: ExitRecord) -> Iterator[str]:
    direction = f"{record.query} to {record.searched}"
    recalls = "".join(_cell(record.full[name]) for name in ("r1", "r10", "ann10"))
    yield f"{direction:<16}{'never':<12}{'':<18}{0:>13.1%}{recalls}"
    for trial in record.tried:
        in_use = trial.signal == record.signal and record.threshold is not None
        yield _trial_line(trial, "*" if in_use else "")
    if record.threshold is None:
        lost = "R@1 and R@10" if record.loss == "retrieval" else "ANN recall@10"
        yield f"  no threshold surely keeps {lost} with {record.queries} queries: it never stops"


def _trial_line(trial: ExitTrial, mark: str) -> str:
    stops = ", ".join(f"{level}: {share:.1%}" for level, share in trial.shares.items())
    recalls = "".join(_cell(trial.recalls[name]) for name in ("r1", "r10", "ann10"))
    return f"{'':<16}{trial.signal + mark:<12}{stops:<18}{trial.saved:>13.1%}{recalls}"


def pace_table(manifest: SnapshotManifest) -> str:
    """Milliseconds of a query by plan, and what `auto` takes; empty where not measured."""
    lines = [
        f"{f'{r.query} to {r.searched}':<16}{sum(r.encode_ms):>10.2f}{r.cascade_ms:>10.2f}"
        f"{r.funnel_ms:>10.2f}  {r.plan}"
        for r in manifest.paces
    ]
    if not lines:
        return ""
    head = f"\n{'milliseconds':<16}{'encoder':>10}{'cascade':>10}{'funnel':>10}  auto takes"
    return "\n".join([head, *lines])


def _cell(value: float | None) -> str:
    return f"{'-':>8}" if value is None else f"{value:>8.4f}"
