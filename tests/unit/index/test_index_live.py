"""The swap cell: nobody loses what they hold, nothing stays open for nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from hivlp.index.snapshot.live import LiveSnapshot, NotKept


class Value:
    def __init__(self, name: str) -> None:
        self.name = name
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def test_swap_closes_an_unused_old_value_at_once() -> None:
    old, new = Value("old"), Value("new")
    live = LiveSnapshot(old)
    live.swap(new)
    assert (old.closed, new.closed) == (1, 0)
    with live.lease() as value:
        assert value is new


def test_swap_keeps_the_old_value_open_until_its_last_lease_ends() -> None:
    old, new = Value("old"), Value("new")
    live = LiveSnapshot(old)
    with live.lease() as first:
        with live.lease() as second:
            live.swap(new)
            assert first is second is old
            assert old.closed == 0
        assert old.closed == 0
        with live.lease() as third:
            assert third is new
    assert (old.closed, new.closed) == (1, 0)


def test_a_lease_that_ends_in_an_error_ends() -> None:
    old = Value("old")
    live = LiveSnapshot(old)

    def fail() -> None:
        with live.lease():
            live.swap(Value("new"))
            raise ValueError("search failed")

    with pytest.raises(ValueError, match="search failed"):
        fail()
    assert old.closed == 1


def test_close_waits_for_leases_and_gives_no_new_ones() -> None:
    value = Value("only")
    live = LiveSnapshot(value)
    with live.lease():
        live.close()
        assert value.closed == 0
        with pytest.raises(RuntimeError, match="nothing is live"), live.lease():
            pass
    assert value.closed == 1
    live.close()
    assert value.closed == 1


def test_swapping_after_close_makes_it_live_again() -> None:
    old, new = Value("old"), Value("new")
    live = LiveSnapshot(old)
    live.close()
    live.swap(new)
    with live.lease() as value:
        assert value is new
    assert old.closed == 1


def test_many_threads_never_see_a_closed_value() -> None:
    values = [Value(str(i)) for i in range(200)]
    live = LiveSnapshot(values[0])
    stop, seen_closed = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            with live.lease() as value:
                if value.closed:
                    seen_closed.append(value.name)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
    for value in values[1:]:
        live.swap(value)
    stop.set()
    for reader in readers:
        reader.join(10)
    assert seen_closed == []
    assert [value.closed for value in values] == [1] * 199 + [0]


def named(name: str) -> Callable[[Value], bool]:
    return lambda value: value.name == name


def test_the_last_superseded_values_are_kept_for_a_while_and_no_more_of_them() -> None:
    now = [0.0]
    values = [Value(str(number)) for number in range(5)]
    live = LiveSnapshot(values[0], keep_s=10.0, keep=2, clock=lambda: now[0])
    for value in values[1:]:
        now[0] += 1.0
        live.swap(value)
    assert [value.closed for value in values] == [1, 1, 0, 0, 0]
    for name in "234":
        with live.lease(named(name)) as value:
            assert value.name == name
    with pytest.raises(NotKept), live.lease(named("1")):
        pass
    now[0] = 13.5  # the third was superseded at 3 s, the fourth at 4 s
    live.expire()
    assert [value.closed for value in values] == [1, 1, 1, 0, 0]
    now[0] = 14.5
    live.expire()
    assert [value.closed for value in values] == [1, 1, 1, 1, 0]
    with live.lease() as value:
        assert value is values[4]


def test_a_kept_value_stays_open_until_its_last_lease_ends() -> None:
    old, new = Value("old"), Value("new")
    live = LiveSnapshot(old, keep_s=10.0, keep=1)
    live.swap(new)
    with live.lease(named("old")) as value:
        live.close()
        assert value is old
        assert (old.closed, new.closed) == (0, 1)
    assert old.closed == 1


def test_a_swap_says_which_superseded_values_may_stay() -> None:
    values = [Value(name) for name in "abc"]
    live = LiveSnapshot(values[0], keep_s=10.0, keep=5)
    live.swap(values[1])
    live.swap(values[2], keep=named("b"))
    assert [value.closed for value in values] == [1, 0, 0]


def test_values_are_closed_in_the_pool_that_was_named() -> None:
    where: list[str] = []

    class Told(Value):
        def close(self) -> None:
            where.append(threading.current_thread().name)

    live = LiveSnapshot(Told("a"))
    with ThreadPoolExecutor(1, "closing") as pool:
        live.close_in(pool)
        with live.lease():
            live.swap(Told("b"))
        live.swap(Told("c"))
    live.close()
    own = threading.current_thread().name
    assert where == ["closing_0", "closing_0", own]
