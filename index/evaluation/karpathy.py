"""An index of one split of a Karpathy JSON, to evaluate on: the ordinary build, in file order.

Everything encoded is in the embedding cache, so a split that was indexed before with the same model
is assembled again in little time. The index stays: `hivlp evaluate --index NAME` measures it again,
and `hivlp serve` shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hivlp.index.build.build import BuildReport, BuildSettings, build_index
from hivlp.index.build.corpus import CorpusOptions, open_corpus
from hivlp.index.build.model import Model
from hivlp.index.build.readers.base import Split
from hivlp.index.build.wishes import Wishes
from hivlp.index.errors import CorpusError
from hivlp.index.snapshot.store import SnapshotStore

LONGEST = 64


@dataclass(frozen=True, slots=True)
class KarpathySplit:
    """`images` is the folder of the pictures (None: the JSON's own)."""

    file: str
    split: Split
    images: str | None = None

    @property
    def index(self) -> str:
        """Name of the index of this split: `dataset_coco-test`."""
        stem = re.sub(r"[^a-z0-9_-]+", "-", Path(self.file).stem.lower()).strip("-_")
        return f"{stem[: LONGEST - len(self.split) - 1] or 'karpathy'}-{self.split}"


def index_split(
    store: SnapshotStore,
    wanted: KarpathySplit,
    model: Model,
    name: str,
    *,
    max_failures: float = 0.0,
    workers: int = 2,
    quiet: bool = False,
) -> BuildReport:
    """Build index `name` from a split, level 1 scanned exactly, and make it active; with token
    states of the pictures where the model is loaded with its re-ranker.

    Pictures that are missing change every figure, so by default none may be. Raises CorpusError,
    also for a file that is no Karpathy JSON; BuildError.
    """
    corpus = open_corpus(wanted.file, CorpusOptions(wanted.split, wanted.images))
    if corpus.kind != "karpathy":
        raise CorpusError(wanted.file, f"a {corpus.kind} corpus, not a Karpathy split JSON")
    settings = BuildSettings(
        max_failures=max_failures,
        workers=workers,
        wishes=Wishes(family="scan", level1="flat", must=()),
        forget_changes=True,
        store_states=model.reranker is not None,
        quiet=quiet,
    )
    return build_index(corpus, model, store, name, settings)
