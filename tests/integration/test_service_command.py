"""`hivlp serve` as a process: its messages, its exit codes, a clean stop."""

from __future__ import annotations

import fcntl
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from hivlp.index.snapshot.amend import LOCK
from hivlp.index.snapshot.store import SnapshotStore
from tests.integration.served_home import make_corpus, make_home
from tests.integration.served_process import READY, command, environment, served

STOP_S = 30


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    return make_home(tmp_path_factory.mktemp("home"), corpus)


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=environment(**more),
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_told_to_stop_and_ends_with_0(home: Path, stop: signal.Signals) -> None:
    with served(home) as (process, url):
        assert url.startswith("http://127.0.0.1:")
        answer = httpx.post(f"{url}/search/text", json={"query": "red", "k": 1}).json()
        assert answer["hits"][0]["id"].startswith("red/")
        process.send_signal(stop)
        assert process.wait(STOP_S) == 0


def test_it_stops_while_a_change_waits_for_another_process_and_tells_whoever_asked(
    home: Path,
) -> None:
    store = SnapshotStore(home)
    before = store.versions("default")
    answers: list[httpx.Response] = []

    def put(url: str) -> None:
        answers.append(httpx.put(f"{url}/items/late", json={"texts": ["x"]}, timeout=60))

    with (home / "indexes" / "default" / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with served(home, HIVLP_CHANGES__WAIT_S="600") as (process, url):
            asked = threading.Thread(target=put, args=(url,))
            asked.start()
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
            asked.join(10)
    (answer,) = answers
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_writable")
    assert store.versions("default") == before


def test_all_it_says_is_lines_of_json_that_lead_to_a_request_and_never_to_its_key(
    home: Path, tmp_path: Path
) -> None:
    arguments = command("--home", str(home), "--port", "0")
    said = tmp_path / "stderr"
    with (
        said.open("wb") as stderr,
        subprocess.Popen(
            arguments, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment()
        ) as process,
    ):
        try:
            assert process.stdout is not None
            url = READY.search(process.stdout.readline())
            assert url is not None
            headers = {"X-API-Key": "my-secret-key", "X-Request-ID": "find-me"}
            asked = {"query": "a nice unicorn"}
            httpx.post(f"{url.group(1)}/search/text", json=asked, headers=headers)
            with socket.create_connection(("127.0.0.1", httpx.URL(url.group(1)).port or 0)) as raw:
                raw.sendall(b"my-secret-key\x1b[31m / HTTP/9\r\n\r\n")  # counted, not told
                assert b"400" in raw.recv(1000)
            process.send_signal(signal.SIGTERM)
            assert process.wait(STOP_S) == 0
        finally:
            process.kill()
    lines = [json.loads(line) for line in said.read_text("utf-8").splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    (found,) = [line for line in lines if line.get("request_id") == "find-me"]
    assert (found["route"], found["status"]) == ("/search/text", 200)
    assert not any(line["logger"] == "uvicorn.error" for line in lines)
    assert "unicorn" not in said.read_text("utf-8")
    assert "my-secret-key" not in said.read_text("utf-8")


def test_no_other_protocol_is_spoken(home: Path) -> None:
    upgrade = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
    }
    with served(home) as (_, url):
        answer = httpx.get(f"{url}/livez", headers=upgrade)
    assert (answer.status_code, answer.json()) == (200, {"status": "live"})


def test_a_served_process_has_one_thread_per_openmp_pool_and_no_torch(home: Path) -> None:
    code = (
        "import os, sys, threading\n"
        "from hivlp.service import cli\n"
        "cli._run = lambda settings, bound: sorted(m for m in sys.modules if m == 'torch') and 1\n"
        f"cli.serve(['--home', {str(home)!r}, '--port', '0'])\n"
        "print(os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])\n"
        "assert 'faiss' not in sys.modules and 'torch' not in sys.modules\n"
    )
    clean = {k: v for k, v in environment().items() if not k.startswith("OMP_")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=clean, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "PASSIVE"]


def test_a_taken_port_is_said_plainly(home: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--home", str(home), "--port", str(port))
    assert done.returncode == 1
    assert f"can't listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_empty_home_is_said_plainly(tmp_path: Path) -> None:
    done = run("--home", str(tmp_path))
    assert done.returncode == 1
    assert "hivlp demo" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_home_that_can_not_be_loaded_ends_with_1(tmp_path: Path, home: Path) -> None:
    (tmp_path / "indexes").symlink_to(home / "indexes")
    done = run("--home", str(tmp_path), "--port", "0", "--artifact", str(tmp_path))
    assert done.returncode == 1
    assert "manifest.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_misspelt_setting_is_said_plainly(home: Path) -> None:
    done = run("--home", str(home), HIVLP_LIMITS__MAX_KK="3")
    assert done.returncode == 1
    assert "did you mean HIVLP_LIMITS__MAX_K" in done.stderr


def test_help_has_an_example_and_wrong_usage_ends_with_2() -> None:
    helped = run("--help")
    assert helped.returncode == 0
    assert "curl" in helped.stdout
    assert run("--prot", "1").returncode == 2
    assert json.dumps({"query": "red heart", "k": 3}) in helped.stdout
