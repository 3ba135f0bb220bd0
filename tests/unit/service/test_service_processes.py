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
from hivlp.service.pulse import LOOK_S, Pulse, Silence
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


def test_more_processes_than_cores_have_no_more_cores_to_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hivlp.service.settings.available_threads", lambda: 2)
    monkeypatch.setattr(processes.shared_metrics, "join", lambda *_: None)
    with listening("127.0.0.1", 0) as bound:
        cores = Processes(Settings(processes=4), bound, tmp_path, lambda: None)._cores
    cores.tell(0, 1)
    assert cores.free()
    cores.tell(3, 1)
    assert not cores.free()


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
        parent._children.append(processes._Child("0", process, own, 0.0, Silence(Pulse(spawn))))
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


def beat_until_told(pulse: Pulse, link: Connection[None, None]) -> None:
    """In a process begun by spawn."""
    while not link.poll(0.01):
        pulse.beat()


def test_a_process_begun_by_spawn_beats_in_the_memory_of_its_parent() -> None:
    spawn = multiprocessing.get_context("spawn")
    pulse = Pulse(spawn)
    own, theirs = spawn.Pipe()
    process = spawn.Process(target=beat_until_told, args=(pulse, theirs))
    process.start()
    end = time.monotonic() + 60
    while pulse.count < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    own.send(None)
    process.join(60)
    silence = Silence(pulse)
    silence.look(0.0)
    assert silence.look(LOOK_S) == LOOK_S


@pytest.fixture
def pulse() -> Pulse:
    return Pulse(multiprocessing.get_context("spawn"))


def test_silence_is_the_time_since_the_last_beat_that_was_seen(pulse: Pulse) -> None:
    silence = Silence(pulse)
    pulse.beat()
    assert [silence.look(0.5 * second) for second in range(4)] == [0.0, 0.5, 1.0, 1.5]
    pulse.beat()
    assert [silence.look(2.0), silence.look(2.5)] == [0.0, 0.5]


def test_one_that_does_not_beat_yet_or_rests_is_not_silent(pulse: Pulse) -> None:
    silence = Silence(pulse)
    assert [silence.look(second) for second in (0.0, 1.0, 100.0)] == [0.0, 0.0, 0.0]
    pulse.beat()
    silence.look(101.0)
    pulse.rest()
    assert [silence.look(second) for second in (102.0, 103.0)] == [0.0, 0.0]


def test_time_in_which_the_parent_stood_still_too_counts_as_hardly_any(pulse: Pulse) -> None:
    silence = Silence(pulse)
    pulse.beat()
    silence.look(0.0)
    assert silence.look(3_600.0) == 2 * LOOK_S


@pytest.mark.parametrize(
    ("code", "said"),
    [(-signal.SIGKILL, "killed by SIGKILL"), (1, "exit code 1"), (-200, "exit code -200")],
)
def test_how_a_process_ended_is_said_in_words(code: int, said: str) -> None:
    assert how_it_ended(code) == said
