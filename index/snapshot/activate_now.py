"""An activation from beginning to end, by a command: with services that run, or with none.

The command takes part as a member of its own: it verifies the version, and settles the activation
itself where nobody serves the index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hivlp.index.errors import SnapshotError
from hivlp.index.snapshot.activation import TIMEOUT_S, Activations
from hivlp.index.snapshot.activation_files import Canary, Kind, Outcome, Request
from hivlp.index.snapshot.members import Member

LOOK_S = 0.05
FLIP_S = 10.0
"""So long a command waits for processes to say that they serve what is active by now."""


@dataclass(frozen=True, slots=True)
class Activated:
    """What became active; `already`: it was. `processes` serve it, of `serving` that serve."""

    version: str
    already: bool = False
    processes: int = 0
    serving: int = 0


def activate_now(
    activations: Activations,
    kind: Kind,
    version: str | None = None,
    *,
    canaries: Sequence[Canary] | None = None,
    timeout_s: float = TIMEOUT_S,
    tell: Callable[[int], None] = lambda _: None,
) -> Activated:
    """Make a version active, or the one before it so again. Raises SnapshotError for what can't be.

    `tell` is called once with the number of processes that are waited for, where there are any.
    """
    member = activations.join(serves=False)
    try:
        request = activations.ask(kind, version, member, canaries=canaries, timeout_s=timeout_s)
        if request is None:
            assert version is not None, "a rollback leads to another version"
            return Activated(version, already=True)
        try:
            _take_part(activations, request, member)
            serving = _serving(activations, request)
            if serving:
                tell(len(serving))
            ended = _ended(activations, request)
        except BaseException:
            activations.drop(request, "given up by the command that asked for it")
            raise
        if not ended.active:
            raise SnapshotError(activations.name, request.version, f"not active: {ended.reason}")
        return _flipped(activations, request)
    finally:
        member.leave()


def _take_part(activations: Activations, request: Request, member: Member) -> None:
    if request.verifier == member.name:
        activations.store.open(activations.name, request.version).close()
        activations.note_verified(request)
    member.report(request.id, "staged")


def _ended(activations: Activations, request: Request) -> Outcome:
    """How it ended, once it has."""
    while True:
        activations.settle()
        pending, last = activations.pending(), activations.last()
        if last is not None and last.request.id == request.id:
            return last
        if pending is None or pending.id != request.id:
            reason = "its activation ended, and another one since: look what is active"
            raise SnapshotError(activations.name, request.version, reason)
        time.sleep(LOOK_S)


def _flipped(activations: Activations, request: Request) -> Activated:
    """How many serve it, once all do or they were waited for long enough."""
    until_s = time.monotonic() + FLIP_S
    while True:
        states = _serving(activations, request)
        done = states.count("serving")
        if done == len(states) or time.monotonic() > until_s:
            return Activated(request.version, processes=done, serving=len(states))
        time.sleep(LOOK_S)


def _serving(activations: Activations, request: Request) -> list[str]:
    return [said.state for said in activations.reports(request) if said.serves]
