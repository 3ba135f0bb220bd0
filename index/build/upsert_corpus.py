"""A corpus as changes of an index that is there: encoded, and published a thousand items at a time.

Interrupted and run again, it encodes only what it had not, and changes what is changed already into
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from hivlp.index.build.corpus import Corpus
from hivlp.index.build.encode import LIMITS, write_failures
from hivlp.index.build.items import BadItem, Item
from hivlp.index.build.model import Model
from hivlp.index.build.upserts import Draft, Workshop, encode_drafts
from hivlp.index.errors import BuildError, CorpusError
from hivlp.index.pictures import read_picture
from hivlp.index.snapshot.amend import Held, amend, hold
from hivlp.index.snapshot.changes import Upsert
from hivlp.index.snapshot.metadata import loosened
from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.runtime.progress import Progress
from hivlp.models.runtime.texts import MAX_TEXT_CHARS

TOGETHER = 64
PUBLISHED = 1_000


@dataclass(slots=True)
class UpsertReport:
    """What came of it: the version that is active now, counts, and what was left out."""

    version: str
    upserts: int = 0
    created: int = 0
    failures: list[BadItem] = field(default_factory=list)


def upsert_corpus(
    corpus: Corpus,
    model: Model,
    store: SnapshotStore,
    name: str,
    *,
    max_failures: float = 0.05,
    quiet: bool = False,
) -> UpsertReport:
    """Make every item of a corpus an item of the index, replacing those of the same id.

    What was published before something fails stays. Raises CorpusError, SpaceMismatch,
    SnapshotError, and BuildError where too large a share of the items failed or nothing can be
    written.
    """
    held = hold(store, name)
    model.check_fits(held.manifest.gallery_space)
    report = UpsertReport(held.manifest.version)
    waiting: list[Upsert] = []
    try:
        with Progress(f"upsert {name}", corpus.count(), quiet=quiet) as progress:
            for part in _parts(corpus):
                waiting += _encoded(part, corpus, model, store, held, report)
                progress.step(len(part))
                if len(waiting) >= PUBLISHED:
                    _publish(waiting, store, name, model, report)
                    waiting = []
            _publish(waiting, store, name, model, report)
    except OSError as error:  # a full disk
        raise BuildError(f"index {name!r} can't be changed: {error}") from error
    finally:
        write_failures(failures_file(store, name), report.failures)
    total = report.upserts + len(report.failures)
    if report.failures and len(report.failures) / total > max_failures:
        raise BuildError(
            f"{len(report.failures)} of {total} items failed, over the allowed share of "
            f"{max_failures:g}; they are listed in {failures_file(store, name)}"
        )
    return report


def failures_file(store: SnapshotStore, name: str) -> Path:
    """Where what was left out is listed."""
    return store.home / "cache" / "builds" / f"{name}.upsert-failures.jsonl"


def _parts(corpus: Corpus) -> Iterator[list[Item | BadItem]]:
    found = iter(corpus)
    while part := list(islice(found, TOGETHER)):
        yield part


def _encoded(
    part: list[Item | BadItem],
    corpus: Corpus,
    model: Model,
    store: SnapshotStore,
    held: Held,
    report: UpsertReport,
) -> list[Upsert]:
    """The items of a part that can be encoded; the others go to the report."""
    drafts: list[Draft] = []
    for found in part:
        draft = found if isinstance(found, BadItem) else _draft(found, corpus, held)
        if isinstance(draft, BadItem):
            report.failures.append(draft)
        else:
            drafts.append(draft)
    workshop = Workshop(
        model.image,
        model.text,
        held.shape,
        model.gallery_space,
        store.home / "cache" / "embeddings",
        store.root / held.manifest.index,
        LIMITS,
        MAX_TEXT_CHARS,
    )
    ready: list[Upsert] = []
    for draft, made in zip(drafts, encode_drafts(drafts, workshop), strict=True):
        if isinstance(made, Upsert):
            ready.append(made)
        else:
            report.failures.append(BadItem(draft.id, draft.id, made.message))
    return ready


def _draft(item: Item, corpus: Corpus, held: Held) -> Draft | BadItem:
    picture = item.image_data
    if picture is None and item.image is not None:
        try:
            picture = read_picture(corpus.root, item.image)
        except CorpusError as error:
            return BadItem(error.place, item.id, error.reason)
    return Draft(item.id, item.captions, picture, loosened(item.metadata, held.types))


def _publish(
    ready: list[Upsert], store: SnapshotStore, name: str, model: Model, report: UpsertReport
) -> None:
    if not ready:
        return
    amended = amend(store, name, ready, model.gallery_space)
    report.version = amended.version
    report.upserts += amended.upserts
    report.created += len(amended.created)
    report.failures += [BadItem(i, i, error.message) for i, error in amended.refused.items()]
