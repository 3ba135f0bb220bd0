"""How many threads this process may use: what a container grants, not what the host has.

The least of the CPU affinity and of the CPU quotas of every control group (v1 or v2) that the
process is in. A pool sized by the host's processors would thrash under a quota.
"""

from __future__ import annotations

import os
from pathlib import Path

from hivlp.models.runtime.cgroups import MOUNT, group, read, with_parents

_V1_FOLDERS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def available_threads(*, root: Path = Path("/"), affinity: int | None = None) -> int:
    """Threads that can run at once, at least 1; a quota of 2.5 processors gives 2.

    `root` is where /proc and /sys are found; `affinity` replaces what the system says.
    """
    allowed = _affinity() if affinity is None else affinity
    quotas = [*_v2_quotas(root), *_v1_quotas(root)]
    return max(1, int(min([float(allowed), *quotas])))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _v2_quotas(root: Path) -> list[float]:
    """`cpu.max` holds "quota period" or "max period", in microseconds."""
    quotas = []
    for folder in with_parents(root / MOUNT, group(root, controller="")):
        words = read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
            quotas.append(int(words[0]) / int(words[1]))
    return quotas


def _v1_quotas(root: Path) -> list[float]:
    """`cpu.cfs_quota_us` is -1 where there is none."""
    quotas = []
    for name in _V1_FOLDERS:
        for folder in with_parents(root / MOUNT / name, group(root, controller="cpu")):
            quota = read(folder / "cpu.cfs_quota_us").strip()
            period = read(folder / "cpu.cfs_period_us").strip()
            if quota.isdigit() and period.isdigit() and int(period):
                quotas.append(int(quota) / int(period))
    return quotas
