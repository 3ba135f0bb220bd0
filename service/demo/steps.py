"""A chain of steps, each done once: a stamped step is skipped until its inputs change.

Every step is another process running an `hivlp` command, so that the one that serves has never
imported torch, and an interrupted step goes on where its command left off.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hivlp.models.artifact import fingerprint
from hivlp.models.errors import HivlpError


class StepFailed(HivlpError):
    """A step of the chain ended with an error; what it printed stands above."""

    def __init__(self, name: str, exit_code: int) -> None:
        super().__init__(f"step {name!r} ended with exit code {exit_code}; see the lines above")
        self.name = name
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Step:
    """One step: what it is called, what it runs, what must exist afterwards.

    `run` is a function of our own, or the arguments of an `hivlp` command. `inputs` are the values
    that, when changed, make the step run again; the steps before count by themselves.
    """

    name: str
    run: Callable[[], object] | Sequence[str]
    product: Path
    inputs: Mapping[str, str]


class StampFile:
    """Which steps are done, and from what: a JSON object, replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> dict[str, str]:
        """Step name -> fingerprint; empty when there is none or it is damaged."""
        try:
            stamps = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return stamps if isinstance(stamps, dict) else {}

    def add(self, name: str, stamp: str) -> None:
        """Remember one finished step."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.read() | {name: stamp}, indent=2) + "\n", encoding="utf-8")
        part.replace(self._path)


def run_steps(steps: Sequence[Step], stamps: StampFile, say: Callable[[str], None]) -> int:
    """Run what is not done yet, in order; returns how many steps ran. Raises StepFailed."""
    done, before, ran = stamps.read(), "", 0
    for number, step in enumerate(steps, start=1):
        stamp = fingerprint({**step.inputs, "name": step.name, "before": before})
        before = stamp
        if done.get(step.name) == stamp and step.product.exists():
            continue
        say(f"[{number}/{len(steps)}] {step.name}")
        started = time.monotonic()
        _run(step)
        if not step.product.exists():
            raise HivlpError(f"step {step.name!r} ended well but left no {step.product}")
        stamps.add(step.name, stamp)
        ran += 1
        say(f"[{number}/{len(steps)}] {step.name}: {time.monotonic() - started:.0f} s")
    return ran


def _run(step: Step) -> None:
    if callable(step.run):
        step.run()
        return
    command = [sys.executable, "-m", "hivlp.service.main", *step.run]
    exit_code = subprocess.run(command, check=False).returncode
    if exit_code:
        raise StepFailed(step.name, exit_code)
