"""What several serving processes share: their socket, and the pauses between tries."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from hivlp.service import processes
from hivlp.service.cli import listening
from hivlp.service.jobs.settings import JobSettings
from hivlp.service.processes import LONGEST_PAUSE_S, Pauses, Processes, how_it_ended
from hivlp.service.settings import Settings


def tell(bound: socket.socket, link: Connection[int, None]) -> None:
    """In a process begun by spawn: what protocol the socket that it was sent speaks."""
    link.send(bound.proto)


def test_a_process_that_is_sent_the_socket_knows_that_it_speaks_tcp() -> None:
    """asyncio turns Nagle's delay, 40 ms an answer, off only for sockets that say so."""
    spawn = multiprocessing.get_context("spawn")
    own, theirs = spawn.Pipe(duplex=False)
    with listening("127.0.0.1", 0) as bound:
        process = spawn.Process(target=tell, args=(bound, theirs))
        process.start()
        assert own.poll(60)
        assert own.recv() == socket.IPPROTO_TCP
        process.join(60)
    assert bound.proto == socket.IPPROTO_TCP


def end_late(link: Connection[None, bool], late_s: float) -> None:
    """In a process begun by spawn: heed a signal to end so much later."""

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is sent again and again
        time.sleep(late_s)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    link.send(True)
    time.sleep(60)


@pytest.mark.parametrize(
    ("jobs", "clean"),
    [
        ({"roots": ("/c",), "end_s": 60}, True),
        ({"roots": ("/c",), "end_s": 60, "runner": "worker", "url": "unix:///queue"}, False),
        ({"end_s": 60}, False),
    ],
)
def test_a_process_that_may_wait_for_its_build_to_end_is_not_killed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: dict[str, Any], clean: bool
) -> None:
    monkeypatch.setattr(processes, "GRACE_S", 0.2)
    monkeypatch.setattr(processes, "AGAIN_S", 0.1)
    monkeypatch.setattr(processes.shared_metrics, "join", lambda *_: None)
    settings = Settings(processes=2, drain_s=0, jobs=JobSettings.model_validate(jobs))
    spawn = multiprocessing.get_context("spawn")
    own, theirs = spawn.Pipe()
    with listening("127.0.0.1", 0) as bound:
        process = spawn.Process(target=end_late, args=(theirs, 2.0))
        process.start()
        assert own.poll(60)
        parent = Processes(settings, bound, tmp_path, lambda: None)
        parent._children.append(processes._Child("0", process, own, 0.0))
        assert parent._end() is clean
        assert process.exitcode == (0 if clean else -signal.SIGKILL)
    theirs.close()


def test_a_place_that_keeps_dying_is_begun_again_ever_later_and_one_that_lived_at_once() -> None:
    pauses = Pauses()
    waits = [pauses.after("0", lived_s=1.0) for _ in range(8)]
    assert waits == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert pauses.after("1", lived_s=1.0) == 0.0
    assert pauses.after("0", lived_s=3_600.0) == 0.0
    assert pauses.after("0", lived_s=1.0) == 1.0


@pytest.mark.parametrize(
    ("code", "said"),
    [(-signal.SIGKILL, "killed by SIGKILL"), (1, "exit code 1"), (-200, "exit code -200")],
)
def test_how_a_process_ended_is_said_in_words(code: int, said: str) -> None:
    assert how_it_ended(code) == said
