"""A corpus as changes of an index that is there: encoded, and published a thousand items at a time.

Interrupted and run again, it encodes only what it had not, and changes what is changed already into
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hivlp.index.build.corpus import Corpus
from hivlp.index.build.encode import LIMITS, FailureLog
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
    """What came of it: the version that is active now, and counts."""

    version: str
    upserts: int = 0
    created: int = 0
    failures: int = 0


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
    listed = failures_file(store, name)
    try:
        with (
            FailureLog(listed) as failures,
            Progress(f"upsert {name}", corpus.count(), quiet=quiet) as progress,
        ):
            job = _Job(corpus, model, store, held, failures)
            for part in _parts(corpus):
                job.take(part)
                progress.step(len(part))
            job.publish()
    except OSError as error:  # a full disk
        raise BuildError(f"index {name!r} can't be changed: {error}") from error
    report = job.report
    total = report.upserts + report.failures
    if report.failures and report.failures / total > max_failures:
        raise BuildError(
            f"{report.failures} of {total} items failed, over the allowed share of "
            f"{max_failures:g}; they are listed in {listed}"
        )
    return report


def failures_file(store: SnapshotStore, name: str) -> Path:
    """Where what was left out is listed."""
    return store.home / "cache" / "builds" / f"{name}.upsert-failures.jsonl"


def _parts(corpus: Corpus) -> Iterator[list[Item | BadItem]]:
    found = iter(corpus)
    while part := list(islice(found, TOGETHER)):
        yield part


class _Job:
    """Encodes part by part, and publishes what has come together."""

    def __init__(
        self, corpus: Corpus, model: Model, store: SnapshotStore, held: Held, failures: FailureLog
    ) -> None:
        self.report = UpsertReport(held.manifest.version)
        self._corpus, self._model, self._store, self._held = corpus, model, store, held
        self._failures = failures
        self._ready: list[Upsert] = []
        self._workshop = Workshop(
            model.image,
            model.text,
            held.shape,
            model.gallery_space,
            store.home / "cache" / "embeddings",
            store.root / held.manifest.index,
            LIMITS,
            MAX_TEXT_CHARS,
        )

    def take(self, part: list[Item | BadItem]) -> None:
        """Encode a part; what can't be goes to the list of failures."""
        drafts: list[Draft] = []
        for found in part:
            draft = found if isinstance(found, BadItem) else self._draft(found)
            if isinstance(draft, BadItem):
                self._lose(draft)
            else:
                drafts.append(draft)
        for draft, made in zip(drafts, encode_drafts(drafts, self._workshop), strict=True):
            if isinstance(made, Upsert):
                self._ready.append(made)
            else:
                self._lose(BadItem(draft.id, draft.id, made.message))
        if len(self._ready) >= PUBLISHED:
            self.publish()

    def publish(self) -> None:
        """Publish what is ready."""
        if not self._ready:
            return
        name, space = self._held.manifest.index, self._model.gallery_space
        amended = amend(self._store, name, self._ready, space)
        self._ready = []
        self.report.version = amended.version
        self.report.upserts += amended.upserts
        self.report.created += len(amended.created)
        for item_id, error in amended.refused.items():
            self._lose(BadItem(item_id, item_id, error.message))

    def _lose(self, bad: BadItem) -> None:
        self.report.failures += 1
        self._failures.write(bad)

    def _draft(self, item: Item) -> Draft | BadItem:
        picture = item.image_data
        if picture is None and item.image is not None:
            try:
                picture = read_picture(self._corpus.root, item.image)
            except CorpusError as error:
                return BadItem(error.place, item.id, error.reason)
        metadata = loosened(item.metadata, self._held.types)
        return Draft(item.id, item.captions, picture, metadata)
