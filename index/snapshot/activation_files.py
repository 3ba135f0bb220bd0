"""What an activation in two phases leaves on disk, beside the versions of an index.

HOME/indexes/NAME/.activation/
    REQUEST       the one under way; absent otherwise
    CANARIES      what it must find, where it brought that; absent otherwise
    OUTCOME       how the last one ended
    MEMBER.lock   of each process that takes part; locked as long as that process lives
    MEMBER.json   what it has done about the request that it names

HOME/indexes/.activation/ has the locks of those that serve every index (`members.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.durable import replace_text
from hivlp.models.levels import Modality

FOLDER = ".activation"
REQUEST = "REQUEST"
CANARIES = "CANARIES"
OUTCOME = "OUTCOME"
LOCKED, SAID = ".lock", ".json"
CANARY = "canary.jsonl"
"""In the folder of an index: canaries of every activation that brings none of its own."""
MAX_CANARIES = 1_000
MAX_CANARY_K = 1_000

Kind = Literal["activate", "rollback"]
State = Literal["staging", "staged", "failed", "serving"]
M = TypeVar("M", bound=BaseModel)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Canary(BaseModel):
    """A query with what it must find: at least `at_least` (None: all) of `expected` among `k`.

    By a text or by an item.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    query: str | None = Field(default=None, min_length=1, max_length=2_000)
    id: str | None = Field(default=None, min_length=1, max_length=4_096)
    k: int = Field(default=10, ge=1, le=MAX_CANARY_K)
    modality: Modality = "image"
    expected: list[str] = Field(min_length=1, max_length=MAX_CANARY_K, fail_fast=True)
    at_least: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _can_be_met(self) -> Self:
        if (self.query is None) == (self.id is None):
            raise ValueError("needs one of query and id")
        if self.needed > min(self.k, len(set(self.expected))):
            raise ValueError(
                f"wants {self.needed} of {len(set(self.expected))} expected ids among {self.k} hits"
            )
        return self

    @property
    def needed(self) -> int:
        """How many of the expected ids must be found."""
        return len(set(self.expected)) if self.at_least is None else self.at_least

    @property
    def what(self) -> str:
        """The query, in words."""
        return f"text {self.query!r}" if self.id is None else f"item {self.id!r}"


class Request(_File):
    """An activation that was asked for. Times are seconds since 1970.

    `canaries` is how many it brought, which lie in a file of their own, as this one is read at
    every look; None: those of the index's folder. `verifier` is the member that hashes every file;
    the others check as far as is checked whenever a version is opened. `key` is the caller's, who
    may not know whether it was heard. `losses`: members that died while they staged it. `verified`:
    its verifier is done, and may die. `served`: by somebody, some version of the index, when this
    was asked for; else the index begins with it.
    """

    id: str
    kind: Kind
    version: str
    previous: str
    canaries: int | None
    verifier: str
    asked_at: float
    timeout_s: float
    key: str = ""
    reason: str = ""
    losses: int = 0
    verified: bool = False
    served: bool = True

    @property
    def moves(self) -> bool:
        """Whether the pointer moves: not where it names this version already, and the request is
        for those to serve it that don't yet.
        """
        return self.version != self.previous


class Canaries(_File):
    """Those that the request of this id brought."""

    request: str
    canaries: list[Canary]


class Tally(_File):
    """ANN recall of `checks` live queries of one version: the sum of the shares found."""

    found: float
    checks: int


class Report(_File):
    """What one member has done about the request of this id.

    `serves`: it is one that answers searches, not a command; `new`: of no version of this index
    yet. `recall`: of its own answers, by built version, while an activation is looked after.
    """

    request: str
    state: State
    pid: int
    serves: bool
    new: bool = False
    reason: str = ""
    recall: dict[str, Tally] = Field(default_factory=dict)


class Outcome(_File):
    """How a request ended: its version is active, or what kept it from being so."""

    request: Request
    active: bool
    reason: str
    ended_at: float


def read_file(path: Path, model: type[M]) -> M | None:
    """A file as what it is; None where there is none. Raises SnapshotError for one that is not."""
    try:
        return model.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        index = path.parent.parent.name
        what = str(error).splitlines()[0]
        raise SnapshotError(index, f"{FOLDER}/{path.name}", f"unreadable: {what}") from error


def write_file(path: Path, contents: BaseModel) -> None:
    """Replace a file in one step, durably."""
    replace_text(path, contents.model_dump_json(indent=1) + "\n")


def read_canaries(path: Path) -> list[Canary]:
    """The canaries of a file, one JSON object a line; none where there is no file.

    Raises SnapshotError naming the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise SnapshotError(path.parent.name, path.name, f"unreadable: {error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_canary(path, number, line))
    if len(found) > MAX_CANARIES:
        reason = f"{len(found)} queries; at most {MAX_CANARIES}"
        raise SnapshotError(path.parent.name, path.name, reason)
    return found


def _canary(path: Path, number: int, line: str) -> Canary:
    try:
        return Canary.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        reason = f"line {number}: {where + ': ' if where else ''}{first['msg']}"
        raise SnapshotError(path.parent.name, path.name, reason) from error
