"""What a run writes: weights with AdamW's moments, and curves."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hivlp.models.errors import TrainingError
from hivlp.models.training.loop.checkpoints import (
    Checkpoints,
    RunState,
    load_model,
    load_optimiser,
)
from hivlp.models.training.loop.curves import Curves, read_curves
from hivlp.models.training.loop.optimiser import make_optimiser, split
from hivlp.models.training.loop.schedule import Plan
from hivlp.models.training.loop.settings import TrainSettings
from hivlp.models.training.loop.train import checked_gradient


def test_norms_and_biases_do_not_decay() -> None:
    model = nn.ModuleDict({"line": nn.Linear(3, 2), "norm": nn.LayerNorm(2)})
    model["frozen"] = nn.Linear(2, 2).requires_grad_(False)
    decayed, kept = split(model.named_parameters())
    assert [name for name, _ in decayed] == ["line.weight"]
    assert [name for name, _ in kept] == ["line.bias", "norm.weight", "norm.bias"]
    first, second = make_optimiser(model, TrainSettings()).param_groups
    assert (first["weight_decay"], second["weight_decay"]) == (0.01, 0.0)
    assert first["betas"] == (0.9, 0.98)


def test_a_gradient_that_is_no_number_ends_the_run_before_the_weights_do() -> None:
    assert checked_gradient(3.0, 1) == 3.0
    with pytest.raises(TrainingError, match="step 7: the gradient is nan"):
        checked_gradient(float("nan"), 7)


def stepped(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    optimiser = make_optimiser(model, TrainSettings(learning_rate=0.1))
    for step in range(steps):
        model(torch.full((2, 3), float(step))).square().sum().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad()
    return model, optimiser


def test_a_checkpoint_gives_back_weights_and_moments(tmp_path: Path) -> None:
    model, optimiser = stepped(0, 3)
    kept = Checkpoints(tmp_path, keep=2)
    kept.save(model, optimiser, RunState(3, 1.5, 1, Plan(9, 1, 0.25, timed=True)))
    other, other_optimiser = stepped(1, 1)
    found = kept.newest()
    assert found is not None
    assert found[1] == RunState(3, 1.5, 1, Plan(9, 1, 0.25, timed=True))
    load_model(found[0], other)
    load_optimiser(found[0], other, other_optimiser)
    for each in ((model, optimiser), (other, other_optimiser)):
        each[0](torch.ones(2, 3)).square().sum().backward()
        each[1].step()
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, another)


def test_the_last_checkpoints_are_kept_and_a_spoilt_one_is_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimiser = stepped(0, 1)
    kept = Checkpoints(tmp_path, keep=2)
    for step in (5, 7, 9):
        kept.save(model, optimiser, RunState(step, 0.0, 1, Plan(9)))
    assert [path.name for path in kept.all()] == ["step-00000007", "step-00000009"]
    with (kept.all()[-1] / "model.safetensors").open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x55")
    found = kept.newest()
    assert found is not None
    assert found[1].step == 7
    assert "step-00000009/model.safetensors: differs" in capsys.readouterr().err


@pytest.mark.parametrize(("keep", "left"), [(1, [8]), (3, [5, 7, 8])])
def test_a_spoilt_checkpoint_takes_no_whole_ones_place(
    tmp_path: Path, keep: int, left: list[int]
) -> None:
    model, optimiser = stepped(0, 1)
    for step in (5, 7, 9):
        Checkpoints(tmp_path, keep=3).save(model, optimiser, RunState(step, 0.0, 1, Plan(9)))
    (tmp_path / "checkpoints" / "step-00000009" / "state.json").write_text("{")
    goes_on = Checkpoints(tmp_path, keep)
    found = goes_on.newest()
    assert found is not None
    assert found[1].step == 7
    goes_on.save(model, optimiser, RunState(8, 0.0, 1, Plan(9)))
    assert [path.name for path in goes_on.all()] == [f"step-{step:08d}" for step in left]
    goes_on.save(model, optimiser, RunState(10, 0.0, 1, Plan(9)))
    assert goes_on.all()[-1].name == "step-00000010"


def test_a_checkpoint_that_was_being_written_counts_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / ".step-00000003.part").mkdir(parents=True)
    assert Checkpoints(tmp_path, keep=1).newest() is None


def test_tied_weights_are_kept_and_loaded(tmp_path: Path) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    optimiser = make_optimiser(model, TrainSettings())
    path = Checkpoints(tmp_path, keep=1).save(model, optimiser, RunState(1, 0.0, 1, Plan(9)))
    load_model(path, model)


def line(step: int) -> dict[str, object]:
    names = ("learning_rate", "gradient", "pictures_per_second", "epoch")
    return {"step": step, "losses": {"total": 1.0}} | dict.fromkeys(names, 0.5)


def test_curves_that_go_on_hold_each_step_once(tmp_path: Path) -> None:
    with Curves(tmp_path, 0) as curves:
        for step in (1, 2, 3):
            curves.write(line(step))
    with (tmp_path / "curves.jsonl").open("a") as stream:
        stream.write('{"step": 4, "los')
    with Curves(tmp_path, 2) as curves:
        curves.write(line(3))
    assert [each["step"] for each in read_curves(tmp_path)] == [1, 2, 3]
    assert any((tmp_path / "tensorboard").iterdir())


def test_without_tensorboard_the_curves_are_files_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with Curves(tmp_path, 0) as curves:
        curves.write(line(1))
    assert capsys.readouterr().err.count("hivlp[tensorboard]") == 1
    assert not (tmp_path / "tensorboard").exists()
    assert len(read_curves(tmp_path)) == 1
