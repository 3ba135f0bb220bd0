"""Running one build: a process from its start to what came of it. Blocking; for a thread.

    run_build(Means(records, home, end_s=10, stop=threading.Event()), build_id)

What the process says of itself comes through a pipe (`hivlp.index.journal`), so that even a full
disk can be told of. One that says nothing was killed, and then its exit code tells by what.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hivlp.index.snapshot.store import SnapshotStore
from hivlp.models.errors import HivlpError
from hivlp.models.runtime.cgroups import oom_kills
from hivlp.models.runtime.stopping import SIGTERM_CODE
from hivlp.service.jobs.errors import NoSuchBuild
from hivlp.service.jobs.records import Build, BuildRecords, Hold
from hivlp.service.schemas import StartBuild

log = logging.getLogger("hivlp.service")

LOOK_S = 0.2
"""So often it is asked whether a build is to end."""
AGAIN_S = 1.0
MAX_LOG_BYTES = 1 << 20
MAX_SAID_BYTES = 4_096
OPTIONS = (
    *("index", "artifact", "split", "images", "aliases", "metadata_group", "max_failures"),
    *("batch_size", "workers", "threads", "build_threads", "family", "level1", "rows"),
    *("max_memory", "max_query_ms", "max_build_s", "target"),
)
RESULTS = ("snapshot", "active", "items", "encoded", "left_out", "notes")
FLAGS = ("store_states", "forget_changes", "materialise")


@dataclass(frozen=True, slots=True)
class Means:
    """What a build is run with: `stop` makes it end, and wait for another turn."""

    records: BuildRecords
    home: Path
    end_s: float
    stop: threading.Event


def run_build(means: Means, build_id: str) -> None:
    """Run it, unless it has ended or ends before its turn; write down what came of it.

    Waits while somebody else runs it. Raises NoSuchBuild, OSError.
    """
    hold = _wait_for(means, build_id)
    if hold is None:
        return
    try:
        build = means.records.claim(build_id)
        if build is not None:
            log.info("build %s of index %s has begun", build_id, build.asked.index)
            _run(means, build, hold)
    finally:
        hold.release()


def _wait_for(means: Means, build_id: str) -> Hold | None:
    """The lock on it; None once it has ended elsewhere, or when told to stop."""
    while not means.stop.is_set() and means.records.get(build_id).waiting:
        hold = means.records.hold(build_id)
        if hold is not None:
            return hold
        means.stop.wait(LOOK_S)
    return None


def _run(means: Means, build: Build, hold: Hold) -> None:
    kills = oom_kills()
    try:
        process = _Process(build, means, hold)
    except OSError as error:
        reason = f"its process can't be begun: {error}"
        _write(lambda: means.records.end(build.id, "failed", reason=reason), means.stop)
        return
    code = process.wait(lambda: means.stop.is_set() or _cancelling(means, build.id), means.end_s)
    if process.result.get("result") != "done":
        _clean(means.home, build.asked.index)
    known = _Outcome(process.result, code, process.last_words, process.told_to_end)
    killed = oom_kills() > kills
    _write(lambda: _settle(means, build.id, known, oom=killed), means.stop)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a process said came of it, if anything, its exit code, and the last it said to people.

    `told_to_end`: by us, so that its end is no failure.
    """

    result: Mapping[str, Any]
    code: int
    last_words: str
    told_to_end: bool

    @property
    def interrupted(self) -> bool:
        """By a signal to end, whoever sent it: to all of our group, say."""
        ended = self.code in (-signal.SIGTERM, SIGTERM_CODE)
        return ended or self.result.get("result") == "interrupted"


def _settle(means: Means, build_id: str, outcome: _Outcome, *, oom: bool) -> None:
    """Write down what came of it."""
    records, result = means.records, outcome.result
    if result.get("result") == "done":
        ended = records.end(build_id, "done", **{name: result.get(name) for name in RESULTS})
    elif records.get(build_id).cancelling:
        ended = records.end(build_id, "cancelled")
    elif result.get("result") == "failed":
        ended = records.end(build_id, "failed", reason=str(result.get("reason")))
    elif outcome.told_to_end or outcome.interrupted:
        ended = records.let_go(build_id, counted=not outcome.told_to_end)
    else:
        reason = _reason(outcome.code, outcome.last_words, oom)
        ended = records.end(build_id, "failed", reason=reason)
    log.info("build %s is %s%s", build_id, ended.state, f": {ended.reason}" if ended.reason else "")


def _write(write: Callable[[], object], stop: threading.Event) -> None:
    """Write, and try again while that fails: on a full disk, room may be made."""
    said = False
    while True:
        try:
            write()
            return
        except OSError as error:
            if not said:
                log.error("what came of a build can't be written down yet: %s", error)
            said = True
            if stop.wait(AGAIN_S):
                return


def _cancelling(means: Means, build_id: str) -> bool:
    """Whether it is to end: one whose record somebody removed is, too."""
    try:
        return means.records.get(build_id).cancelling
    except NoSuchBuild:
        return True
    except OSError:
        return False


def _clean(home: Path, index: str) -> None:
    """Remove the folder of a build that was killed; the next build would, but that may be never."""
    try:
        SnapshotStore(home).remove_leftovers(index)
    except (OSError, HivlpError) as error:
        log.warning("what a build left in index %s can't be removed: %s", index, error)


def _reason(code: int, last_words: str, oom: bool) -> str:
    """Why a process ended that didn't say so itself."""
    if code == -signal.SIGKILL:
        cause = "the system was out of memory" if oom else "most likely for want of memory"
        return (
            f"its process was killed ({cause}): give it more, or let it need less "
            "(docs/operations.md, How much memory a build takes)"
        )
    if code < 0:
        return f"its process was ended by signal {-code} ({signal.strsignal(-code)})"
    said = last_words.strip().splitlines()
    return said[-1] if said else f"its process ended with code {code}"


def command(asked: StartBuild, home: Path) -> list[str]:
    """The arguments of `hivlp` that build what was asked."""
    found = ["build", asked.corpus, f"--home={home}", f"--must={','.join(asked.must) or 'none'}"]
    for name in OPTIONS:
        value = getattr(asked, name)
        if value is not None:
            found.append(f"--{name.replace('_', '-')}={value}")
    found += [f"--{name.replace('_', '-')}" for name in FLAGS if getattr(asked, name)]
    return found if asked.activate else [*found, "--no-activate"]


def _environment() -> Mapping[str, str]:
    """Ours, without what only the service needs to know: keys, and where its Redis is."""
    return {name: value for name, value in os.environ.items() if not name.startswith("HIVLP_")}


class _Process:
    """The process of a build, and two threads that read what it says."""

    def __init__(self, build: Build, means: Means, hold: Hold) -> None:
        self.result: dict[str, Any] = {}
        self.told_to_end = False
        self._build, self._records = build, means.records
        self._said = bytearray()
        reading, writing = os.pipe()
        arguments = command(build.asked, means.home.resolve())
        arguments.append(f"--progress-json=/dev/fd/{writing}")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "hivlp.service.jobs.child", *arguments],
                stdin=subprocess.PIPE,  # never written to: see child.py
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=(writing, hold.descriptor),
                env=_environment(),
                start_new_session=True,  # Ctrl-C in a terminal is for whoever started us
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._follow, args=(os.fdopen(reading, "rb"),)),
            threading.Thread(target=self._listen, args=(self._process.stderr,)),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def last_words(self) -> str:
        """The end of what it said to people."""
        return self._said.decode("utf-8", "replace")

    def wait(self, to_end: Callable[[], bool], end_s: float) -> int:
        """Until it has ended; told to end, it is killed after `end_s` seconds. Its exit code."""
        kill_s = float("inf")
        while True:
            with suppress(subprocess.TimeoutExpired):
                code = self._process.wait(LOOK_S)
                break
            if time.monotonic() > kill_s:
                self._process.kill()
            elif not self.told_to_end and to_end():
                self.told_to_end = True
                self._process.terminate()
                kill_s = time.monotonic() + end_s
        for reader in self._readers:
            reader.join()
        assert self._process.stdin is not None
        self._process.stdin.close()
        return code

    def _follow(self, told: IO[bytes]) -> None:
        """Write down its progress as it comes, and keep the last line, which is the result."""
        with told:
            for line in told:
                with suppress(ValueError):
                    found = json.loads(line)
                    if "result" in found:
                        self.result = found
                    else:
                        self._records.tell(self._build.id, found)

    def _listen(self, said: IO[bytes]) -> None:
        """Keep what it says, as tries before it did: all in a file, up to a limit, and the end of
        it here.
        """
        file = self._records.folder / self._build.id / "log.txt"
        with said:
            while chunk := os.read(said.fileno(), 1 << 16):
                self._said += chunk
                del self._said[:-MAX_SAID_BYTES]
                with suppress(OSError), file.open("ab") as log_file:
                    log_file.write(chunk[: max(0, MAX_LOG_BYTES - log_file.tell())])
