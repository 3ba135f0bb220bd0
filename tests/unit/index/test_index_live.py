"""The swap cell: nobody loses what they hold, nothing stays open for nobody."""

from __future__ import annotations

import threading

import pytest

from hivlp.index.snapshot.live import LiveSnapshot


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
