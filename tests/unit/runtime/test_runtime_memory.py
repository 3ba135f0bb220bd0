"""What memory may still be taken: the system's word, and a container's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hivlp.models.runtime.cgroups import oom_kills
from hivlp.models.runtime.memory import available_memory

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {8 * GIB // 1024} kB\n"}
V2 = {
    "proc/self/cgroup": "0::/pod/one\n",
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/memory.current": f"{7 * GIB}\n",
    "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
}
V1 = {
    "proc/self/cgroup": "5:memory:/box\n",
    "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
}


STAT = "sys/fs/cgroup/pod/memory.stat"
V1_STAT = "sys/fs/cgroup/memory/box/memory.stat"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        (MEMINFO, 8 * GIB),
        ({**MEMINFO, **V2}, 2 * GIB),
        ({**MEMINFO, **V1}, 2 * GIB),
        ({**MEMINFO, **V2, "sys/fs/cgroup/pod/memory.current": f"{9 * GIB}\n"}, 0),
        ({"proc/meminfo": "MemAvailable: lots\n"}, None),
        ({**MEMINFO, **V2, STAT: f"active_file {GIB}\ninactive_file {GIB // 2}\n"}, 5 * GIB // 2),
        ({**MEMINFO, **V1, V1_STAT: f"total_active_file {GIB // 2}\n"}, 5 * GIB // 2),
    ],
)
def test_the_least_that_anyone_grants_is_available(
    tmp_path: Path, files: dict[str, str], expected: int | None
) -> None:
    assert available_memory(root=machine(tmp_path, files)) == expected


def test_this_machine_has_some() -> None:
    found = available_memory()
    assert found is None or found > 0


def test_killings_for_want_of_memory_are_those_of_the_own_group(tmp_path: Path) -> None:
    assert oom_kills(root=tmp_path) == 0
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/app\n")
    folder = tmp_path / "sys/fs/cgroup/app"
    folder.mkdir(parents=True)
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(root=tmp_path) == 2
