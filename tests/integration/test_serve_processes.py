"""`hivlp serve --processes 2`: one address, one set of figures, one clean stop."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from hivlp.service.pulse import LOOK_S
from hivlp.service.settings import Settings
from hivlp.service.shared_metrics import PREFIX, remove_abandoned
from tests.integration.served_home import make_corpus, make_home
from tests.integration.served_process import alive, children, command, environment, served

STOP_S = 60
TWO = {"HIVLP_PROCESSES": "2", "HIVLP_DRAIN_S": "0"}
FEW_FILES = 8
"""No process has so few open, so that it can open none; and it may still wait for so many."""
COUNT = "hivlp_request_duration_seconds_count"
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"))
    return make_home(tmp_path_factory.mktemp("home"), corpus)


def figures(url: str) -> Series:
    text = httpx.get(f"{url}/metrics", timeout=30, verify=False).text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def figure(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def until(check: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not check():
        assert time.monotonic() < end, "it never came about"
        time.sleep(0.02)


def ask(url: str, text: str) -> None:
    """One search over a connection of its own: any process may take it."""
    body = {"query": text, "k": 3}
    answer = httpx.post(f"{url}/search/text", json=body, timeout=30, verify=False)
    assert answer.status_code == 200


def test_any_process_tells_the_figures_of_all_also_of_one_that_was_killed(home: Path) -> None:
    with served(home, **TWO) as (process, url):
        for number in range(60):
            ask(url, f"red {number % 20}")
        for _ in range(6):  # whichever is asked
            found = figures(url)
            assert figure(found, COUNT, route="/search/text", status="200") == 60
            asked = [v for (name, _), v in found.items() if name == "hivlp_cache_requests_total"]
            assert sum(asked) == 60
            assert figure(found, "hivlp_in_flight") == 0
            assert figure(found, "hivlp_processes") == 2
            assert figure(found, "hivlp_snapshot_age_seconds", index="default") > 0
            assert figure(found, "hivlp_snapshot_quarantined", index="default") == 0
            served_by = {p for n, p in found if n == "process_resident_memory_bytes"}
            assert served_by == {frozenset({("process", p)}) for p in ("0", "1", "parent")}
        assert sum(name == "hivlp_snapshot_info" for name, _ in found) == 1

        doomed, stays = children(process.pid)
        os.kill(doomed, signal.SIGKILL)
        until(lambda: doomed not in children(process.pid) and len(children(process.pid)) == 2)
        until(lambda: figure(figures(url), "hivlp_processes") == 2)
        for number in range(20):
            ask(url, f"blue {number}")
        found = figures(url)
        assert figure(found, COUNT, route="/search/text", status="200") == 80
        assert figure(found, "hivlp_process_deaths_total") == 1
        assert stays in children(process.pid)

        for number in range(20):  # a scanner makes no series
            assert httpx.get(f"{url}/wp-login-{number}.php").status_code == 404
        routes = [dict(labels)["route"] for name, labels in figures(url) if name == COUNT]
        assert sorted(routes) == ["/metrics", "/search/text", "unmatched"]
        own = children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0
    assert not any(alive(pid) for pid in own)


def test_one_that_hangs_is_killed_and_replaced_as_one_that_died(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as said, served(home, said, **TWO, HIVLP_HUNG_S="5") as (process, url):
        doomed = children(process.pid)[0]
        os.kill(doomed, signal.SIGSTOP)
        until(lambda: not alive(doomed))
        until(lambda: len(children(process.pid)) == 2)
        until(lambda: figure(figures(url), "hivlp_processes") == 2)
        assert figure(figures(url), "hivlp_process_deaths_total") >= 1
        assert f"(pid {doomed}) hangs" in log.read_text()
        assert f"(pid {doomed}) ended: it hung: no sign" in log.read_text()
        for number in range(20):
            ask(url, f"blue {number}")
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0


def test_one_that_was_stopped_for_less_than_that_goes_on(home: Path) -> None:
    with served(home, **TWO, HIVLP_HUNG_S="600") as (process, url):
        own = children(process.pid)
        os.kill(own[0], signal.SIGSTOP)
        time.sleep(2 * LOOK_S)
        os.kill(own[0], signal.SIGCONT)
        for number in range(20):
            ask(url, f"red {number}")
        assert children(process.pid) == own
        assert figure(figures(url), "hivlp_process_deaths_total") == 0


def test_one_that_can_not_be_begun_again_is_begun_later_while_the_other_serves(
    home: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with log.open("w") as said, served(home, said, **TWO) as (process, url):
        before = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (FEW_FILES, before[1]))
        doomed, stays = children(process.pid)
        os.kill(doomed, signal.SIGKILL)
        until(lambda: log.read_text().count("can't be begun") == 2)
        assert children(process.pid) == [stays]
        ask(url, "red")
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, before)
        until(lambda: figure(figures(url), "hivlp_processes") == 2)
        assert stays in children(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0


def test_what_was_accepted_is_finished_and_readiness_is_red_meanwhile(home: Path) -> None:
    more = {**TWO, "HIVLP_DRAIN_S": "3"}
    answers: list[tuple[int, int]] = []
    stop = threading.Event()

    def keep_asking(url: str) -> None:
        while not stop.is_set():
            search = httpx.post(f"{url}/search/text", json={"query": "red"}, timeout=30)
            answers.append((search.status_code, httpx.get(f"{url}/readyz").status_code))

    with served(home, **more) as (process, url):
        asking = threading.Thread(target=keep_asking, args=(url,))
        asking.start()
        until(lambda: len(answers) > 3)
        own = children(process.pid)
        process.send_signal(signal.SIGTERM)
        until(lambda: answers[-1][1] == 503)
        red = len(answers)
        until(lambda: len(answers) > red + 3)
        assert httpx.get(f"{url}/livez").headers["connection"] == "close"
        stop.set()
        asking.join()
        assert process.wait(STOP_S) == 0
    assert not any(alive(pid) for pid in own)
    assert {search for search, _ in answers} == {200}


def test_a_parent_that_is_killed_leaves_neither_processes_nor_a_folder_for_good(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with served(home, **TWO, TMPDIR=str(tmp_path)) as (process, _):
        own = children(process.pid)
        assert len(own) == 2
        (left,) = tmp_path.glob(f"{PREFIX}*")
        remove_abandoned()
        assert left.exists()  # somebody uses it
        process.kill()
        process.wait(STOP_S)
        until(lambda: not any(alive(pid) for pid in own))
    remove_abandoned()  # as the next service does
    assert not left.exists()


def test_a_start_that_is_told_to_stop_ends_with_0(home: Path) -> None:
    with subprocess.Popen(
        command("--home", str(home), "--port", "0"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(**TWO),
    ) as process:
        until(lambda: len(children(process.pid)) == 2)
        own = children(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
    assert not any(alive(pid) for pid in own)


def test_what_can_not_be_loaded_ends_the_start_with_1_and_its_reason(
    tmp_path: Path, home: Path
) -> None:
    (tmp_path / "indexes").symlink_to(home / "indexes")
    done = subprocess.run(
        command("--home", str(tmp_path), "--port", "0", "--artifact", str(tmp_path)),
        capture_output=True,
        text=True,
        env=environment(**TWO),
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "hivlp serve: " in done.stderr
    assert "manifest.json" in done.stderr
    assert "Traceback" not in done.stderr
    assert "is ready" not in done.stdout


def test_processes_share_out_the_cores_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hivlp.service.settings.available_threads", lambda: 8)
    assert [Settings(processes=n).workers for n in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
