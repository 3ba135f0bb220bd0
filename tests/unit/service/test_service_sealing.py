"""Sealed values: what was written for a key comes back, and nothing else does."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hivlp.service.cache.sealing import HEAD_BYTES, seal, unseal

KEY, OTHER = "a" * 64, "b" * 64
VALUE = b'{"hits": []}' * 20
LIMIT = 1_000


def test_what_was_sealed_comes_back_smaller_than_it_was() -> None:
    sealed = seal(KEY, VALUE)
    assert unseal(KEY, sealed, LIMIT) == VALUE
    assert len(sealed) < len(VALUE)
    assert unseal(KEY, seal(KEY, b""), LIMIT) == b""


def test_a_value_of_another_key_is_none_of_this_one() -> None:
    assert unseal(OTHER, seal(KEY, VALUE), LIMIT) is None


@pytest.mark.parametrize("length", [0, 3, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 5, -1])
def test_a_truncated_value_is_none(length: int) -> None:
    assert unseal(KEY, seal(KEY, VALUE)[:length], LIMIT) is None


def test_no_byte_can_change() -> None:
    sealed = seal(KEY, VALUE)
    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        assert unseal(KEY, bytes(changed), LIMIT) is None, place


def test_a_value_larger_than_the_limit_is_none_however_small_its_seal() -> None:
    bomb = seal(KEY, b"0" * 50_000_000)
    assert len(bomb) < 500_000
    assert unseal(KEY, bomb, LIMIT) is None


@pytest.mark.parametrize(
    "garbage", [b"", b"null", VALUE, zlib.compress(VALUE), b"\x80\x04\x95" + b"\0" * 100]
)
def test_what_others_wrote_is_none(garbage: bytes) -> None:
    assert unseal(KEY, garbage, LIMIT) is None


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=LIMIT))
def test_any_bytes_come_back(value: bytes) -> None:
    assert unseal(KEY, seal(KEY, value), LIMIT) == value
