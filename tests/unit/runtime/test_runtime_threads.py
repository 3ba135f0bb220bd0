"""Threads follow the affinity and the control groups, read from files written here."""

from __future__ import annotations

from pathlib import Path

import pytest

from hivlp.models.runtime.threads import available_threads


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups_the_affinity_decides(tmp_path: Path) -> None:
    assert available_threads(root=tmp_path, affinity=6) == 6


def test_this_process_may_use_at_least_one() -> None:
    assert available_threads() >= 1


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("1600000 100000\n", 8),
        ("100000\n", 8),
        ("nonsense here\n", 8),
        ("100000 0\n", 8),
        ("", 8),
    ],
)
def test_v2_quota(tmp_path: Path, cpu_max: str, expected: int) -> None:
    root = write(tmp_path, {"sys/fs/cgroup/cpu.max": cpu_max, "proc/self/cgroup": "0::/\n"})
    assert available_threads(root=root, affinity=8) == expected


def test_v2_quota_of_a_parent_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pods/pod7/app\n",
            "sys/fs/cgroup/pods/pod7/app/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pods/pod7/cpu.max": "300000 100000\n",
            "sys/fs/cgroup/pods/cpu.max": "400000 100000\n",
        },
    )
    assert available_threads(root=root, affinity=8) == 3


@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct", "cpuacct,cpu"])
@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("300000", 3), ("1000", 1)])
def test_v1_quota(tmp_path: Path, mount: str, quota: str, expected: int) -> None:
    group = f"sys/fs/cgroup/{mount}/docker/abc"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/other\n4:cpu,cpuacct:/docker/abc\n",
            f"{group}/cpu.cfs_quota_us": f"{quota}\n",
            f"{group}/cpu.cfs_period_us": "100000\n",
        },
    )
    assert available_threads(root=root, affinity=8) == expected


def test_v1_quota_at_the_mount_counts_where_the_group_is_out_of_sight(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/../../outside\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert available_threads(root=root, affinity=8) == 2


def test_affinity_below_the_quota_decides(tmp_path: Path) -> None:
    root = write(tmp_path, {"sys/fs/cgroup/cpu.max": "400000 100000\n"})
    assert available_threads(root=root, affinity=1) == 1
