"""Which texts of a batch are encoded together: the cheapest parts, each text in one of them."""

from __future__ import annotations

import itertools
import random

import pytest

from hivlp.service.lengths import FIXED, split


def cost(parts: list[list[int]], lengths: list[int]) -> int:
    return sum(FIXED + len(part) * max(lengths[i] for i in part) for part in parts)


def every_partition(places: list[int]) -> list[list[list[int]]]:
    if not places:
        return [[]]
    first, rest = places[0], places[1:]
    found = []
    for size in range(len(rest) + 1):
        for mates in itertools.combinations(rest, size):
            left = [place for place in rest if place not in mates]
            found += [[[first, *mates], *others] for others in every_partition(left)]
    return found


@pytest.mark.parametrize("seed", range(20))
def test_no_other_way_to_part_them_is_cheaper(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice((3, 5, 8, 12, 30, 60)) for _ in range(draw.randrange(1, 8))]
    parts = split(lengths)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    best = min(cost(other, lengths) for other in every_partition(list(range(len(lengths)))))
    assert cost(parts, lengths) == best


def test_texts_of_like_length_stay_together_and_a_long_one_is_by_itself() -> None:
    assert split([5, 6, 5, 7]) == [[0, 2, 1, 3]]
    assert split([60, 5, 6, 5]) == [[1, 3, 2], [0]]


def test_nothing_is_in_no_part() -> None:
    assert split([]) == []


def test_pictures_and_padded_texts_are_one_part() -> None:
    assert split([1] * 8) == [list(range(8))]
    assert split([64] * 8) == [list(range(8))]
