"""A checkpoint by its name on a model hub, downloaded by huggingface_hub where that is installed.

Notable: only what will be read is fetched: configuration and tokenizer first, then one form of the
weights, safetensors before pickles. The library keeps what it fetched and goes on where it stopped.
Where no hub can be reached, what the library has kept is the hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hivlp.models.errors import MissingExtra, TrainingError
from hivlp.models.network.checkpoint import WEIGHT_FILES, shards
from hivlp.models.network.families import families_at
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
            from huggingface_hub.errors import HfHubHTTPError
        except ModuleNotFoundError as error:
            raise MissingExtra("huggingface_hub", "hub") from error
        self._library, self._answered = huggingface_hub, HfHubHTTPError
        self._offline = False

    def files(self, name: str, revision: str | None) -> Sequence[str]:
        """Ask for the list; what the library's cache holds where nobody answers."""
        try:
            # unlike for its list of files, the library asks once for this, and fails at once
            found = self._library.HfApi().model_info(
                name, revision=revision, timeout=self._library.constants.HF_HUB_ETAG_TIMEOUT
            )
        except self._answered:
            raise
        except Exception as error:  # offline mode, and what each version's HTTP client raises
            return self._kept(name, revision, error)
        return [file.rfilename for file in found.siblings or ()]

    def _kept(self, name: str, revision: str | None, error: Exception) -> Sequence[str]:
        self._offline = True
        try:
            folder = self.fetch(name, revision, SMALL)
        except Exception:
            # that nobody answered tells more than that there is no copy
            raise error from None
        return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]

    def fetch(self, name: str, revision: str | None, patterns: Sequence[str]) -> Path:
        """Download into the library's own cache, unless nobody answered before."""
        found = self._library.snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=self._offline,
        )
        return Path(found)


@dataclass(frozen=True, slots=True)
class Named:
    """A checkpoint on a hub, at one revision of it or at its main branch."""

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
    own = OPEN_WEIGHTS if OPEN_CONFIG in there else ()
    if there.isdisjoint((*WEIGHT_FILES, *own)):
        listed = ", ".join((*WEIGHT_FILES, *own))
        raise HubError(named.name, f"holds no weights: one of {listed} is needed")
    folder = hub.fetch(named.name, named.revision, SMALL)
    # files of Hugging Face's names beside OpenCLIP's may be of a family that isn't read (timm's)
    read = any(family.weights == WEIGHT_FILES for family in families_at(folder).values())
    known = (*WEIGHT_FILES, *own) if read else (*own, *WEIGHT_FILES)
    weights = next(name for name in known if name in there)
    wanted = [path.name for path in shards(folder / weights)]
    return hub.fetch(named.name, named.revision, [*SMALL, *wanted])
