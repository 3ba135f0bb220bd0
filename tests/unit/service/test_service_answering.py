"""An answer's head and body leave together, and nothing of it is kept back."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

from hivlp.service.answering import Answering


class Cycle:
    def __init__(self) -> None:
        self.scope = {"method": "GET"}
        self.response_started = False


class Wire(asyncio.Transport):
    """Keeps what was written, a piece a call."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closing


def with_answering(use: Callable[[Answering, Cycle, Wire], None]) -> list[bytes]:
    """What is on the wire after `use` and a turn of the event loop."""

    async def main() -> list[bytes]:
        wire, cycle = Wire(), Cycle()
        loop = asyncio.get_running_loop()
        use(Answering(cycle, wire, loop, lambda: wire.written.append(b"(closed)")), cycle, wire)
        await asyncio.sleep(0)
        return wire.written

    return asyncio.run(main())


def test_head_and_body_of_one_turn_are_one_piece_and_what_follows_is_sent_at_once() -> None:
    def use(answer: Answering, cycle: Cycle, wire: Wire) -> None:
        cycle.response_started = True
        answer.write(b"head,")
        assert wire.written == []
        answer.write(b"body,")
        answer.write(b"more")
        assert wire.written == [b"head,body,", b"more"]

    assert with_answering(use) == [b"head,body,", b"more"]


def test_a_head_whose_body_is_late_does_not_wait_for_it() -> None:
    def use(answer: Answering, cycle: Cycle, _: Wire) -> None:
        cycle.response_started = True
        answer.write(b"head")

    assert with_answering(use) == [b"head"]


def test_an_answer_that_is_all_head_is_sent_at_once_and_nothing_holds_its_request() -> None:
    def use(answer: Answering, cycle: Cycle, wire: Wire) -> None:
        cycle.scope["method"], cycle.response_started = "HEAD", True
        answer.write(b"head")
        assert wire.written == [b"head"]
        assert cycle not in gc.get_referents(answer.__dict__)

    assert with_answering(use) == [b"head"]


def test_what_comes_before_an_answer_is_sent_at_once() -> None:
    def use(answer: Answering, cycle: Cycle, wire: Wire) -> None:
        answer.write(b"100 Continue,")
        assert wire.written == [b"100 Continue,"]
        cycle.response_started = True
        answer.write(b"head,")
        answer.write(b"body")

    assert with_answering(use) == [b"100 Continue,", b"head,body"]


def test_closing_sends_the_head_first_and_an_ended_connection_is_left_alone() -> None:
    def close(answer: Answering, cycle: Cycle, _: Wire) -> None:
        cycle.response_started = True
        answer.write(b"head")
        answer.close()

    def lose(answer: Answering, cycle: Cycle, wire: Wire) -> None:
        cycle.response_started = True
        answer.write(b"head")
        wire.closing = True

    assert with_answering(close) == [b"head", b"(closed)"]
    assert with_answering(lose) == []
