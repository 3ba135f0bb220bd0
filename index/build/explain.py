"""What `hivlp build --explain` prints: the candidates of a side, the chosen one marked."""

from __future__ import annotations

from collections.abc import Sequence

from hivlp.index.snapshot.manifest import OptionRecord
from hivlp.models.levels import Modality


def table(side: Modality, options: Sequence[OptionRecord]) -> str:
    """The candidates of a side as a table, the chosen one marked."""
    lines = [
        f"{side}: {options[0].rows} rows",
        f"  {'family':<7}{'level 1':<14}{'ANN@10':>7}{'search ms':>11}{'after exit':>11}"
        f"{'build s':>9}{'MiB':>9}  why",
    ]
    lines += [
        f"{'*' if o.chosen else ' ':>1} {o.family:<7}{_codes(o):<14}{_cell(o.recall, 3):>7}"
        f"{_cell(o.search_ms, 2):>11}{_cell(o.after_ms, 2):>11}{_cell(o.build_s, 1):>9}"
        f"{o.memory_bytes / 2**20:>9.1f}  {o.reason}"
        for o in options
    ]
    return "\n".join(lines)


def _codes(option: OptionRecord) -> str:
    """Level 1's codes, with the second ones that masked searches use."""
    return option.level1 if option.maskable is None else f"{option.level1}+{option.maskable}"


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
