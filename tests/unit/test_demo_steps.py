"""The demo's chain: each step once, again when its inputs change, on from where it was stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hivlp.models.errors import HivlpError
from hivlp.service.demo.steps import StampFile, Step, StepFailed, run_steps


@pytest.fixture
def stamps(tmp_path: Path) -> StampFile:
    return StampFile(tmp_path / "steps.json")


def _writes(product: Path, log: list[str]) -> Callable[[], None]:
    def run() -> None:
        log.append(product.name)
        product.write_text("made")

    return run


def _chain(folder: Path, log: list[str], **inputs: str) -> list[Step]:
    names = ("first", "second", "third")
    return [Step(n, _writes(folder / n, log), folder / n, {"in": inputs.get(n, "")}) for n in names]


def _quiet(line: str) -> None:
    pass


def test_a_second_run_does_nothing(tmp_path: Path, stamps: StampFile) -> None:
    log: list[str] = []
    assert run_steps(_chain(tmp_path, log), stamps, _quiet) == 3
    assert run_steps(_chain(tmp_path, log), stamps, _quiet) == 0
    assert log == ["first", "second", "third"]


def test_a_changed_input_runs_its_step_and_all_later_ones(
    tmp_path: Path, stamps: StampFile
) -> None:
    log: list[str] = []
    run_steps(_chain(tmp_path, log), stamps, _quiet)
    log.clear()
    run_steps(_chain(tmp_path, log, second="new"), stamps, _quiet)
    assert log == ["second", "third"]


def test_a_missing_product_is_made_again(tmp_path: Path, stamps: StampFile) -> None:
    log: list[str] = []
    run_steps(_chain(tmp_path, log), stamps, _quiet)
    log.clear()
    (tmp_path / "third").unlink()
    run_steps(_chain(tmp_path, log), stamps, _quiet)
    assert log == ["third"]


def test_an_interrupted_chain_goes_on_where_it_stopped(tmp_path: Path, stamps: StampFile) -> None:
    log: list[str] = []

    def interrupted() -> None:
        raise KeyboardInterrupt

    steps = _chain(tmp_path, log)
    broken = [steps[0], Step("second", interrupted, tmp_path / "second", {"in": ""}), steps[2]]
    with pytest.raises(KeyboardInterrupt):
        run_steps(broken, stamps, _quiet)
    run_steps(steps, stamps, _quiet)
    assert log == ["first", "second", "third"]


def test_a_damaged_stamp_file_means_that_nothing_is_done(tmp_path: Path, stamps: StampFile) -> None:
    log: list[str] = []
    run_steps(_chain(tmp_path, log), stamps, _quiet)
    (tmp_path / "steps.json").write_text("{ not json")
    assert run_steps(_chain(tmp_path, log), stamps, _quiet) == 3


def test_a_failing_command_stops_the_chain_and_is_named(tmp_path: Path, stamps: StampFile) -> None:
    step = Step("no such thing", ["no-such-command"], tmp_path / "never", {})
    with pytest.raises(StepFailed, match="'no such thing' ended with exit code 2"):
        run_steps([step], stamps, _quiet)
    assert stamps.read() == {}


def test_a_step_that_leaves_nothing_is_an_error(tmp_path: Path, stamps: StampFile) -> None:
    step = Step("idle", lambda: None, tmp_path / "nothing", {})
    with pytest.raises(HivlpError, match="left no"):
        run_steps([step], stamps, _quiet)
