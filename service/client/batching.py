"""Any number of searches as few requests, each within what the service takes.

A request holds up to `size` searches and `max_bytes` bytes. One that is refused as a whole is cut
in half and sent again, until the search that is to blame stands alone: a bad one never harms the
others. Pictures are read when their turn comes, so that no more lie in memory than are under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from hivlp.service.answers import BatchAnswer, ErrorAnswer, SearchAnswer
from hivlp.service.client.endpoints import batch_of, entry_of
from hivlp.service.client.errors import BadAnswer, ClientError, InvalidRequest
from hivlp.service.client.exchange import Call, entry_error
from hivlp.service.client.fields import Fields, Search, encode

Found: TypeAlias = SearchAnswer | ClientError
# More at once rarely answer sooner, and leave room for others.
MAX_CONCURRENCY = 4
# Of a body: what stands around its searches.
AROUND_BYTES = 64


@dataclass(frozen=True, slots=True)
class Pack:
    """The searches of one request, and the places of their results."""

    places: tuple[int, ...]
    entries: tuple[Fields, ...]

    def call(self) -> Call[BatchAnswer]:
        """The request."""
        return batch_of(lambda: list(self.entries))

    def halves(self) -> tuple[Pack, Pack]:
        """Two packs in place of one."""
        middle = len(self.places) // 2
        return (
            Pack(self.places[:middle], self.entries[:middle]),
            Pack(self.places[middle:], self.entries[middle:]),
        )


class Packing:
    """Hands out packs and takes their results, from any thread; only `take` makes one wait."""

    def __init__(self, searches: Iterable[Search], size: int, max_bytes: int) -> None:
        self._size = size
        self._max_bytes = max_bytes - AROUND_BYTES
        self._waiting = deque(enumerate(searches))
        self._count = len(self._waiting)
        # A search that didn't fit any more: its picture can't be read twice.
        self._held: deque[tuple[int, Fields]] = deque()
        self._again: deque[Pack] = deque()
        self._found: dict[int, Found] = {}
        self._stopped = False
        self._reading = threading.Lock()

    def take(self) -> Pack | None:
        """The next pack, or None where nothing is left. Reads pictures."""
        with contextlib.suppress(IndexError):
            return self._again.popleft()
        with self._reading:
            return self._next()

    def _next(self) -> Pack | None:
        places: list[int] = []
        entries: list[Fields] = []
        left = self._max_bytes
        while len(places) < self._size and (found := self._following()) is not None:
            place, entry = found
            left -= len(encode(entry)) + 1
            if places and left < 0:
                self._held.append(found)
                break
            places.append(place)
            entries.append(entry)
        return Pack(tuple(places), tuple(entries)) if places else None

    def _following(self) -> tuple[int, Fields] | None:
        """The next search that can be sent; those before it that can't have their errors."""
        if self._held:
            return self._held.popleft()
        while self._waiting and not self._stopped:
            place, search = self._waiting.popleft()
            try:
                return place, entry_of(search)
            except ClientError as error:
                self._found[place] = error
        return None

    def settle(self, pack: Pack, outcome: BatchAnswer | ClientError) -> None:
        """Keep what came of a pack, or have it sent again in halves."""
        if isinstance(outcome, InvalidRequest) and len(pack.places) > 1 and not self._stopped:
            self._again.extend(pack.halves())
            return
        self._found.update(zip(pack.places, _results(pack, outcome), strict=True))

    def stop(self) -> None:
        """Read no more: nobody will ask for the results."""
        self._stopped = True

    def results(self) -> list[Found]:
        """An answer or an error for every search, in order."""
        return [self._found[place] for place in range(self._count)]


def _results(pack: Pack, outcome: BatchAnswer | ClientError) -> list[Found]:
    if isinstance(outcome, ClientError):
        return [outcome] * len(pack.places)
    if len(outcome.results) != len(pack.places):
        message = f"{len(outcome.results)} results of {len(pack.places)} searches"
        wrong = BadAnswer(message, code="bad_answer", request_id=outcome.request_id)
        return [wrong] * len(pack.places)
    return [entry_error(one) if isinstance(one, ErrorAnswer) else one for one in outcome.results]


def packing_for(
    searches: Iterable[Search], limits: Mapping[str, int | float], concurrency: int | None
) -> tuple[Packing, int]:
    """The packs of searches, and how many to send at once, for a service with these limits.

    By default so many that they fit into its queue: more would only be told to come back.
    """
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"concurrency: {concurrency} is not above 0")
    size = int(limits["max_batch"])
    packing = Packing(searches, size, int(limits["max_body_bytes"]))
    fitting = (int(limits["max_queue"]) + 1) // size
    return packing, concurrency or min(MAX_CONCURRENCY, max(1, fitting))
