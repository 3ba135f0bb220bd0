"""The command `hivlp snapshots`: list, verify, activate, roll back, export, collect, pull, push."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from hivlp.index.arguments import DONE, FAILED, parse, parser_of, positive, store_of
from hivlp.index.errors import SnapshotError, SnapshotMissing
from hivlp.index.snapshot.activate_now import Activated, activate_now
from hivlp.index.snapshot.activation import TIMEOUT_S, Activations
from hivlp.index.snapshot.activation_files import read_canaries
from hivlp.index.snapshot.export import export_faiss
from hivlp.index.snapshot.gc import GcReport
from hivlp.index.snapshot.store import KEEP, SnapshotStore, VersionInfo

SUMMARIES = {
    "list": "versions of one index, or of all",
    "verify": "hash every file of a version, and lift its quarantine where all is right",
    "activate": "make a version the active one",
    "rollback": "go back to the version that was active before",
    "export": "write every level as a plain FAISS file",
    "gc": "remove versions nobody needs, and what dead builds and pulls left behind",
    "pull": "fetch a version from a folder or an object store, verify and activate it",
    "push": "write a version to a folder or an object store that others pull from",
}
UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}


def snapshots(arguments: Sequence[str]) -> int:
    """`hivlp snapshots`: everything that is done with versions but building them."""
    parser = parser_of(
        "snapshots",
        "List, verify, activate, roll back, export, collect, pull or push snapshots.",
        "hivlp snapshots list     or     hivlp snapshots pull s3://bucket/indexes",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in SUMMARIES.items():
        action = actions.add_parser(name, help=summary, description=summary)
        action.add_argument("--home", type=Path, help="state folder (HIVLP_HOME, .hivlp)")
        _add_options(name, action)
    given = parse(parser, arguments)
    return given if isinstance(given, int) else ACTIONS[given.action](given, store_of(given))


def _add_options(name: str, action: argparse.ArgumentParser) -> None:
    default = None if name == "list" else "default"
    words = "index name, or `all` (default)" if name == "gc" else "index name (default)"
    action.add_argument("--index", default=default, help="index name" if default is None else words)
    if name == "activate":
        action.add_argument("version", help="the version to activate")
        action.add_argument(
            "--canary",
            type=Path,
            help="queries that it must answer rightly first (default: canary.jsonl of the index)",
        )
    elif name in ("verify", "export", "push"):
        action.add_argument("--version", help="(default: the active one)")
    if name in ("activate", "rollback"):
        action.add_argument(
            "--timeout",
            type=seconds,
            default=TIMEOUT_S,
            help=f"seconds to wait until all that serve it have it ready ({TIMEOUT_S:g})",
        )
    if name == "verify":
        action.add_argument(
            "--recall", action="store_true", help="measure what its plans find, too"
        )
        action.add_argument("--artifact", type=Path, help="the model (default: its own)")
    elif name == "export":
        action.add_argument("--to", type=Path, required=True, help="an empty or new folder")
    elif name == "gc":
        _add_gc(action)
    elif name in ("pull", "push"):
        _add_transfer(name, action)


def _add_gc(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--keep",
        type=positive,
        default=KEEP,
        help=f"activations to leave, the active one too ({KEEP})",
    )
    action.add_argument(
        "--older-than",
        type=age,
        default=timedelta(days=7),
        help="leave what was published or quarantined since, as 12h or 7d; 0 for no limit (7d)",
    )
    action.add_argument("--dry-run", action="store_true", help="say what would go, remove nothing")


def _add_transfer(name: str, action: argparse.ArgumentParser) -> None:
    place = "source" if name == "pull" else "destination"
    action.add_argument(place, help="a folder or URL (s3://bucket/indexes) of NAME/VERSION/")
    if name == "pull":
        action.add_argument("--version", default="current", help="(default: the one active there)")
    action.add_argument(
        "--activate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="make it the active version " + ("here" if name == "pull" else "there"),
    )


def seconds(text: str) -> float:
    """A number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def age(text: str) -> timedelta:
    """A span of time: 90s, 30m, 12h, 7d, 2w, or 0."""
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*([smhdw]?)\s*", text)
    if match is None or (not match[2] and int(match[1])):
        raise argparse.ArgumentTypeError(f"{text!r} is no span of time, as 12h or 7d is")
    return timedelta(seconds=min(int(match[1]) * UNITS_S.get(match[2], 0), 10**11))


def _list(given: argparse.Namespace, store: SnapshotStore) -> int:
    index = given.index
    names = store.names() if index is None else [index]
    if index is not None and not store.versions(index):
        raise SnapshotMissing(index, "any", "no such index")
    if not names:
        print(f"no indexes in {store.root}")
    for name in names:
        for entry in store.listing(name):
            mark = "*" if entry.current else " "
            print(f"{mark} {name:<16} {entry.version}  {_line(entry)}")
    return DONE


def _line(entry: VersionInfo) -> str:
    bad = "" if entry.quarantined is None else f"  QUARANTINED: {entry.quarantined.what}"
    manifest = entry.manifest
    if manifest is None:
        return f"unreadable: {entry.trouble}{bad}"
    rows = " + ".join(f"{side.rows} {name}" for name, side in manifest.sides.items())
    size = _mib(sum(record.size_bytes for record in manifest.files.values()))
    return f"{manifest.items:>8} items  {rows} rows  {size}  model {manifest.model}{bad}"


def _verify(given: argparse.Namespace, store: SnapshotStore) -> int:
    from hivlp.index.cli_calibrate import print_recall
    from hivlp.index.query_model import query_model

    before = {entry.version for entry in store.quarantine(given.index).entries()}
    manifest = store.verify(given.index, given.version)
    lifted = "; its quarantine is lifted" if manifest.version in before else ""
    count = len(manifest.files) + 1
    print(f"{given.index} {manifest.version}: {count} files are as published{lifted}")
    if given.recall:
        return print_recall(store, manifest, query_model(given, store, manifest))
    return DONE


def _activate(given: argparse.Namespace, store: SnapshotStore) -> int:
    left = _left_behind(store, given.index, given.version)
    canaries = None
    if given.canary is not None:
        given.canary.stat()  # one that was named must be there
        canaries = read_canaries(given.canary)
    done = activate_now(
        Activations(store, given.index),
        "activate",
        given.version,
        canaries=canaries,
        timeout_s=given.timeout,
        tell=_tell_waiting,
    )
    print(f"{given.index} {done.version}: active{' already' if done.already else _served_by(done)}")
    if left:
        print(f"{left} items that were put or deleted since it was made are not in it")
    return DONE


def _tell_waiting(processes: int) -> None:
    print(f"waiting for {_processes(processes)} to have it ready ...", file=sys.stderr)


def _served_by(done: Activated) -> str:
    if not done.serving:
        return ""
    late = "" if done.processes == done.serving else f" of {done.serving} that serve the index"
    return f", and served by {_processes(done.processes)}{late}"


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _left_behind(store: SnapshotStore, index: str, version: str) -> int:
    """How many changes the active version has that another one hasn't."""
    try:
        there, wanted = store.manifest(index).changes, store.manifest(index, version).changes
    except SnapshotError:
        return 0
    last = 0 if wanted is None else wanted.last
    segments = () if there is None else there.segments
    return sum(s.upserts + s.deletes for s in segments if s.last > last)


def _rollback(given: argparse.Namespace, store: SnapshotStore) -> int:
    done = activate_now(
        Activations(store, given.index), "rollback", timeout_s=given.timeout, tell=_tell_waiting
    )
    print(f"{given.index} {done.version}: active again{_served_by(done)}")
    return DONE


def _export(given: argparse.Namespace, store: SnapshotStore) -> int:
    for path in export_faiss(store.open(given.index, given.version), given.to):
        print(path)
    return DONE


def _gc(given: argparse.Namespace, store: SnapshotStore) -> int:
    """Collect one index, or each: one that can't be is told and doesn't keep the others from it."""
    names = store.names() if given.index == "all" else [given.index]
    code = DONE
    for name in names:
        try:
            report = store.gc(
                name,
                keep=given.keep,
                older_than=given.older_than or None,
                dry_run=given.dry_run,
            )
        except SnapshotError as error:
            if given.index != "all":
                raise
            print(f"hivlp snapshots: {error}", file=sys.stderr)
            code = FAILED
        else:
            print(_collected(report))
    return code


def _collected(report: GcReport) -> str:
    word = "would remove" if report.dry_run else "removed"
    lines = [
        f"{report.index} {gone.name}: {word}, {_mib(gone.bytes_freed)}"
        for gone in (*report.removed, *report.leftovers)
    ]
    lines += [f"{report.index} {stays.version}: kept, {stays.reason}" for stays in report.kept]
    would = "would free" if report.dry_run else "freed"
    lines.append(f"{report.index}: {would} {_mib(report.bytes_freed)}")
    return "\n".join(lines)


def _pull(given: argparse.Namespace, store: SnapshotStore) -> int:
    from hivlp.index.snapshot.pull import pull

    version = None if given.version == "current" else given.version
    done = pull(store, given.source, given.index, version, activate=given.activate)
    active = "active" if done.active else "not active"
    if done.already:
        print(f"{done.index} {done.version}: already here, {active}")
    else:
        print(
            f"{done.index} {done.version}: fetched {_mib(done.fetched_bytes)}, "
            f"linked {_mib(done.linked_bytes)} to other versions, "
            f"kept {_mib(done.kept_bytes)} of an earlier pull; {active}"
        )
    return DONE


def _push(given: argparse.Namespace, store: SnapshotStore) -> int:
    from hivlp.index.snapshot.pull import push

    done = push(store, given.destination, given.index, given.version, activate=given.activate)
    active = "active there" if given.activate else "not activated"
    print(
        f"{done.index} {done.version}: sent {_mib(done.sent_bytes)}, "
        f"{_mib(done.kept_bytes)} were there; {active}"
    )
    return DONE


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


ACTIONS: Mapping[str, Callable[[argparse.Namespace, SnapshotStore], int]] = {
    "list": _list,
    "verify": _verify,
    "activate": _activate,
    "rollback": _rollback,
    "export": _export,
    "gc": _gc,
    "pull": _pull,
    "push": _push,
}
