"""The command `hivlp calibrate`, and what `hivlp snapshots verify --recall` prints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hivlp.index.arguments import (
    DONE,
    FAILED,
    add_index,
    parse,
    parser_of,
    positive,
    share,
    store_of,
)
from hivlp.index.snapshot.manifest import SnapshotManifest
from hivlp.index.snapshot.store import SnapshotStore

if TYPE_CHECKING:
    from hivlp.index.build.model import Model


def calibrate(arguments: Sequence[str]) -> int:
    """`hivlp calibrate`: measure widths and beams again, without building."""
    from hivlp.index.build.calibrate import CalibrationSettings
    from hivlp.index.build.calibrate import calibrate as measure_again
    from hivlp.index.query_model import query_model

    parser = parser_of(
        "calibrate",
        "Measure an index's widths and beams again and publish them as a new version of the same "
        "files. Chosen on one half of the queries, reported on the other.",
        "hivlp calibrate --index default --queries queries.txt",
    )
    add_index(parser)
    parser.add_argument(
        "--queries",
        type=Path,
        help="text queries, one a line, or a .npy of vectors as they were imported (the corpus's "
        "own)",
    )
    parser.add_argument("--sample", type=positive, default=2_000, help="most queries (2000)")
    parser.add_argument("--target", type=share, default=0.99, help="ANN recall wanted (0.99)")
    parser.add_argument("--threads", type=positive, default=1, help="encoder threads (1)")
    parser.add_argument(
        "--no-activate", action="store_true", help="publish without making it the active version"
    )
    given = parse(parser, arguments)
    if isinstance(given, int):
        return given
    store = store_of(given)
    model = query_model(given, store, store.manifest(given.index, given.version), given.threads)
    settings = CalibrationSettings(
        queries=given.queries,
        sample=given.sample,
        target=given.target,
        activate=not given.no_activate,
    )
    report = measure_again(store, given.index, given.version, model, settings)
    manifest = report.manifest
    print(f"{given.index} {manifest.version}: calibrated from {manifest.calibrated_from}")
    print(report.to_text())
    return DONE


def print_recall(store: SnapshotStore, manifest: SnapshotManifest, model: Model) -> int:
    """Print what a version's plans find now; FAILED where a recorded bound no longer holds."""
    from hivlp.index.build.calibrate import NotMeasured, check_recall
    from hivlp.index.build.recheck import check_exits

    snapshot = store.open(manifest.index, manifest.version)
    code = DONE
    for exits in check_exits(snapshot, model):
        print(exits.to_text() + ("" if exits.kept else "  BROKEN"))
        code = code if exits.kept else FAILED
    for now in check_recall(snapshot, model):
        if isinstance(now, NotMeasured):
            print(f"{now.query} to {now.searched}: not measured: {now.reason}")
            continue
        promised = "nothing promised" if now.promised is None else f"promised {now.promised:.4f}"
        verdict = "" if now.kept else "  BROKEN"
        code = code if now.kept else FAILED
        print(
            f"{now.query} to {now.searched}, {now.plan}: ANN recall@{now.k} {now.recall:.4f} of "
            f"{now.queries} queries (at least {now.lower:.4f}), {promised}{verdict}"
        )
    return code
