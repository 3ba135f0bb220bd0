"""Running one build: what its process says and does, and what is written down of it.

The process is a real one that stands in for `hivlp build`, and does what its corpus says.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hivlp.service.jobs import execution
from hivlp.service.jobs.errors import NoSuchBuild
from hivlp.service.jobs.execution import MAX_LOG_BYTES, Means, run_build
from hivlp.service.jobs.records import Build, BuildRecords
from hivlp.service.priority import NICE
from hivlp.service.schemas import StartBuild

PATIENCE_S = 20
STAND_IN = """#!{python}
import json, signal, sys, time
corpus = next(one for one in sys.argv if one.startswith("/do/"))[4:]
told = open(next(one for one in sys.argv if one.startswith("--progress-json="))[16:], "w")
def tell(**what):
    told.write(json.dumps(what) + "\\n")
    told.flush()
def end(*_):
    raise KeyboardInterrupt
def build():
    tell(step="encode", unit="item", done=1, total=2, rate=None, seconds_left=None)
    if corpus == "done":
        what = dict(snapshot="v", active=True, items=2, encoded=1, left_out=0, notes=["n"])
        tell(result="done", **what)
    elif corpus == "failed":
        tell(result="failed", reason="no item is left")
        sys.exit(1)
    elif corpus == "talk":
        for _ in range(300):
            sys.stderr.write("x" * 9_999 + "\\n")
        sys.exit("hivlp build: the last word")
    else:
        time.sleep(60)
signal.signal(signal.SIGTERM, signal.SIG_IGN if corpus == "deaf" else end)
try:
    build()
except KeyboardInterrupt:
    tell(result="interrupted")
    sys.exit(143)
"""


class Place:
    """One home, and one build at a time that is run in a thread."""

    def __init__(self, home: Path) -> None:
        self.home, self.records = home, BuildRecords(home)
        self.stop = threading.Event()
        self.trouble: Exception | None = None

    def submit(self, what: str) -> str:
        asked = StartBuild(corpus=f"/do/{what}")
        return self.records.submit(asked, keep=9, max_waiting=9).id

    def run(self, build_id: str, end_s: float = 10.0) -> Build:
        run_build(Means(self.records, self.home, end_s, self.stop), build_id)
        return self.records.get(build_id)

    @contextmanager
    def running(self, build_id: str, end_s: float = 10.0) -> Iterator[None]:
        """Run it for the length of a block, which may go on once it has said something."""

        def work() -> None:
            try:
                self.run(build_id, end_s)
            except NoSuchBuild as error:
                self.trouble = error

        (self.records.folder / build_id / "progress.json").unlink(missing_ok=True)
        thread = threading.Thread(target=work)
        thread.start()
        wait(lambda: self.records.progress(build_id))
        yield
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "it never ended"

    def processes(self) -> list[int]:
        found = []
        for folder in Path("/proc").iterdir():
            said = folder / "cmdline"
            if folder.name.isdigit() and str(self.home).encode() in _read(said):
                found.append(int(folder.name))
        return found


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""


def wait(met: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not met():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    script = tmp_path / "stand-in"
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(execution.sys, "executable", str(script))
    monkeypatch.setattr(execution, "LOOK_S", 0.02)
    return Place(tmp_path / "home")


def test_what_came_of_it_is_written_down(place: Place) -> None:
    build = place.run(place.submit("done"))
    assert (build.state, build.snapshot, build.active) == ("done", "v", True)
    assert (build.items, build.encoded, build.left_out, build.notes) == (2, 1, 0, ("n",))
    assert not place.records.held(build.id)
    failed = place.run(place.submit("failed"))
    assert (failed.state, failed.reason) == ("failed", "no item is left")


def test_one_that_has_ended_is_not_run_again(place: Place) -> None:
    build_id = place.submit("failed")
    first = place.run(build_id)
    assert place.run(build_id) == first


def test_one_that_is_cancelled_ends_in_good_order(place: Place) -> None:
    build_id = place.submit("sleep")
    with place.running(build_id):
        assert place.records.held(build_id)
        assert place.records.cancel(build_id).cancelling
    assert place.records.get(build_id).state == "cancelled"
    assert place.processes() == []


def test_one_that_does_not_heed_is_killed_after_its_time(place: Place) -> None:
    build_id = place.submit("deaf")
    with place.running(build_id, end_s=0.2):
        place.records.cancel(build_id)
    build = place.records.get(build_id)
    assert (build.state, build.reason) == ("cancelled", None)
    assert place.processes() == []


@pytest.mark.parametrize("what", ["sleep", "deaf"])
def test_when_whoever_runs_it_stops_it_waits_for_another_turn(place: Place, what: str) -> None:
    build_id = place.submit(what)
    with place.running(build_id, end_s=0.2):
        place.stop.set()
    build = place.records.get(build_id)
    assert (build.state, build.tries) == ("queued", 0)
    assert place.processes() == []


def test_one_that_somebody_else_ends_is_tried_again_and_not_for_ever(place: Place) -> None:
    build_id = place.submit("sleep")
    for tries in (1, 2, 3):
        with place.running(build_id):
            (process,) = place.processes()
            os.kill(process, signal.SIGTERM)
        build = place.records.get(build_id)
        assert (build.state, build.tries) == ("queued", tries)
    build = place.run(build_id)
    assert build.state == "failed"
    assert build.reason is not None
    assert "died 3 times" in build.reason


def test_one_whose_record_is_removed_ends(place: Place) -> None:
    build_id = place.submit("sleep")
    with place.running(build_id):
        (place.records.folder / build_id / "build.json").unlink()
    assert isinstance(place.trouble, NoSuchBuild)
    assert place.processes() == []


def test_its_last_words_are_the_reason_and_its_log_has_an_end(place: Place) -> None:
    build = place.run(place.submit("talk"))
    assert (build.state, build.reason) == ("failed", "hivlp build: the last word")
    assert (place.records.folder / build.id / "log.txt").stat().st_size == MAX_LOG_BYTES


def test_all_tries_of_one_share_the_bounds_of_its_log(place: Place) -> None:
    build_id = place.submit("talk")
    log = place.records.folder / build_id / "log.txt"
    log.write_bytes(b"a try that died\n" * (MAX_LOG_BYTES // 16 - 1))
    place.run(build_id)
    kept = log.read_bytes()
    assert len(kept) == MAX_LOG_BYTES
    assert kept.startswith(b"a try that died\n")
    assert kept.endswith(b"x" * 16)


def test_somebody_else_waits_until_it_has_ended(place: Place) -> None:
    build_id = place.submit("sleep")
    with place.running(build_id):
        other = Place(place.home)
        waiting = threading.Thread(target=other.run, args=(build_id,))
        waiting.start()
        place.records.cancel(build_id)
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
    assert place.records.get(build_id).tries == 1


def test_a_process_that_can_not_be_begun_is_a_failure(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution.sys, "executable", "/nowhere/python")
    build = place.run(place.submit("done"))
    assert build.state == "failed"
    assert build.reason is not None
    assert build.reason.startswith("its process can't be begun: ")


def test_a_process_lets_others_go_first_and_ends_when_whoever_began_it_is_gone() -> None:
    code = (
        "import os, time\n"
        "from hivlp.service.jobs import child\n"
        "def build(arguments):\n"
        "    print(os.nice(0), *arguments, flush=True)\n"
        "    time.sleep(60)\n"
        "child.hivlp = build\n"
        "child.main(['build', 'x'])\n"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        nice, *arguments = process.stdout.readline().split()
        assert (int(nice), arguments) == (min(19, os.nice(0) + NICE), ["build", "x"])
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(PATIENCE_S) == -signal.SIGTERM
