"""Long work is given up where it was said that it may be, and only there."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from hivlp.index.snapshot.prefault import read_through
from hivlp.models.artifact import file_record
from hivlp.models.stopping import Stopped, until


@pytest.mark.parametrize("mapped", [False, True])
def test_hashing_and_reading_are_given_up_when_told_to_stop(tmp_path: Path, mapped: bool) -> None:
    file = tmp_path / "rows.npy"
    np.save(file, np.zeros(1_000, np.float32))
    rows = np.load(file, mmap_mode="r") if mapped else None
    size = file.stat().st_size
    stop = threading.Event()
    with until(stop):
        assert file_record(file).size_bytes == size
        read_through(file)
        stop.set()
        for work in (file_record, read_through):
            with pytest.raises(Stopped):
                work(file)
    assert file_record(file).size_bytes == size
    read_through(file)
    assert rows is None or rows.sum() == 0
