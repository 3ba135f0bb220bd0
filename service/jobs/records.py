"""Builds on disk, which is where all that is known of them is: every process answers alike.

    HIVLP_HOME/builds/.lock               whoever changes a record holds it, for a moment
    HIVLP_HOME/builds/.runner             held by the serving process that runs builds
    HIVLP_HOME/builds/ID/build.json       the record, replaced in one step
    HIVLP_HOME/builds/ID/progress.json    how far it is
    HIVLP_HOME/builds/ID/lock             held by the build's process, and by whoever started it
    HIVLP_HOME/builds/ID/log.txt          what it said

Notable: locks are the system's, so no death leaves one behind, and a build whose lock is free isn't
run by anybody. An id begins with the moment it was made, and ids are in the order they were made.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import weakref
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from hivlp.index.snapshot.durable import replace_text
from hivlp.service.jobs.errors import BuildUnderWay, KeyReused, NoSuchBuild, TooManyBuilds
from hivlp.service.schemas import StartBuild

log = logging.getLogger("hivlp.service")

ID_PATTERN = re.compile(r"[0-9]{8}T[0-9]{6}-[0-9]{6}-[0-9a-f]{6}")
MOMENT = "%Y%m%dT%H%M%S-%f"
MOMENT_CHARS = 22
MAX_TRIES = 3
"""So often a build is begun whose process, or whoever started it, dies without a word."""
MAX_KEYS = 16
State = Literal["queued", "running", "done", "failed", "cancelled"]
WAITING: frozenset[State] = frozenset({"queued", "running"})


class Build(BaseModel):
    """What is known of one build; times are ISO 8601, `ended_at` that of its last try."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    asked: StartBuild
    keys: tuple[str, ...] = ()
    state: State = "queued"
    cancelling: bool = False
    tries: int = 0
    created_at: str
    started_at: str | None = None
    ended_at: str | None = None
    snapshot: str | None = None
    active: bool | None = None
    items: int | None = None
    encoded: int | None = None
    left_out: int | None = None
    notes: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def waiting(self) -> bool:
        """Whether it hasn't ended."""
        return self.state in WAITING


class Hold:
    """A lock, as long as this or a process that inherited its descriptor lives."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._end = weakref.finalize(self, os.close, descriptor)

    def release(self) -> None:
        """End it here. Doing so twice is fine."""
        self._end()


class BuildRecords:
    """The builds of one home, for any number of processes. Methods block, and raise OSError."""

    def __init__(self, home: Path) -> None:
        self.folder = home.resolve() / "builds"

    def submit(self, asked: StartBuild, *, keep: int, max_waiting: int) -> Build:
        """A build of this, or the one that was asked for with the same key or is the same.

        Raises BuildUnderWay, KeyReused, TooManyBuilds.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        key, what = asked.key, asked.model_copy(update={"key": None})
        with self._locked():
            builds = self.all()
            known = next((build for build in builds if key is not None and key in build.keys), None)
            if known is not None:
                if known.asked != what:
                    raise KeyReused(str(key), known.id)
                return known
            waiting = [build for build in builds if build.waiting]
            for build in waiting:
                if build.asked == what:
                    return self._with_key(build, key)
                if build.asked.index == what.index:
                    raise BuildUnderWay(what.index, build.id, build.state)
            if len(waiting) >= max_waiting:
                raise TooManyBuilds(max_waiting)
            self._forget(builds, keep)
            return self._new(what, key, builds)

    def get(self, build_id: str) -> Build:
        """One build. Raises NoSuchBuild."""
        if ID_PATTERN.fullmatch(build_id) is None:
            raise NoSuchBuild(build_id[:100])
        try:
            return Build.model_validate_json((self.folder / build_id / "build.json").read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise NoSuchBuild(build_id) from None
        except ValidationError as error:
            log.warning("build %s can't be read: %s", build_id, error)
            raise NoSuchBuild(build_id) from None

    def ids(self) -> list[str]:
        """All there are, newest first."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted((name for name in names if ID_PATTERN.fullmatch(name)), reverse=True)

    def all(self, limit: int | None = None) -> list[Build]:
        """The newest, or all, newest first; what can't be read is left out."""
        found: list[Build] = []
        for build_id in self.ids():
            if len(found) == limit:
                break
            with contextlib.suppress(NoSuchBuild):
                found.append(self.get(build_id))
        return found

    def cancel(self, build_id: str) -> Build:
        """Have it ended: at once where nobody runs it, else by whoever does. Raises NoSuchBuild."""
        self.get(build_id)
        with self._locked():
            build = self.get(build_id)
            if not build.waiting:
                return build
            hold = self.hold(build_id)
            if hold is None:
                return self._write(build.model_copy(update={"cancelling": True}))
            hold.release()
            return self._write(_ended(build, "cancelled"))

    def claim(self, build_id: str) -> Build | None:
        """It is to be run now, by whoever holds it; None where it isn't to be any more."""
        with self._locked():
            build = self.get(build_id)
            if not build.waiting:
                return None
            if build.cancelling:
                self._write(_ended(build, "cancelled"))
                return None
            if build.tries >= MAX_TRIES:
                reason = f"its process, or the service's, died {build.tries} times midway"
                self._write(_ended(build, "failed", reason=reason))
                return None
            (self.folder / build_id / "progress.json").unlink(missing_ok=True)
            now = build.started_at or _now()
            update = {"state": "running", "tries": build.tries + 1, "started_at": now}
            return self._write(build.model_copy(update=update))

    def let_go(self, build_id: str, *, counted: bool) -> Build:
        """It waits for another turn; `counted`: it died, and does so only so often."""
        with self._locked():
            build = self.get(build_id)
            tries = build.tries if counted else build.tries - 1
            return self._write(build.model_copy(update={"state": "queued", "tries": tries}))

    def end(self, build_id: str, state: State, **known: Any) -> Build:
        """It has ended so, with what is known of it now."""
        with self._locked():
            return self._write(_ended(self.get(build_id), state, **known))

    def hold(self, build_id: str) -> Hold | None:
        """The lock on a build, if nobody has it. Raises NoSuchBuild."""
        try:
            return _take(self.folder / build_id / "lock")
        except (FileNotFoundError, NotADirectoryError):
            raise NoSuchBuild(build_id) from None

    def held(self, build_id: str) -> bool:
        """Whether somebody runs it."""
        hold = self.hold(build_id)
        if hold is not None:
            hold.release()
        return hold is None

    def become_runner(self) -> Hold | None:
        """The lock of the process that runs builds, if no other has it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return _take(self.folder / ".runner")

    def progress(self, build_id: str) -> dict[str, Any] | None:
        """How far it is, as was told last."""
        try:
            found = json.loads((self.folder / build_id / "progress.json").read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def tell(self, build_id: str, progress: dict[str, Any]) -> None:
        """How far it is: worth no flush to the disk, and no failure."""
        file = self.folder / build_id / "progress.json"
        temporary = file.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(progress), encoding="utf-8")
            temporary.replace(file)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _new(self, asked: StartBuild, key: str | None, builds: list[Build]) -> Build:
        moment = datetime.now(UTC)
        if builds:  # after all others, whatever the clock says
            newest = datetime.strptime(builds[0].id[:MOMENT_CHARS], MOMENT).replace(tzinfo=UTC)
            moment = max(moment, newest + timedelta(microseconds=1))
        build_id = f"{moment.strftime(MOMENT)}-{secrets.token_hex(3)}"
        (self.folder / build_id).mkdir()
        keys = () if key is None else (key,)
        return self._write(Build(id=build_id, asked=asked, keys=keys, created_at=_now()))

    def _with_key(self, build: Build, key: str | None) -> Build:
        if key is None or key in build.keys:
            return build
        keys = (*build.keys, key)[-MAX_KEYS:]
        return self._write(build.model_copy(update={"keys": keys}))

    def _forget(self, builds: list[Build], keep: int) -> None:
        ended = [build for build in builds if not build.waiting]
        for build in ended[max(0, keep - 1) :]:
            shutil.rmtree(self.folder / build.id, ignore_errors=True)

    def _write(self, build: Build) -> Build:
        replace_text(self.folder / build.id / "build.json", build.model_dump_json())
        return build


class Waiting:
    """Looks again and again for builds that haven't ended. Those that have are read once."""

    def __init__(self, records: BuildRecords) -> None:
        self._records = records
        self._ended: set[str] = set()

    def look(self) -> list[Build]:
        """Those that wait or run now, oldest first. Blocking; raises OSError."""
        return [build for build in self.news() if build.waiting]

    def news(self) -> list[Build]:
        """The same, and among them what has ended since this was asked last."""
        ids = self._records.ids()
        self._ended.intersection_update(ids)
        found = []
        for build_id in reversed(ids):
            if build_id in self._ended:
                continue
            with contextlib.suppress(NoSuchBuild):
                found.append(self._records.get(build_id))
        # In the end: where one can't be read, those before it were told to nobody.
        self._ended.update(build.id for build in found if not build.waiting)
        return found


def _ended(build: Build, state: State, **known: Any) -> Build:
    """The build as it is when it has ended."""
    update = {**known, "state": state, "cancelling": False, "ended_at": _now()}
    return Build.model_validate({**build.model_dump(), **update})


def _take(file: Path) -> Hold | None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return Hold(descriptor)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
