"""What a run leaves every few minutes, so that it can be killed at any time and go on.

    checkpoints/step-00001200/
        model.safetensors       every weight
        optimiser.safetensors   AdamW's two moments and step of each weight, by the weight's name
        state.json              where the run is; sha256 of both; written last

A checkpoint is written in a folder beside its place and renamed, so one with its name is whole; if
a disk has spoilt it all the same, the one before counts. Notable: no state of random generators and
no position in the data is kept, because both follow from the seed and the step.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hivlp.models.artifact import file_record
from hivlp.models.errors import CheckpointError, TrainingError
from hivlp.models.network.checkpoint import load_strictly, read_safetensors
from hivlp.models.runtime.progress import say
from hivlp.models.training.loop.schedule import Plan

FOLDER, MODEL, OPTIMISER, STATE = (
    "checkpoints",
    "model.safetensors",
    "optimiser.safetensors",
    "state.json",
)
FORMAT_VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")
_STEP = "step"


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run is: steps done, seconds spent, on how many processes, its plan, and whether it is
    over.
    """

    step: int
    seconds: float
    processes: int
    plan: Plan
    finished: bool = False


class Checkpoints:
    """The checkpoints of one run's folder, the newest `keep` of them.

    Notable: what `newest` passed over as spoilt takes no whole one's place: the next `save` removes
    it.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder / FOLDER
        self._keep = keep
        self._whole = math.inf  # steps of the newest one that is known to be whole

    def save(self, model: nn.Module, optimiser: torch.optim.Optimizer, state: RunState) -> Path:
        """Write a checkpoint in one go and drop the oldest. Raises OSError, as for a full disk."""
        target = self.folder / f"step-{state.step:08d}"
        part = self.folder / f".{target.name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file(_apart(model.state_dict()), part / MODEL)
        save_file(_optimiser_tensors(model, optimiser), part / OPTIMISER)
        hashes = {name: file_record(part / name).sha256 for name in (MODEL, OPTIMISER)}
        told = {"format_version": FORMAT_VERSION, **asdict(state), "sha256": hashes}
        (part / STATE).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
        for file in (*part.iterdir(), part):
            _sync(file)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        _sync(self.folder)
        spoilt = [p for p in self.all() if p != target and _steps(p) > min(self._whole, state.step)]
        for each in spoilt:
            shutil.rmtree(each, ignore_errors=True)
        self._whole = state.step
        for old in self.all()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def all(self) -> list[Path]:
        """Every checkpoint that was put in place, oldest first."""
        there = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted((path for path in there if _NAME.fullmatch(path.name)), key=_steps)

    def newest(self) -> tuple[Path, RunState] | None:
        """The newest one whose files are as they were written; spoilt ones are told of."""
        self._whole = -1
        for path in reversed(self.all()):
            try:
                state = read_state(path)
            except CheckpointError as error:
                say(f"passed over a checkpoint: {error}")
            else:
                self._whole = _steps(path)
                return path, state
        return None


def _steps(path: Path) -> int:
    """After how many steps it was written."""
    return int(path.name.rpartition("-")[2])


def read_state(path: Path) -> RunState:
    """A checkpoint's state, its files checked. Raises CheckpointError."""
    try:
        told = json.loads((path / STATE).read_text(encoding="utf-8"))
        for name, wanted in told.pop("sha256").items():
            if file_record(path / name).sha256 != wanted:
                raise CheckpointError(path / name, "differs from what was written")
        if told.pop("format_version") != FORMAT_VERSION:
            raise CheckpointError(path / STATE, f"format_version is not {FORMAT_VERSION}")
        return RunState(**told | {"plan": Plan(**told["plan"])})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(path, f"not a whole checkpoint: {error}") from error


def load_model(path: Path, model: nn.Module) -> None:
    """Weights of a checkpoint into a model. Raises TowerError naming those that don't fit."""
    load_strictly(model, read_safetensors(path / MODEL), path / MODEL)


def load_optimiser(path: Path, model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """Moments and steps of a checkpoint into an optimiser over `model`'s weights.

    Raises CheckpointError for one of other weights.
    """
    saved = read_safetensors(path / OPTIMISER)
    names = _names(model, optimiser)
    told = optimiser.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for index, name in enumerate(names):
        own = {key.split("/", 1)[0]: value for key, value in saved.items() if _of(key) == name}
        if not own:
            raise CheckpointError(path / OPTIMISER, f"nothing of the weight {name}")
        state[index] = {k: v.reshape(()) if k == _STEP else v for k, v in own.items()}
    optimiser.load_state_dict({"state": state, "param_groups": told["param_groups"]})


def _of(key: str) -> str:
    return key.split("/", 1)[1]


def _names(model: nn.Module, optimiser: torch.optim.Optimizer) -> list[str]:
    """The optimiser's weights by name, in its order."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = optimiser.param_groups
    return [names[id(weight)] for group in groups for weight in group["params"]]


def _optimiser_tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    states: Mapping[int, Mapping[str, Any]] = optimiser.state_dict()["state"]
    return {
        f"{key}/{name}": value.detach().cpu().contiguous()
        for index, name in enumerate(_names(model, optimiser))
        for key, value in states.get(index, {}).items()
    }


def _apart(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that share no memory, as the format wants it: tied weights are written twice."""
    seen: set[int] = set()
    found = {}
    for name, value in state.items():
        plain = value.detach().cpu().contiguous()
        shared = plain.numel() > 0 and plain.untyped_storage().data_ptr() in seen
        seen.add(plain.untyped_storage().data_ptr())
        found[name] = plain.clone() if shared else plain
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_processes(state: RunState, processes: int) -> None:
    """Raises TrainingError where a run would go on with another number of processes."""
    if state.processes != processes:
        raise TrainingError(
            f"this run was begun on {state.processes} processes and can't go on on {processes}: "
            "its batches would be others"
        )
