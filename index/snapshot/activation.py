"""Activating a version in two phases: every process that serves has it ready, then all flip.

    member = activations.join(serves=True)   each process that serves the index, once
    activations.ask("activate", version)     phase 1: a request that every member finds
    member.report(...)                       what it has done: staging, staged, failed
    activations.settle()                     phase 2, by any member, as often as it likes: once all
                                             have it staged the pointer moves; once one failed, or
                                             time is over, the request is dropped and nothing moves

Notable: nobody coordinates. Whichever member looks next settles what can be settled, under the
lock of the index; so no death holds an activation up, or leaves it half done. Who is alive is told
by locks, which end with their process (`members.py`), never by a pid. The pointer alone says what
is active: whatever dies at any moment leaves the version before or the one asked for.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from hivlp.index.errors import ActivationUnderWay, SnapshotError
from hivlp.index.snapshot.activation_files import (
    CANARIES,
    FOLDER,
    LOCKED,
    OUTCOME,
    REQUEST,
    SAID,
    Canaries,
    Canary,
    Kind,
    Outcome,
    Report,
    Request,
    read_file,
    write_file,
)
from hivlp.index.snapshot.amend import holds_erased
from hivlp.index.snapshot.members import Member, is_held, living_everywhere, member_name
from hivlp.index.snapshot.pointer import locked, write_history
from hivlp.index.snapshot.store import SnapshotStore

TIMEOUT_S = 600.0
MAX_LOSSES = 2
"""So many members that died while they staged a version are no accident: it is dropped."""
READY = ("staged", "serving")
GONE = "whoever asked for it, and all that serve the index, are gone"
ERASED = "items in it were erased: it is not to be searched any more"
UNVERIFIED = "the process that was to verify it is gone: ask again"
MOVED = "the pointer moved meanwhile: look, and ask again"


def built_from(store: SnapshotStore, name: str, version: str) -> str:
    """The built version that a version is, or was made from by changing items."""
    try:
        changes = store.manifest(name, version).changes
    except SnapshotError:  # superseded by another change, and removed
        return version
    return version if changes is None else changes.since


class Activations:
    """The activations of one index. Safe for several processes at once, and for threads."""

    def __init__(self, store: SnapshotStore, name: str) -> None:
        self.store = store
        self.name = name
        self._folder = store.folder(name)
        self._path = self._folder / FOLDER

    def pending(self) -> Request | None:
        """The request under way. Raises SnapshotError."""
        return read_file(self._path / REQUEST, Request)

    def canaries(self, request: Request) -> Sequence[Canary]:
        """Those that a request under way brought. Raises SnapshotError once it has ended."""
        if not request.canaries:
            return ()
        own = read_file(self._path / CANARIES, Canaries)
        if own is None or own.request != request.id:
            raise SnapshotError(self.name, request.version, "its activation has ended")
        return own.canaries

    def last(self) -> Outcome | None:
        """How the last request ended. Raises SnapshotError."""
        return read_file(self._path / OUTCOME, Outcome)

    def reports(self, request: Request) -> list[Report]:
        """What each live member has done about a request; one that has done nothing is `staging`.

        Raises SnapshotError, OSError.
        """
        with locked(self._folder):
            return [self._report(member, request) for member in self._living()]

    def told(self) -> list[Report]:
        """What each live member said last, whatever about. Raises SnapshotError, OSError."""
        with locked(self._folder):
            living = self._living()
            said = [read_file(self._path / f"{member}{SAID}", Report) for member in living]
        return [report for report in said if report is not None]

    def taken_up(self, but: str) -> bool | None:
        """Whether an index is served by those that live, but for one; None where no other lives.

        It is so from the moment when all are to flip to it. Raises SnapshotError, OSError.
        """
        with locked(self._folder):
            living = [self._said(member) for member in self._living() if member != but]
            new = [said.new for said in living if said.serves]
            if not new:
                return None
            return not all(new) or self._has_just_begun(living)

    def join(self, *, serves: bool, name: str | None = None, new: bool = False) -> Member:
        """Take part from now on; `serves` False: only until what is asked for has ended.

        `new`: the index isn't served by it yet.
        What was left under way by processes that are all gone is dropped. Raises SnapshotError,
        and OSError for a store that is read-only or knows no locks.
        """
        with locked(self._folder):
            self._path.mkdir(exist_ok=True)
            self._drop_abandoned()
            self._tidy()
            return Member(self._path, serves, name or member_name(), new)

    def ask(
        self,
        kind: Kind,
        version: str | None,
        member: Member,
        *,
        canaries: Sequence[Canary] | None = None,
        timeout_s: float = TIMEOUT_S,
        key: str = "",
        reason: str = "",
        expected: str | None = None,
    ) -> Request | None:
        """Ask for a version to be made active; a rollback's is the one that was so before.

        Asked for once more (or, to roll back to what is active by now, with the `key` of the last
        one) it is the same request; None: it is active, and served by all. `member` verifies it.
        `expected`: refused unless this version, or what changed upon it, is active.
        Raises SnapshotMissing, SnapshotQuarantined, ActivationUnderWay for another version's.
        """
        with locked(self._folder):
            self._drop_abandoned()
            if kind == "rollback" and key and (same := self._done_with(key)) is not None:
                return same
            now = self.pending()
            if now is not None:
                if now.kind == kind and version in (None, now.version):
                    return now
                raise ActivationUnderWay(self.name, now.version)
            active = self._active()
            if expected not in (None, active, self._built(active)):
                raise SnapshotError(self.name, active, f"is active by now, not {expected}")
            wanted = self.store.earlier(self.name)[-1] if version is None else version
            self.store.path(self.name, wanted)
            self.store.quarantine(self.name).refuse(wanted)
            new = self._new_to()
            if active == wanted and not any(new):
                return None
            if holds_erased(self.store, self.name, wanted):
                raise SnapshotError(self.name, wanted, ERASED)
            request = Request(
                id=uuid.uuid4().hex,
                kind=kind,
                version=wanted,
                previous=active,
                canaries=None if canaries is None else len(canaries),
                verifier=member.name,
                asked_at=time.time(),
                timeout_s=timeout_s,
                key=key,
                reason=reason,
                served=not all(new),
            )
            if canaries is not None:
                own = Canaries(request=request.id, canaries=list(canaries))
                write_file(self._path / CANARIES, own)
            write_file(self._path / REQUEST, request)
            return request

    def drop_erased(self) -> None:
        """Give up a request for a version with items that were erased since.

        By whoever erases. Raises SnapshotError, OSError.
        """
        request = self.pending()
        if request is not None and holds_erased(self.store, self.name, request.version):
            self.drop(request, ERASED)

    def note_verified(self, request: Request) -> None:
        """Tell that every file of its version was hashed. Raises SnapshotError, OSError."""
        with locked(self._folder):
            now = self.pending()
            if now is not None and now.id == request.id:
                write_file(self._path / REQUEST, now.model_copy(update={"verified": True}))

    def settle(self) -> None:
        """End the request under way if it can be ended. Raises SnapshotError, OSError."""
        if self.pending() is None:
            return
        with locked(self._folder):
            living = self._living()
            request = self.pending()
            if request is None:
                return
            # Whoever moved the pointer died right after.
            if request.moves and self._active() == request.version:
                self._end(request, "", active=True)
            elif (reason := self._hopeless(request, living)) is not None:
                self._end(request, reason, active=False)
            elif living and all(self._report(m, request).state in READY for m in living):
                self._commit(request)

    def drop(self, request: Request, reason: str) -> None:
        """Give a request up, unless it has ended. Raises SnapshotError, OSError."""
        with locked(self._folder):
            now = self.pending()
            if now is not None and now.id == request.id:
                self._end(now, reason, active=False)

    def _hopeless(self, request: Request, living: Sequence[str]) -> str | None:
        """Why a request can't come to a good end, if it can't."""
        reports = [self._report(member, request) for member in living]
        for report in reports:
            if report.state == "failed":
                return report.reason
        if request.canaries and not any(report.serves for report in reports):
            return "nobody serves the index: its canaries can't be tried"
        if request.losses >= MAX_LOSSES:
            return f"{request.losses} processes died while they staged it"
        if not request.verified and request.verifier not in living:
            return UNVERIFIED
        if time.time() > request.asked_at + request.timeout_s:
            late = [str(report.pid) for report in reports if report.state not in READY]
            return f"not staged within {request.timeout_s:g} s by the processes {', '.join(late)}"
        return None

    def _commit(self, request: Request) -> None:
        history = self.store.known(self.name)
        if not request.moves and history[-1:] != [request.version]:
            self._end(request, MOVED, active=False)
            return
        if request.kind == "activate":
            wanted = [*(old for old in history if old != request.version), request.version]
        else:
            wanted = self.store.earlier(self.name)
            if wanted[-1] != request.version:
                self._end(request, MOVED, active=False)
                return
        try:
            self.store.path(self.name, request.version)
            self.store.quarantine(self.name).refuse(request.version)
            if holds_erased(self.store, self.name, request.version):
                raise SnapshotError(self.name, request.version, ERASED)
        except SnapshotError as error:
            self._end(request, error.reason, active=False)
            return
        write_history(self._folder, wanted)
        self._end(request, "", active=True)

    def _end(self, request: Request, reason: str, *, active: bool) -> None:
        outcome = Outcome(request=request, active=active, reason=reason, ended_at=time.time())
        write_file(self._path / OUTCOME, outcome)
        (self._path / REQUEST).unlink(missing_ok=True)
        (self._path / CANARIES).unlink(missing_ok=True)

    def _drop_abandoned(self) -> None:
        request = self.pending()
        if request is not None and not self._living():
            moved = request.moves and self._active() == request.version
            self._end(request, GONE, active=moved)

    def _done_with(self, key: str) -> Request | None:
        """The last request, if it is a rollback with this key, and led to what is active."""
        ended = self.last()
        if ended is None or (ended.request.kind, ended.request.key) != ("rollback", key):
            return None
        active = self._active()
        there = ended.active and ended.request.version in (active, self._built(active))
        return ended.request if there else None

    def _built(self, version: str) -> str:
        return built_from(self.store, self.name, version)

    def _active(self) -> str:
        """The active version; empty where the pointer can't be read, which activating mends."""
        return (self.store.known(self.name) or [""])[-1]

    def _living(self) -> list[str]:
        """Members that live. What the dead left goes; those that died while they staged count."""
        request = self.pending()
        living, lost = [], 0
        for lock in sorted(self._path.glob(f"*{LOCKED}")):
            if is_held(lock):
                living.append(lock.stem)
                continue
            said = read_file(lock.with_suffix(SAID), Report)
            if said is not None and request is not None:
                lost += (said.request, said.state) == (request.id, "staging")
            lock.with_suffix(SAID).unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
        if request is not None and lost:
            noted = request.model_copy(update={"losses": request.losses + lost})
            write_file(self._path / REQUEST, noted)
        everywhere = living_everywhere(self._folder.parent)
        return [*living, *(member for member in everywhere if member not in living)]

    def _tidy(self) -> None:
        """Remove what the dead left half written. Members join, and requests are written, under the
        lock: what belongs to no live member is nobody's.
        """
        living = self._living()
        kept = (OUTCOME,) if self.pending() is None else (REQUEST, CANARIES, OUTCOME)
        for path in self._path.iterdir():
            owner = path.name.lstrip(".").partition(".")[0]
            if owner not in living and path.name not in kept:
                path.unlink(missing_ok=True)

    def _new_to(self) -> list[bool]:
        """Of each that lives and is to serve the index, whether it doesn't yet."""
        said = [self._said(member) for member in self._living()]
        return [report.new for report in said if report.serves]

    def _has_just_begun(self, said: Sequence[Report]) -> bool:
        """Whether the last request has these serve the index, who are about to.

        What ended well for those who are gone says nothing about those who live.
        """
        ended = self.last()
        if ended is None or not ended.active or self.pending() is not None:
            return False
        about = [s for s in said if s.serves and s.request == ended.request.id]
        if not any(report.state in READY for report in about):
            return False
        active = self._active()
        return ended.request.version in (active, self._built(active))

    def _report(self, member: str, request: Request) -> Report:
        """What a member has done about a request; `staging`, where it has yet to look."""
        said = self._said(member)
        if said.request == request.id:
            return said
        return said.model_copy(update={"request": request.id, "state": "staging", "reason": ""})

    def _said(self, member: str) -> Report:
        """What a member said last. One that has said nothing serves every index, and has yet to
        find this one; or was taken for dead by a machine that doesn't see the locks of this one.
        """
        said = read_file(self._path / f"{member}{SAID}", Report)
        if said is not None:
            return said
        pid = member.partition("-")[0]
        known = int(pid) if pid.isdecimal() else 0
        return Report(request="", state="staging", pid=known, serves=True, new=True)
