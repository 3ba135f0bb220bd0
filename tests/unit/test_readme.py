"""The README's file tree names every file there is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_file_tree_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_tree.py"), "--check"]
    finished = subprocess.run(command, check=False)
    assert finished.returncode == 0, "run: python docs/make_tree.py"
