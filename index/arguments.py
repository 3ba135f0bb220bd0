"""What the commands of the index share: options, the store, the model an index belongs to."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hivlp.index.level_index import MUSTS, Must
from hivlp.index.snapshot.manifest import SnapshotManifest
from hivlp.index.snapshot.store import SnapshotStore, default_home
from hivlp.models.errors import ArtifactError

DONE, FAILED, USAGE = 0, 1, 2
WITH_ACTIONS = ("snapshots", "items")
"""Commands whose options come after the action."""


def artifact_of(store: SnapshotStore, manifest: SnapshotManifest) -> Path:
    """The model an index was calibrated with: `artifacts/<name>`, or where it lay at the build.

    Raises ArtifactError where neither is there, and for imported vectors that have no model.
    """
    if manifest.imported is not None and not manifest.artifact:
        raise ArtifactError(
            store.home / "artifacts",
            f"index {manifest.index!r} holds imported vectors and has no model: ask with a vector, "
            "as `hivlp search --vector FILE.npy`, or name an artifact that aims at its "
            "gallery_space with --artifact",
        )
    for folder in (store.home / "artifacts" / manifest.model, Path(manifest.artifact)):
        if (folder / "manifest.json").is_file():
            return folder
    raise ArtifactError(
        Path(manifest.artifact),
        f"the model {manifest.model!r} of index {manifest.index!r} is not there, nor in "
        f"{store.home / 'artifacts'}; name it with --artifact",
    )


def model_of(given: argparse.Namespace, store: SnapshotStore, manifest: SnapshotManifest) -> Path:
    """The model named by the arguments, else the index's own."""
    return given.artifact or artifact_of(store, manifest)


def store_of(given: argparse.Namespace) -> SnapshotStore:
    """The store that the arguments or the environment name."""
    return SnapshotStore(given.home or default_home())


def parser_of(name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """A command's parser, with an example below its options."""
    parser = argparse.ArgumentParser(
        prog=f"hivlp {name}",
        description=summary,
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if name not in WITH_ACTIONS:
        parser.add_argument("--home", type=Path, help="state folder (HIVLP_HOME, .hivlp)")
    return parser


def add_index(parser: argparse.ArgumentParser) -> None:
    """Options that say which version and which model."""
    parser.add_argument("--index", default="default", help="index name (default: default)")
    parser.add_argument("--version", help="version (default: the active one)")
    parser.add_argument("--artifact", type=Path, help="the model (default: the index's own)")


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace | int:
    """The arguments, or the exit code where argparse has said all there is to say."""
    try:
        return parser.parse_args(list(arguments))
    except SystemExit as stop:
        return DONE if stop.code in (0, None) else USAGE


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    number = _number(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return number


def musts(text: str) -> tuple[Must, ...]:
    """What an index must do: some of mask, batch, rebuild with commas between, or none."""
    words = [word.strip() for word in text.split(",")]
    asked = set() if words in ([""], ["none"]) else set(words)
    if unknown := asked - set(MUSTS):
        raise argparse.ArgumentTypeError(
            f"{sorted(unknown)[0]!r} is none of {', '.join(MUSTS)} (or `none`)"
        )
    return tuple(must for must in MUSTS if must in asked)


def above_zero(text: str) -> float:
    """A number above 0."""
    number = _number(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def seconds(text: str) -> float:
    """A number of seconds, 0 or more."""
    number = _number(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def size_bytes(text: str) -> int:
    """Bytes, with a unit or without: 2GiB, 500MB, 1024."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*([kKmMgGtT]?)(i?)[bB]?\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, as 2GiB is")
    base = 1024 if match[3] or not match[2] else 1000
    power = " kmgt".index(match[2].lower() or " ")
    return int(above_zero(match[1]) * base**power)


def json_object(text: str) -> Any:
    """A JSON object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no JSON object")
    return found
