"""A home that serves one index, and another index that arrives in it while a service runs."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from hivlp.index.build.build import BuildSettings, build_index
from hivlp.index.build.corpus import open_corpus
from hivlp.index.build.model import Model
from hivlp.index.snapshot.pointer import write_history
from hivlp.index.snapshot.store import SnapshotStore
from tests.integration.served_home import make_corpus, make_home

NEW = "art"


@dataclass(frozen=True, slots=True)
class NewIndex:
    """`store` is what is served; two versions of the index `art` lie aside until they `arrive`."""

    store: SnapshotStore
    aside: Path

    @classmethod
    def make(cls, folder: Path) -> NewIndex:
        """Built of the same corpus by the same model."""
        corpus = make_corpus(folder / "corpus")
        home = make_home(folder / "home", corpus)
        aside = SnapshotStore(folder / "aside")
        settings = BuildSettings(quiet=True, sample=20, activate=False)
        for _ in range(2):
            model = Model.load(home / "artifacts/tiny")
            build_index(open_corpus(corpus), model, aside, NEW, settings)
        return cls(SnapshotStore(home), aside.folder(NEW))

    def copy(self, folder: Path) -> NewIndex:
        """For a test of its own."""
        shutil.copytree(self.store.home, folder / "home")
        shutil.copytree(self.aside, folder / "aside")
        return NewIndex(SnapshotStore(folder / "home"), folder / "aside")

    @property
    def versions(self) -> list[str]:
        """Both of its versions, oldest first."""
        return sorted(path.name for path in self.aside.iterdir() if path.name[0] == "2")

    def arrive(self, *, active: str | None = None, canary: str | None = None) -> None:
        """Lie in the home in one step, as a build's; with a version that is active, or none."""
        coming = self.store.root / ".coming"
        shutil.copytree(self.aside, coming)
        if active is not None:
            write_history(coming, [active])
        if canary is not None:
            (coming / "canary.jsonl").write_text(canary + "\n")
        coming.rename(self.store.folder(NEW))
