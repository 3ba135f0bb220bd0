"""A sample of live searches, looked at again in spare time.

    offered ─► drawn by lot ─► fit? ─► time for it? ─► checked in the spare thread ─► noted

Offering costs a request a few hundred nanoseconds, and what comes of a sample never reaches it:
what could not be checked is counted by why, and the next is drawn.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Generic, TypeVar

from prometheus_client import Counter

from hivlp.index.errors import SnapshotMissing
from hivlp.models.errors import InputError
from hivlp.service.request_log import Allowance
from hivlp.service.serving import Catalogue, ServedVersion
from hivlp.service.spare import NoTime, Spare

log = logging.getLogger("hivlp.service")
S = TypeVar("S")
C = TypeVar("C")


class Left(Exception):
    """A check that came to nothing, for a reason that is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Lottery:
    """Draws a share of what comes: one in so many, at gaps that follow no rhythm."""

    def __init__(self, share: float, chance: random.Random | None = None) -> None:
        assert 0 < share <= 1, share
        self._mean = 1 / share
        self._chance = chance or random.Random()
        self._left = self._gap()

    def draw(self) -> bool:
        """Whether this one is taken."""
        self._left -= 1
        if self._left > 0:
            return False
        self._left = self._gap()
        return True

    def _gap(self) -> int:
        """From a quarter to seven quarters of the mean, which is 1 / share."""
        spread = 0.75 * (self._mean - 1)
        return round(self._mean + self._chance.uniform(-spread, spread))


class Sampler(Generic[S]):
    """Draws samples and has them checked. Its methods belong to the event loop."""

    def __init__(
        self, share: float, max_per_s: float, spare: Spare, skipped: Counter, used: Counter
    ) -> None:
        """`skipped` counts by reason what was drawn and not checked, `used` seconds of a core."""
        self._lottery = Lottery(share) if share else None
        self._allowance = Allowance(max_per_s)
        self._spare = spare
        self._skipped = skipped
        self._used = used
        self._waiting: asyncio.Queue[S] = asyncio.Queue(1)

    @property
    def on(self) -> bool:
        """Whether anything is drawn at all."""
        return self._lottery is not None

    def draw(self) -> bool:
        """Whether the lot falls on what is offered now."""
        return self._lottery is not None and self._lottery.draw()

    def skip(self, reason: str) -> None:
        """Count what was drawn and isn't checked."""
        self._skipped.labels(reason).inc()

    def take(self, sample: S) -> None:
        """Have what was drawn checked, if there is time for it."""
        if self._waiting.full() or not self._spare.free:
            self.skip("busy")
        elif not self._allowance.take():
            self.skip("rate")
        else:
            self._waiting.put_nowait(sample)

    async def run(self, check: Callable[[S], C], note: Callable[[S, C], None]) -> None:
        """Check what was taken, for ever: `check` in the spare thread, `note` here.

        `check` may raise Left.
        """
        while True:
            sample = await self._waiting.get()
            try:
                checked = await self._spare.run(partial(check, sample), self._used.inc)
            except NoTime:
                self.skip("busy")
            except Left as left:
                self.skip(left.reason)
            except Exception:
                self.skip("failed")
                log.exception("an answer could not be checked")
            else:
                note(sample, checked)


@contextmanager
def leased(catalogue: Catalogue, index: str, version: str) -> Iterator[ServedVersion]:
    """The version that answered, if it is still held. Raises Left."""
    with ExitStack() as held:
        try:
            served = held.enter_context(catalogue.lease(index, version))
        except (InputError, SnapshotMissing):
            raise Left("superseded") from None
        yield served
