"""What a build's process is begun with, why it ended, and how builds are counted."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from hivlp.index import cli
from hivlp.service.jobs import execution
from hivlp.service.jobs.execution import command
from hivlp.service.jobs.metrics import BuildMetrics, Tally
from hivlp.service.jobs.records import BuildRecords, Waiting
from hivlp.service.schemas import StartBuild

# Every option, none as it is by default, and what `hivlp build` is to make of it.
EVERY: dict[str, Any] = {
    "corpus": "/data/-x",
    "index": "other",
    "artifact": "/a b",
    "activate": False,
    "split": "val",
    "images": "/pictures",
    "aliases": "img2dataset",
    "metadata_group": "--home=/elsewhere",
    "max_failures": 0.5,
    "batch_size": 7,
    "workers": 3,
    "threads": 4,
    "build_threads": 5,
    "store_states": True,
    "forget_changes": True,
    "materialise": True,
    "family": "graph",
    "level1": "sq8",
    "rows": "fp16",
    "must": ["rebuild", "batch"],
    "max_memory": 10**9,
    "max_query_ms": 1.5,
    "max_build_s": 60.0,
    "target": 0.5,
}


def parsed(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> dict[str, Any]:
    """What `hivlp build` reads from arguments."""
    seen: list[argparse.Namespace] = []

    def take(given: argparse.Namespace, _: object) -> int:
        seen.append(given)
        return 0

    monkeypatch.setattr(cli, "_build", take)
    assert cli.build(arguments) == 0
    return vars(seen[0])


def test_every_option_reaches_the_command_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = StartBuild(**EVERY)
    assert set(EVERY) | {"key"} == set(StartBuild.model_fields)
    given = parsed(monkeypatch, command(asked, Path("/home"))[1:])
    assert given.pop("no_activate") is True
    assert (given.pop("home"), given.pop("artifact")) == (Path("/home"), Path("/a b"))
    assert given.pop("must") == ("batch", "rebuild")
    assert given.pop("progress_json") is None
    assert given.pop("explain") is False
    wanted = {name: one for name, one in EVERY.items() if name in given}
    assert given == wanted
    assert set(EVERY) - set(wanted) == {"activate", "artifact", "must"}


def test_what_is_not_given_is_as_the_command_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = parsed(monkeypatch, ["/data"])
    plain["home"] = Path("/home")
    asked = StartBuild(corpus="/data")
    assert parsed(monkeypatch, command(asked, Path("/home"))[1:]) == plain
    nothing = StartBuild(corpus="/data", must=[])
    assert parsed(monkeypatch, command(nothing, Path("/home"))[1:])["must"] == ()


def test_a_build_gets_nothing_of_what_the_service_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVLP_KEYS__ADMIN", "secret")
    monkeypatch.setenv("AWS_PROFILE", "corpora")
    environment = execution._environment()
    assert environment["AWS_PROFILE"] == "corpora"
    assert not any(name.startswith("HIVLP_") for name in environment)


@pytest.mark.parametrize(
    ("code", "words", "oom", "reason"),
    [
        (-signal.SIGKILL, "", True, "killed (the system was out of memory)"),
        (-signal.SIGKILL, "", False, "killed (most likely for want of memory)"),
        (-signal.SIGSEGV, "", False, "ended by signal 11 (Segmentation fault)"),
        (1, "Traceback\n  x\nImportError: no faiss\n", False, "ImportError: no faiss"),
        (2, "usage: ...\nhivlp build: error: no such option\n", False, "no such option"),
        (3, " \n", False, "its process ended with code 3"),
    ],
)
def test_a_process_that_said_nothing_is_told_of_by_how_it_ended(
    code: int, words: str, oom: bool, reason: str
) -> None:
    assert reason in execution._reason(code, words, oom)


def submit(records: BuildRecords, index: str) -> str:
    asked = StartBuild(corpus="/c", index=index)
    return records.submit(asked, keep=10, max_waiting=10).id


def test_builds_that_ended_are_read_once_and_the_oldest_comes_first(tmp_path: Path) -> None:
    records = BuildRecords(tmp_path)
    waiting = Waiting(records)
    assert waiting.look() == []
    old, new, over = (submit(records, index) for index in "abc")
    records.claim(over)
    records.end(over, "done")
    assert [build.id for build in waiting.news()] == [old, new, over]
    (records.folder / over / "build.json").write_text("never read again")
    records.claim(old)
    assert [build.id for build in waiting.look()] == [old, new]
    records.cancel(new)
    assert [(build.id, build.state) for build in waiting.news()] == [
        (old, "running"),
        (new, "cancelled"),
    ]
    assert [build.id for build in waiting.news()] == [old]


def test_each_build_that_ends_is_counted_once_whoever_ran_it(tmp_path: Path) -> None:
    records, registry = BuildRecords(tmp_path), CollectorRegistry()
    before = submit(records, "before")
    records.claim(before)
    records.end(before, "done")
    open_one = submit(records, "open")
    tally = Tally(records, BuildMetrics(registry))
    records.claim(open_one)
    records.end(open_one, "failed", reason="x")
    quick = submit(records, "quick")
    records.cancel(quick)
    for _ in range(3):
        tally.look()

    def count(result: str) -> float | None:
        return registry.get_sample_value("hivlp_build_total", {"result": result})

    assert (count("done"), count("failed"), count("cancelled")) == (0, 1, 1)
    assert registry.get_sample_value("hivlp_build_duration_seconds_count") == 1
