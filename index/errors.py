"""Errors of searching and of the snapshot store; branches of the tree in `hivlp.models.errors`.

HivlpError
├── CorpusError             a corpus can't be read; names the place
├── BuildError              a build can't be finished or must not be published
│   ├── IndexBusy           another process changes the index
│   └── NoRoom              the disk has less room than a version needs; names both and the folder
├── PlanError               a search plan that contradicts itself or the index; names the parameter
├── NoSuchItem              an id that the snapshot does not hold
├── NoDevice                a GPU was asked for, and none is seen
├── DeviceFailed            a GPU that is there could not take a level
├── BrokenFaiss             faiss is installed, and can't be loaded
└── SnapshotError           names the index and the version
    ├── SnapshotCorrupt     a file is missing, changed or unexpected; names the file
    ├── SnapshotMissing     no such index, or no such version
    ├── SnapshotQuarantined a version that failed, and was not verified since
    ├── ActivationUnderWay  another version is being activated
    └── NoGoodVersion       no version of an index can be served; names each and its reason
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hivlp.models.errors import HivlpError, InputError


class CorpusError(HivlpError):
    """A corpus can't be read."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place = place
        self.reason = reason


class BuildError(HivlpError):
    """A build can't be finished, or its result must not be published."""


class IndexBusy(BuildError):
    """Another process changes the index for longer than was to be waited."""

    def __init__(self, index: str, waited_s: float) -> None:
        super().__init__(f"index {index!r} is being changed by another process for {waited_s:g} s")


class NoRoom(BuildError):
    """A file system has less room than what is about to be written needs."""

    def __init__(
        self, what: str, folder: Path, *, need_bytes: int, free_bytes: int, kept_bytes: int
    ) -> None:
        super().__init__(
            f"{what}: needs {_size(need_bytes)} on the disk of {folder}, which has "
            f"{_size(free_bytes)} free, of which {_size(kept_bytes)} are to stay free; "
            "`hivlp snapshots gc` removes versions that nobody needs"
        )
        self.folder = folder
        self.need_bytes = need_bytes
        self.free_bytes = free_bytes
        self.kept_bytes = kept_bytes


def _size(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{-(-size // 2**10)} KiB"


class PlanError(InputError):
    """Widths, plan or level contradict each other or what the index holds."""

    def __init__(
        self, message: str, *, param: str = "cascade", limit: int | float | None = None
    ) -> None:
        super().__init__("invalid_plan", message, param=param, limit=limit)


class NoSuchItem(HivlpError):
    """The snapshot holds no item of this id."""

    def __init__(self, item_id: str) -> None:
        super().__init__(f"no item with id {item_id!r}")
        self.item_id = item_id


class NoDevice(HivlpError):
    """A GPU was asked for, and faiss sees none."""

    def __init__(self) -> None:
        super().__init__(
            "faiss sees no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use the backend "
            "faiss-cpu"
        )


class DeviceFailed(HivlpError):
    """The GPU could not take a level, for want of memory say."""

    def __init__(self, level: int, reason: str) -> None:
        super().__init__(
            f"level {level} can't be put on the GPU: {last_line(reason)}; make room there, or use "
            "the backend faiss-cpu"
        )


class BrokenFaiss(HivlpError):
    """faiss is installed, and can't be loaded."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"faiss is installed but can't be loaded: {last_line(error)}")


def last_line(reason: object) -> str:
    """What a C++ error says in the end."""
    lines = str(reason).strip().splitlines()
    return lines[-1] if lines else "no reason was given"


class SnapshotError(HivlpError):
    """Something is wrong with one version of one index."""

    def __init__(self, index: str, version: str, reason: str) -> None:
        super().__init__(f"index {index!r}, version {version!r}: {reason}")
        self.index = index
        self.version = version
        self.reason = reason


class SnapshotCorrupt(SnapshotError):
    """A file of a snapshot is missing, changed or unexpected."""

    def __init__(self, index: str, version: str, file: str, reason: str) -> None:
        super().__init__(index, version, f"{file}: {reason}")
        self.file = file


class SnapshotMissing(SnapshotError):
    """No such index, or no such version of it."""


class SnapshotQuarantined(SnapshotError):
    """A version that failed, and was not verified since."""

    def __init__(self, index: str, version: str, file: str, reason: str) -> None:
        super().__init__(
            index,
            version,
            f"quarantined, {file}: {reason}; `hivlp snapshots verify --index {index} "
            f"--version {version}` lifts it once the files are right",
        )
        self.file = file


class ActivationUnderWay(SnapshotError):
    """Another version is being activated; `version` is that one."""

    def __init__(self, index: str, version: str) -> None:
        reason = "is being activated: wait until it is, or until it failed"
        super().__init__(index, version, reason)


class NoGoodVersion(SnapshotError):
    """No version of an index can be served. `reasons` holds one for each version."""

    def __init__(self, index: str, reasons: Mapping[str, str]) -> None:
        each = "; ".join(f"{version}: {reason}" for version, reason in reasons.items())
        super().__init__(index, "any", f"no version can be served: {each or 'there is none'}")
        self.reasons = dict(reasons)
