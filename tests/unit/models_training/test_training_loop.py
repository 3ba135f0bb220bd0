"""The loop: rates, checkpoints, curves; killed and gone on; two processes against one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hivlp.models.cli_train import train as train_command
from hivlp.models.errors import HivlpError, TrainingError
from hivlp.models.training.loop import train as loop
from hivlp.models.training.loop.checkpoints import (
    Checkpoints,
    RunState,
    load_model,
    load_optimiser,
)
from hivlp.models.training.loop.curves import Curves, read_curves
from hivlp.models.training.loop.optimiser import make_optimiser, split
from hivlp.models.training.loop.schedule import Clock, Plan, Planner, learning_rate
from hivlp.models.training.loop.settings import TrainSettings
from hivlp.models.training.loop.train import checked_gradient
from hivlp.models.training.loop.trained import load_run
from tests.unit.models_training import pictured

SHORT = ("train.steps=8", "train.batch=8", "train.log_steps=1", "model.text.dropout=0.1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictured.folder(tmp_path_factory.mktemp("corpus") / "pictures", pictured.rows())


def arguments(corpus: Path, out: Path, changes: Sequence[str]) -> list[str]:
    sets = [word for change in changes for word in ("--set", change)]
    return ["hivlp-tiny", "--corpus", str(corpus), "--out", str(out), *sets]


def run(corpus: Path, out: Path, *changes: str) -> Path:
    assert train_command(arguments(corpus, out, changes)) == 0
    return out


def weights(out: Path) -> dict[str, Tensor]:
    return dict(load_file(Checkpoints(out, 1).all()[-1] / "model.safetensors"))


def process(
    corpus: Path, out: Path, changes: Sequence[str], **environment: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hivlp.service.main", "train"]
    return subprocess.Popen(
        [*command, *arguments(corpus, out, changes)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_rate_rises_over_a_tenth_and_falls_to_its_end() -> None:
    settings = TrainSettings()
    rates = [learning_rate(done, settings) for done in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert rates == pytest.approx([0, 5e-5, 1e-4, 5.5e-5, 1e-5])


def test_a_plan_goes_on_evenly_from_where_it_was_made() -> None:
    assert [Plan(10).progress(step) for step in (0, 3, 10)] == [0, 0.3, 1]
    later = Plan(50, start=10, done=0.2, timed=True)
    assert [later.progress(step) for step in (10, 30, 50, 51)] == pytest.approx([0.2, 0.6, 1, 1])


def look(planner: Planner, steps: range, pace: float, before: float = 0.0) -> list[int]:
    """The steps before which a planner plans, where each takes `pace` seconds."""
    return [s for s in steps if planner.look(s, before + (s - steps.start) * pace)]


def test_a_run_without_a_time_limit_is_never_planned() -> None:
    planner = Planner(Plan(1000), float("inf"), 1000, 0)
    assert look(planner, range(100), 1.0) == []
    assert planner.plan == Plan(1000)


def test_steps_are_timed_once_and_the_rest_fits_the_time() -> None:
    planner = Planner(Plan(10**6), 1000.0, 10**6, 0)
    # the first 3 steps are passed over, then 2 % of the time is timed: 20 s of half a second each
    assert look(planner, range(100), 0.5) == [43]
    plan = planner.plan
    assert plan.timed
    # until then, progress was that of the time
    assert plan.progress(43) == pytest.approx(0.5 * 43 / 1000)
    assert plan.steps * 0.5 == pytest.approx(980, abs=1)


def test_a_plan_never_has_more_steps_than_the_recipe() -> None:
    planner = Planner(Plan(60), 1000.0, 60, 0)
    look(planner, range(60), 0.5)
    assert planner.plan.steps == 60


MADE = Plan(1000, start=43, done=0.01, timed=True)


@pytest.mark.parametrize(("pace", "kept"), [(0.92, True), (1.0, True), (2.0, False), (0.5, False)])
def test_a_plan_is_kept_unless_it_would_miss_its_time(pace: float, kept: bool) -> None:
    planner = Planner(MADE, 1000.0, 10**6, 100)
    found = look(planner, range(100, 200), pace, before=100)
    if kept:
        assert (found, planner.plan) == ([], MADE)
        return
    # 3 steps are passed over, then 20 s are timed, and 10 steps at least
    step = 103 + max(10, round(20 / pace))
    assert found == [step]
    assert planner.plan.progress(step) == pytest.approx(MADE.progress(step))
    left = 1000 - 100 - (step - 100) * pace
    assert planner.plan.steps == step + int(left * 0.98 / pace)


def test_a_clock_counts_earlier_sittings() -> None:
    moments = iter([100.0, 103.0])
    assert Clock(7.0, lambda: next(moments)).seconds == 10.0


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


def test_a_run_leaves_what_its_document_says(corpus: Path, tmp_path: Path) -> None:
    out = run(corpus, tmp_path / "run", *SHORT)
    for name in ("recipe.toml", "data.json", "tokenizer.json", "data/pictures.arrow"):
        assert (out / name).is_file()
    lines = read_curves(out)
    assert [each["step"] for each in lines] == list(range(1, 9))
    assert {"total", "retrieval_1", "mlm", "matching"} <= set(lines[-1]["losses"])
    assert lines[-1]["learning_rate"] == pytest.approx(1e-4)
    state = load_run(out).state
    assert (state.step, state.finished) == (8, True)


def test_the_same_seed_gives_the_same_weights_and_another_one_others(
    corpus: Path, tmp_path: Path
) -> None:
    first, again, other = (
        weights(run(corpus, tmp_path / str(i), *SHORT, f"train.seed={seed}"))
        for i, seed in enumerate((0, 0, 1))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_killed_run_goes_on_to_the_weights_of_one_never_stopped(
    corpus: Path, tmp_path: Path
) -> None:
    slow = (*SHORT, "train.steps=40", "train.checkpoint_seconds=0")
    whole = weights(run(corpus, tmp_path / "whole", *slow))
    out = tmp_path / "killed"
    killed = process(corpus, out, slow)
    deadline = time.monotonic() + 60
    while len(Checkpoints(out, 1).all()) < 2 and time.monotonic() < deadline:
        assert killed.poll() is None, killed.communicate()[1]
        time.sleep(0.02)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (*_, newest) = Checkpoints(out, 1).all()
    assert newest.name < "step-00000040", "it was over before it was killed"
    found = weights(run(corpus, out, *slow))
    assert all(torch.equal(whole[name], found[name]) for name in whole)
    assert [each["step"] for each in read_curves(out)] == list(range(1, 41))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def together(corpus: Path, out: Path, changes: Sequence[str], count: int) -> list[str]:
    """A run on several processes, as a launcher starts them; what each said."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    shared |= {"ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        process(corpus, out, changes, RANK=str(rank), LOCAL_RANK=str(rank), **shared)
        for rank in range(count)
    ]
    said = [each.communicate(timeout=90)[1] for each in started]
    assert [each.returncode for each in started] == [0] * count, said
    return said


@pytest.mark.parametrize("form", ["nested", "per_exit"])
def test_two_processes_learn_what_one_does_from_the_same_pictures(
    corpus: Path, tmp_path: Path, form: str
) -> None:
    # Without matching, whose negatives are each process's own. Every caption has three words, so
    # that each process hides as many, and the means of their means is the mean.
    same = (f"form={form}", "train.steps=4", "train.accumulation=2", "train.log_steps=1")
    same = (*same, "model.cross=none", "train.clip=0.5")
    alone = run(corpus, tmp_path / "one", *same, "train.batch=16")
    said = together(corpus, tmp_path / "two", (*same, "train.batch=8"), 2)
    assert "training: 4 steps" in said[0]
    assert "training" not in said[1]
    one, two = weights(alone), weights(tmp_path / "two")
    # sums in another order: float32's last digits, which AdamW's division enlarges where a gradient
    # is nearly 0. Observed: at most 2e-5 at a rate of 2e-3.
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=2e-4, msg=name)
    moved = weights(run(corpus, tmp_path / "start", *same, "train.batch=16", "train.steps=1"))
    assert max(float((one[name] - moved[name]).abs().max()) for name in one) > 2e-3
    losses = [
        [each["losses"]["retrieval_1"] for each in read_curves(tmp_path / name)]
        for name in ("one", "two")
    ]
    assert len(losses[0]) == 4


def test_bf16_learns_what_fp32_does_within_its_few_digits(corpus: Path, tmp_path: Path) -> None:
    runs = {"fp32": run(corpus, tmp_path / "fp32", *SHORT), "bf16": tmp_path / "bf16"}
    # accelerate knows one precision a process
    other = process(corpus, runs["bf16"], (*SHORT, "train.precision=bf16"))
    said = other.communicate(timeout=90)[1]
    assert other.returncode == 0, said
    losses = {name: read_curves(out)[-1]["losses"] for name, out in runs.items()}
    for name, loss in losses["fp32"].items():
        assert losses["bf16"][name] == pytest.approx(loss, rel=0.03, abs=0.003), name
    full, half = weights(runs["fp32"]), weights(runs["bf16"])
    assert all(value.dtype == torch.float32 for value in half.values())
    assert not all(torch.equal(full[name], half[name]) for name in full)


def test_a_run_goes_on_only_as_the_run_it_was(corpus: Path, tmp_path: Path) -> None:
    out = run(corpus, tmp_path / "run", *SHORT)
    with pytest.raises(TrainingError, match=r"holds a run with train.batch = 8, not 16"):
        run(corpus, out, *SHORT, "train.batch=16")
    with pytest.raises(TrainingError, match=r"holds a run with --corpus: paths"):
        run(tmp_path, out, *SHORT)
    run(corpus, out, *SHORT, "train.keep=5", "data.workers=1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(TrainingError, match="is a folder of something else"):
        run(corpus, tmp_path / "other", *SHORT)


def test_a_run_keeps_its_number_of_processes(corpus: Path, tmp_path: Path) -> None:
    out = run(corpus, tmp_path / "run", *SHORT)
    state = Checkpoints(out, 1).all()[-1] / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"processes": 4}))
    with pytest.raises(TrainingError, match="begun on 4 processes and can't go on on 1"):
        run(corpus, out, *SHORT)


@pytest.fixture
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at a run's clock takes 50 ms, of which a step has two."""

    def clock(before: float) -> Clock:
        moments = count()
        return Clock(before, lambda: next(moments) * 0.05)

    monkeypatch.setattr(loop, "Clock", clock)


LIMITED = (*SHORT, "train.steps=0", "train.max_seconds=6")


@pytest.mark.usefixtures("even_clock")
def test_a_time_limit_ends_a_run_with_its_rate_down(corpus: Path, tmp_path: Path) -> None:
    out = run(corpus, tmp_path / "run", *LIMITED)
    state, lines = load_run(out).state, read_curves(out)
    assert state.finished
    assert state.step == state.plan.steps == lines[-1]["step"]
    assert 55 <= state.step <= 60
    rates = [each["learning_rate"] for each in lines]
    assert max(rates) > 1.9e-3
    assert rates[-1] == pytest.approx(1e-4)


@pytest.mark.usefixtures("even_clock")
def test_a_run_with_a_time_limit_goes_on_by_the_plan_that_it_had(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limited = (*LIMITED, "train.checkpoint_seconds=0", "train.keep=100")
    whole = run(corpus, tmp_path / "whole", *limited)
    out = tmp_path / "killed"
    shutil.copytree(whole, out)
    for later in Checkpoints(out, 100).all()[30:]:
        shutil.rmtree(later)
    capsys.readouterr()
    found = weights(run(corpus, out, *limited))
    assert "goes on after step 30 of" in (said := capsys.readouterr().err)
    assert "planned" not in said
    assert load_run(out).state.plan == load_run(whole).state.plan
    assert all(torch.equal(value, found[name]) for name, value in weights(whole).items())


def test_a_run_may_start_from_another_and_leave_parts_of_it_out(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = run(corpus, tmp_path / "first", *SHORT)
    still = ("train.learning_rate=1e-12", "train.last_learning_rate=0", "model.cross=none")
    out = run(corpus, tmp_path / "second", *SHORT, f"train.from={first}", *still)
    assert "its part 'cross' is left out" in capsys.readouterr().err
    before, after = weights(first), weights(out)
    assert not any(name.startswith("cross.") for name in after)
    assert all(torch.allclose(before[name], after[name], atol=1e-9) for name in after)
    assert (first / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()
    with pytest.raises(HivlpError, match="mis-shaped weights"):
        run(corpus, tmp_path / "third", *SHORT, f"train.from={first}", "model.head_hidden=32")
    with pytest.raises(TrainingError, match="no run's folder, no checkpoint"):
        run(corpus, tmp_path / "fourth", *SHORT, f"train.from={tmp_path}")


@pytest.mark.parametrize("form", ["nested", "per_exit"])
def test_early_heads_are_fitted_afterwards_and_nothing_else_is_touched(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    short = (*SHORT, f"form={form}")
    flat = run(corpus, tmp_path / "flat", *short, "model.dims=[32]")
    assert load_run(flat).model.dual.text.exits == (3,)
    early = (*short, f"train.from={flat}", "train.only=early")
    fitted = run(corpus, tmp_path / "fitted", *early)
    assert "the first 2 of ours begin anew" in capsys.readouterr().err
    before, after = weights(flat), weights(fitted)
    heads = [f"dual.{tower}.heads" for tower in ("text", "image")]
    for head in heads:  # one level's only head is three levels' last
        moved = {n.replace(f"{head}.0", f"{head}.2"): w for n, w in before.items() if head in n}
        before = {n: w for n, w in before.items() if head not in n} | moved
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    rest = sorted(set(after) - set(before))
    assert rest
    assert all(name.startswith(tuple(f"{h}.{i}." for h in heads for i in (0, 1))) for name in rest)
    assert not {"mlm", "matching"} & set(read_curves(fitted)[-1]["losses"])
    again = weights(run(corpus, tmp_path / "again", *early[:-2], f"train.from={fitted}", early[-1]))
    assert not any(torch.equal(again[name], after[name]) for name in rest if "bias" in name)


def test_early_heads_alone_need_a_run_and_several_levels(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"train\.only: early heads alone are trained on a run"):
        run(corpus, tmp_path / "a", *SHORT, "train.only=early")
    flat = run(corpus, tmp_path / "flat", *SHORT, "model.dims=[32]")
    early = ("train.only=early", f"train.from={flat}", "model.dims=[32]")
    with pytest.raises(TrainingError, match=r"train\.only: model\.dims has one level"):
        run(corpus, tmp_path / "b", *SHORT, *early)


def test_streamed_shards_train_too(tmp_path: Path) -> None:
    shards = pictured.tars(tmp_path / "tars", pictured.rows())
    out = run(shards, tmp_path / "run", *SHORT, "data.stream=true", "data.stream_items=45")
    assert load_run(out).state.step == 8
    assert not (out / "data").exists()
    with pytest.raises(TrainingError, match=r"data.stream_items: how many pictures are a pass"):
        run(shards, tmp_path / "other", *SHORT, "data.stream=true")


def test_arguments_that_lack_something_are_a_usage_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train_command(["hivlp-tiny", "--out", "x"]) == 2
    assert "--corpus is needed" in capsys.readouterr().err
    assert train_command(["--corpus", "x"]) == 2
    assert "a recipe (see --list) is needed" in capsys.readouterr().err


def test_the_list_says_what_each_recipe_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command(["--list"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [each.split()[0] for each in shown] == [
        "hivlp",
        "hivlp-finetune",
        "hivlp-small",
        "hivlp-tiny",
    ]
    assert all(len(each.split()) > 5 for each in shown)
