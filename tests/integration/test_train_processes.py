"""`hivlp train` in processes of its own: killed and gone on, several together, in bf16."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hivlp.models.training.loop.checkpoints import Checkpoints
from hivlp.models.training.loop.curves import read_curves
from tests.unit.models_training import pictured
from tests.unit.models_training.runs import SHORT, arguments, run, weights


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pictured.folder(tmp_path_factory.mktemp("corpus") / "pictures", pictured.rows())


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


def test_a_killed_run_goes_on_to_the_weights_of_one_never_stopped(
    corpus: Path, tmp_path: Path
) -> None:
    slow = (*SHORT, "train.steps=40", "train.checkpoint_seconds=0", "train.accumulation=2")
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
    lines = {name: read_curves(tmp_path / name) for name in ("one", "two")}
    assert [each["step"] for each in lines["two"]] == [1, 2, 3, 4]
    # losses are the first process's own, but gradients are joined before their length is taken
    gradients = {name: [each["gradient"] for each in found] for name, found in lines.items()}
    assert gradients["two"] == pytest.approx(gradients["one"], rel=1e-3)


def test_bf16_learns_what_fp32_does_within_its_few_digits(corpus: Path, tmp_path: Path) -> None:
    runs = {"fp32": run(corpus, tmp_path / "fp32", *SHORT), "bf16": tmp_path / "bf16"}
    # accelerate knows one precision a process; a loading process beside it draws the same pictures
    other = process(corpus, runs["bf16"], (*SHORT, "train.precision=bf16", "data.workers=1"))
    said = other.communicate(timeout=90)[1]
    assert other.returncode == 0, said
    losses = {name: read_curves(out)[-1]["losses"] for name, out in runs.items()}
    for name, loss in losses["fp32"].items():
        assert losses["bf16"][name] == pytest.approx(loss, rel=0.03, abs=0.003), name
    full, half = weights(runs["fp32"]), weights(runs["bf16"])
    assert all(value.dtype == torch.float32 for value in half.values())
    assert not all(torch.equal(full[name], half[name]) for name in full)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
@pytest.mark.parametrize(("precision", "far"), [("fp32", 0.01), ("auto", 0.03)])
def test_a_gpu_learns_what_a_cpu_does(
    corpus: Path, tmp_path: Path, precision: str, far: float
) -> None:
    # without dropout, which every device draws in its own way
    same = (*SHORT, "model.text.dropout=0", f"train.precision={precision}")
    runs = {"cpu": tmp_path / "cpu", "gpu": tmp_path / "gpu"}
    for name, out in runs.items():
        cpu = {"ACCELERATE_USE_CPU": "true"} if name == "cpu" else {}
        started = process(corpus, out, same, **cpu)
        assert started.wait(timeout=90) == 0, started.communicate()[1]
    losses = {name: read_curves(out)[0]["losses"] for name, out in runs.items()}
    for name, loss in losses["cpu"].items():
        assert losses["gpu"][name] == pytest.approx(loss, rel=far, abs=0.003), name
