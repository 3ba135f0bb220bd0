"""Which texts of a batch to encode together: padding costs time, and so does another pass.

    split([5, 60, 6, 5])  ->  [[0, 3, 2], [1]]

A pass takes about as long as `FIXED` tokens besides those that are in it, padding included: that
is the reading of the weights. Of all ways to cut the texts, sorted by length, into parts, the
cheapest is taken.
"""

from __future__ import annotations

from collections.abc import Sequence

FIXED = 12
"""bench/LOG.md: t tokens take about (t + 12) times .82 ms through 6 layers of width 768."""


def split(lengths: Sequence[int]) -> list[list[int]]:
    """Places of `lengths`, in parts; the shortest texts are in the first one."""
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    least = [0]  # what the first n cost at least
    begins: list[int] = []  # where the last part of these then begins
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        costs = [least[begin] + FIXED + (end - begin) * longest for begin in range(end)]
        begins.append(min(range(end), key=costs.__getitem__))
        least.append(min(costs))
    parts: list[list[int]] = []
    end = len(order)
    while end:
        begin = begins[end - 1]
        parts.append(order[begin:end])
        end = begin
    return parts[::-1]
