"""A service as a process, asked to build over HTTP; what it builds, and how long that takes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hivlp.service.answers import BuildAnswer
from hivlp.service.client import Client, Retries
from tests.integration.many_texts import many_texts
from tests.integration.served_home import make_corpus

READY = re.compile(r"hivlp is ready: (http://\S+)")
PATIENCE_S = 60
MANY = 1_000
TEXTS = 10 * MANY
"""Items, and texts, which take the tiny model seconds. With more items a file of them would lie on
the disk before the end, and leave room on a full one when the build fails.
"""


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HIVLP_")}
    return {**clean, **more}


@dataclass(frozen=True, slots=True)
class Place:
    """A home, and the root that corpora lie below."""

    home: Path
    root: Path

    @classmethod
    def make(cls, folder: Path, built: Path) -> Place:
        """A copy of a built home, squares, and many texts."""
        shutil.copytree(built, folder / "home")
        make_corpus(folder / "root" / "squares")
        many_texts(folder / "root" / "texts", MANY, TEXTS // MANY)
        return cls(folder / "home", folder / "root")

    @property
    def squares(self) -> str:
        return str(self.root / "squares")

    @property
    def texts(self) -> str:
        return str(self.root / "texts" / "many.jsonl")

    def variables(self, **more: str) -> dict[str, str]:
        roots = json.dumps([str(self.root)])
        return environment(HIVLP_JOBS__ROOTS=roots, HIVLP_LOG__LEVEL="warning", **more)

    @contextlib.contextmanager
    def served(self, **more: str) -> Iterator[tuple[subprocess.Popen[str], Client]]:
        """The service and a client of it."""
        command = [sys.executable, "-m", "hivlp.service.main", "serve"]
        command += ["--home", str(self.home), "--port", "0"]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=self.variables(**more)
        ) as process:
            try:
                assert process.stdout is not None
                found = READY.search(process.stdout.readline())
                assert found is not None
                with Client(found.group(1), retries=Retries(tries=1)) as client:
                    yield process, client
            finally:
                process.kill()

    @contextlib.contextmanager
    def worker(self, **more: str) -> Iterator[subprocess.Popen[str]]:
        """A `hivlp worker` that is ready."""
        command = [sys.executable, "-m", "hivlp.service.main", "worker", "--home", str(self.home)]
        said = Path(tempfile.mkstemp(prefix="worker-", suffix=".log", dir=self.root.parent)[1])
        with (
            said.open("w") as log,
            subprocess.Popen(command, stderr=log, text=True, env=self.variables(**more)) as process,
        ):
            try:
                gone(lambda: "worker is ready" not in said.read_text())
                yield process
            finally:
                process.kill()

    def processes_of_builds(self) -> list[int]:
        """The processes that build in this home."""
        found = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                said = (folder / "cmdline").read_bytes() if folder.name.isdigit() else b""
                if b"hivlp.service.jobs.child" in said and str(self.home).encode() in said:
                    found.append(int(folder.name))
        return found


def wait_for(
    client: Client, build_id: str, met: Callable[[BuildAnswer], bool], during_s: float = PATIENCE_S
) -> BuildAnswer:
    """The build, once it is as wanted."""
    end = time.monotonic() + during_s
    while True:
        build = client.build(build_id)
        if met(build):
            return build
        assert time.monotonic() < end, f"never came to that: {build}"
        time.sleep(0.05)


def ended(build: BuildAnswer) -> bool:
    return build.state in ("done", "failed", "cancelled")


def midway(build: BuildAnswer) -> bool:
    """Some of the corpus is encoded, and not all of it."""
    progress = build.progress
    return progress is not None and progress.step.startswith("encode") and progress.done > 0


def gone(found: Callable[[], object]) -> None:
    """Wait until there is nothing of that any more."""
    end = time.monotonic() + PATIENCE_S
    while found():
        assert time.monotonic() < end, "it never went"
        time.sleep(0.05)
