"""Worker threads that take what waits: alone, or up to `max_batch` jobs that can run together.

    submit ─► waiting ─► a free worker takes the oldest, and with it those of its group

Nobody waits for a batch to fill: a batch is what had queued while every worker was busy. A job goes
from the event loop to a worker and back once. What waits can be dropped, by its client's leaving or
its deadline; what runs is left to end.

A worker that dies fails the jobs that it had taken, and another takes its place; one that dies
again and again is given up. `sick` says so, and names workers that have been at one job for too
long.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hivlp.models.errors import DeadlinePassed
from hivlp.service.errors import WorkerDied

log = logging.getLogger("hivlp.service")
HUNG_S = 60.0
"""A worker that has been at one batch for so long counts as hung."""
DEATHS = 5
"""So many deaths within `DEATHS_S` seconds and the next worker isn't replaced."""
DEATHS_S = 60.0
SMOOTHING = 0.1
"""The weight of the latest batch in what a job is expected to take."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """Work for a worker thread, and the future that its outcome goes to.

    `work(alone)` runs it by itself; `alone`: nothing else is in flight that could use the core.
    Jobs of one `group` (None: of no group) may be run together, by what their `payload`s say.
    """

    work: Callable[[bool], T]
    future: asyncio.Future[T]
    group: Hashable | None = None
    payload: Any = None
    submitted_s: float = field(default_factory=time.perf_counter)


Deliver = Callable[[Job[Any], Any], None]
RunTogether = Callable[[Sequence[Job[Any]], Deliver], None]


class _Worker:
    """One thread, what it has taken, and since when."""

    def __init__(self, run: Callable[[_Worker], None], number: int) -> None:
        self.taken: Sequence[Job[Any]] = ()
        self.busy_since_s: float | None = None
        self.thread = threading.Thread(
            target=run, args=(self,), name=f"hivlp-search-{number}", daemon=True
        )
        self.thread.start()


class MicroBatcher:
    """Takes jobs on one event loop and runs them in `workers` threads.

    `together(jobs, deliver)` runs several jobs of one group: it hands each an outcome, a value or
    an exception, as soon as there is one. `spare()` tells whether a core is free besides.
    `on_queue(n)` is told how many wait, `on_death()` of each worker that died.
    """

    def __init__(
        self,
        *,
        workers: int,
        max_batch: int,
        together: RunTogether,
        spare: Callable[[], bool] = lambda: True,
        on_queue: Callable[[int], None] = lambda _: None,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._max_batch = max_batch
        self._together = together
        self._spare = spare
        self._on_queue = on_queue
        self._on_death = on_death
        self._lock = threading.Lock()  # of `_waiting` and `_stopping`
        self._waiting: deque[Job[Any]] = deque()
        self._tokens: SimpleQueue[None] = SimpleQueue()  # one a job: wakes a worker
        self._stopping = False
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._given_up = 0
        self._made = 0
        self._job_s = 0.0
        self._workers = {self._another() for _ in range(workers)}

    def submit(
        self,
        work: Callable[[bool], T],
        *,
        group: Hashable | None = None,
        payload: Any = None,
        due_s: float | None = None,
    ) -> Job[T]:
        """Queue a job; on the event loop. Its future fails with DeadlinePassed where it still waits
        at `due_s` (seconds of `time.perf_counter`).
        """
        job = Job(work, self._loop.create_future(), group, payload)
        if due_s is not None:
            left_s = due_s - time.perf_counter()
            timer = self._loop.call_later(max(0.0, left_s), self._expire, job)
            job.future.add_done_callback(lambda _: timer.cancel())
        with self._lock:
            if self._stopping:
                job.future.set_exception(WorkerDied())
                return job
            self._waiting.append(job)
            waiting = len(self._waiting)
        self._tokens.put(None)
        self._on_queue(waiting)
        return job

    def drop(self, job: Job[Any]) -> bool:
        """Take a job back, if no worker has it yet; its future is cancelled."""
        if not self._take_back(job):
            return False
        job.future.cancel()
        return True

    def expected_wait_s(self) -> float:
        """How long a job that came now would wait for a worker, by what jobs took lately."""
        return len(self._waiting) * self._job_s / max(1, len(self._workers))

    def sick(self) -> str | None:
        """What is wrong with the workers, in words; None where nothing is."""
        if self._given_up:
            return f"{self._given_up} workers died too often; the log says of what"
        if any(not worker.thread.is_alive() for worker in self._workers):
            return "a worker died and is being replaced"
        now = time.perf_counter()
        for worker in self._workers:
            since = worker.busy_since_s
            if since is not None and now - since > HUNG_S:
                return f"a worker has been at one search for {now - since:.0f} s"
        return None

    async def stop(self) -> None:
        """Finish what was submitted, then end the threads."""
        with self._lock:
            self._stopping = True
        for _ in self._workers:
            self._tokens.put(None)
        for worker in tuple(self._workers):
            await asyncio.to_thread(worker.thread.join)
        self._fail_waiting()

    def _another(self) -> _Worker:
        self._made += 1
        return _Worker(self._work, self._made)

    def _work(self, own: _Worker) -> None:
        """The life of a worker thread."""
        try:
            while (taken := self._take()) is not None:
                if not taken:
                    continue
                own.taken, own.busy_since_s = taken, time.perf_counter()
                self._run(taken)
                took_s = time.perf_counter() - own.busy_since_s
                self._learn(took_s / len(taken))
                own.taken, own.busy_since_s = (), None
        except BaseException:  # whatever it is, somebody waits for what this thread had
            log.exception("a search worker died with %d searches", len(own.taken))
            self._call(self._died, own)

    def _learn(self, job_s: float) -> None:
        """What a job takes, smoothed; two workers that say so at once lose one word of it."""
        weight = SMOOTHING if self._job_s else 1.0
        self._job_s += weight * (job_s - self._job_s)

    def _take(self) -> Sequence[Job[Any]] | None:
        """Wait for jobs; none where others took them first. None at the end."""
        self._tokens.get()
        with self._lock:
            if not self._waiting:
                return None if self._stopping else ()
            first = self._waiting.popleft()
            taken = [first]
            if first.group is not None and self._waiting:
                for job in tuple(self._waiting):
                    if len(taken) == self._max_batch:
                        break
                    if job.group == first.group:
                        taken.append(job)
                        self._waiting.remove(job)
            left = len(self._waiting)
        self._on_queue(left)
        return taken

    def _run(self, taken: Sequence[Job[Any]]) -> None:
        if len(taken) > 1:
            try:
                self._together(taken, self._deliver)
            except Exception as error:
                for job in taken:
                    self._deliver(job, error)
            return
        (job,) = taken
        try:
            outcome = job.work(self._spare())
        except Exception as error:
            outcome = error
        self._deliver(job, outcome)

    def _deliver(self, job: Job[Any], outcome: Any) -> None:
        self._call(_settle, job.future, outcome)

    def _call(self, callback: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.warning("an outcome came after the event loop had ended")

    def _expire(self, job: Job[Any]) -> None:
        if self._take_back(job) and not job.future.done():
            job.future.set_exception(DeadlinePassed("its time was up before a worker was free"))

    def _take_back(self, job: Job[Any]) -> bool:
        with self._lock:
            try:
                self._waiting.remove(job)
            except ValueError:
                return False
            left = len(self._waiting)
        self._on_queue(left)
        return True

    def _died(self, worker: _Worker) -> None:
        """On the event loop: fail what it had, and replace it unless that helps no longer."""
        self._workers.discard(worker)
        self._on_death()
        for job in worker.taken:
            _settle(job.future, WorkerDied())
        now = time.perf_counter()
        often = len(self._deaths) == DEATHS and now - self._deaths[0] < DEATHS_S
        self._deaths.append(now)
        if self._stopping:
            return
        if often:
            self._given_up += 1
            log.critical("search workers die again and again: restart the service")
            if not self._workers:  # what waits would wait for ever
                self._fail_waiting()
            return
        self._workers.add(self._another())
        self._tokens.put(None)

    def _fail_waiting(self) -> None:
        with self._lock:
            self._stopping = True
            left = tuple(self._waiting)
            self._waiting.clear()
        for job in left:
            _settle(job.future, WorkerDied())


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # nobody waits any more, or it failed with its worker
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
