"""A checkpoint by its name on a model hub, downloaded by huggingface_hub where that is installed.

Notable: only what will be read is fetched: configuration and tokenizer first, then one form of the
weights, safetensors before pickles. The library keeps what it fetched and goes on where it stopped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hivlp.models.errors import MissingExtra, TrainingError
from hivlp.models.network.checkpoint import WEIGHT_FILES, shards
from hivlp.models.network.openclip import OPEN_CONFIG, OPEN_WEIGHTS

SMALL = ("*.json", "vocab.txt", "merges.txt")
_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?$")


class HubError(TrainingError):
    """A name that no checkpoint could be fetched by."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


class Hub(Protocol):
    """Where checkpoints have names."""

    def files(self, name: str, revision: str | None) -> Sequence[str]:
        """The names of all files of a checkpoint."""

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """A local folder that holds at least the files that match."""


class HuggingFaceHub:
    """What huggingface_hub reaches. Raises MissingExtra where it isn't installed."""

    def __init__(self) -> None:
        try:
            import huggingface_hub
        except ModuleNotFoundError as error:
            raise MissingExtra("huggingface_hub", "hub") from error
        self._library = huggingface_hub

    def files(self, name: str, revision: str | None) -> Sequence[str]:
        """Ask for the list."""
        found: list[str] = self._library.HfApi().list_repo_files(name, revision=revision)
        return found

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Download into the library's own cache."""
        found = self._library.snapshot_download(
            name, revision=revision, allow_patterns=list(patterns)
        )
        return Path(found)


@dataclass(frozen=True, slots=True)
class Named:
    """A checkpoint on a hub, at one revision of it or the newest."""

    name: str
    revision: str | None = None

    @staticmethod
    def parse(source: str) -> Named | None:
        """`owner/name` or `owner/name@revision`; None for what can be no such name."""
        if not _NAME.match(source):
            return None
        name, _, revision = source.partition("@")
        return Named(name, revision or None)


def fetch(named: Named, hub: Hub) -> Path:
    """The folder of a checkpoint. Raises HubError where it can't be had."""
    try:
        return _fetch(named, hub)
    except TrainingError:
        raise
    except Exception as error:  # the library raises errors of its own, of requests and of files
        first = str(error).strip().partition("\n")[0]
        raise HubError(named.name, f"no such folder here, and not fetched: {first}") from error


def _fetch(named: Named, hub: Hub) -> Path:
    there = set(hub.files(named.name, named.revision))
    known = (*WEIGHT_FILES, *(OPEN_WEIGHTS if OPEN_CONFIG in there else ()))
    weights = next((name for name in known if name in there), None)
    if weights is None:
        raise HubError(named.name, f"holds no weights: one of {', '.join(known)} is needed")
    folder = hub.fetch(named.name, named.revision, SMALL)
    wanted = [path.name for path in shards(folder / weights)]
    return hub.fetch(named.name, named.revision, [*SMALL, *wanted])
