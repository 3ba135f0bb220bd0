"""Worker threads that take what waits: alone, or up to `max_batch` jobs that can run together.

    submit ─► waiting ─► a free worker takes the oldest, and with it those of its group

Nobody waits for a batch to fill: a batch is what had queued while every worker was busy, shared
among those that are free. A job goes from the event loop to a worker and back once. What waits can
be dropped, by its client's leaving or its deadline; what runs is left to end.

Whatever a job raises is its own. Should a worker die all the same, the jobs that it had taken fail
and another takes its place, after a pause that grows where that happens again and again. `sick`
says so, and tells of jobs that run or wait for too long.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hivlp.models.errors import DeadlinePassed
from hivlp.service.cores import Cores, OwnCores
from hivlp.service.errors import NotReady, WorkerDied

log = logging.getLogger("hivlp.service")
DEATHS_S = 60.0
"""A worker that dies so soon after another is replaced after a longer pause than that one was."""
PAUSE_S, LONGEST_PAUSE_S = 0.05, 10.0
SMOOTHING = 0.1
"""The weight of the latest batch in what a job is expected to take."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Job(Generic[T]):
    """Work for a worker thread, and the future that its outcome goes to.

    `work(spare)` runs it by itself; `spare`: there is a core that nobody else wants. Jobs of one
    `group` (None: of no group) may be run together, by what their `payload`s say.
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
        self.spare = False
        self.busy_since_s: float | None = None
        self.thread = threading.Thread(
            target=run, args=(self,), name=f"hivlp-search-{number}", daemon=True
        )
        self.thread.start()

    def left_s(self, job_s: float, now_s: float) -> float:
        """What is left of the jobs it has, where each takes `job_s`; 0 once that is over."""
        since_s = self.busy_since_s
        return 0.0 if since_s is None else max(0.0, len(self.taken) * job_s - (now_s - since_s))


class MicroBatcher:
    """Takes jobs on one event loop and runs them in `workers` threads.

    `together(jobs, deliver)` runs several jobs of one group: it hands each an outcome, a value or
    an exception, as soon as there is one. `on_queue(n)` is told how many wait, `on_death()` of each
    worker that died. What runs or waits for `hung_s` seconds is too long. `cores` (None: as many as
    workers, and nobody else's) tells whether there is one to spare.
    """

    def __init__(
        self,
        *,
        workers: int,
        max_batch: int,
        together: RunTogether,
        on_queue: Callable[[int], None] = lambda _: None,
        on_death: Callable[[], None] = lambda: None,
        hung_s: float = 60.0,
        cores: Cores | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._wanted = workers
        self._cores = OwnCores(workers) if cores is None else cores
        self._max_batch = max_batch
        self._together = together
        self._on_queue = on_queue
        self._on_death = on_death
        self._hung_s = hung_s
        self._lock = threading.Lock()  # of `_waiting`, `_idle` and `_stopping`
        self._waiting: deque[Job[Any]] = deque()
        self._idle = 0
        self._stopping = False
        self._tokens: SimpleQueue[None] = SimpleQueue()  # one a job: wakes a worker
        self._died_s = -math.inf
        self._pause_s = PAUSE_S
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
        with self._lock:
            if self._stopping:
                job.future.set_exception(NotReady("the service is ending"))
                return job
            self._waiting.append(job)
            self._on_queue(len(self._waiting))
        self._tokens.put(None)
        if due_s is not None:
            left_s = due_s - time.perf_counter()
            timer = self._loop.call_later(max(0.0, left_s), self._expire, job)
            job.future.add_done_callback(lambda _: timer.cancel())
        return job

    def drop(self, job: Job[Any]) -> bool:
        """Take a job back, if no worker has it yet; its future is cancelled."""
        if not self._take_back(job):
            return False
        job.future.cancel()
        return True

    def expected_wait_s(self) -> float:
        """How long a job that came now would wait for a worker, by what jobs took lately; 0 where
        none waits, whatever runs: one that took long once is no reason to send anybody away.
        """
        if not self._waiting:
            return 0.0
        now = time.perf_counter()
        free_in = [worker.left_s(self._job_s, now) for worker in tuple(self._workers)] or [0.0]
        heapq.heapify(free_in)
        for _ in range(len(self._waiting)):
            heapq.heapreplace(free_in, free_in[0] + self._job_s)
        return free_in[0]

    def sick(self) -> str | None:
        """What is wrong with the workers, in words; None where nothing is."""
        alive = sum(worker.thread.is_alive() for worker in tuple(self._workers))
        if alive < self._wanted:
            return f"{self._wanted - alive} of {self._wanted} search workers died; others follow"
        now = time.perf_counter()
        running = [worker.busy_since_s for worker in tuple(self._workers)]
        longest = now - min((since for since in running if since is not None), default=now)
        if longest > self._hung_s:
            return f"a worker has been at one search for {longest:.0f} s"
        with self._lock:
            oldest = self._waiting[0].submitted_s if self._waiting else now
        if now - oldest > self._hung_s:
            return f"a search has waited for a worker for {now - oldest:.0f} s"
        return None

    async def stop(self, within_s: float = 5.0) -> None:
        """Finish what was submitted, then end the threads; what isn't done in time fails."""
        end = time.monotonic() + within_s
        with self._lock:
            self._stopping = True
        for _ in range(self._wanted):
            self._tokens.put(None)
        for worker in tuple(self._workers):
            await asyncio.to_thread(worker.thread.join, max(0.0, end - time.monotonic()))
        with self._lock:
            left = tuple(self._waiting)
            self._waiting.clear()
        for job in left:
            _settle(job.future, NotReady("the service is ending"))

    def _another(self) -> _Worker:
        self._made += 1
        return _Worker(self._work, self._made)

    def _work(self, own: _Worker) -> None:
        """The life of a worker thread."""
        try:
            while self._take(own):
                if not own.taken:
                    continue
                own.busy_since_s = time.perf_counter()
                self._run(own.taken, own.spare)
                self._learn((time.perf_counter() - own.busy_since_s) / len(own.taken))
                own.taken, own.busy_since_s = (), None  # an idle worker holds nothing
        except BaseException:  # whatever it is, somebody waits for what this thread had
            log.exception("a search worker died with %d searches", len(own.taken))
            self._call(self._died, own)

    def _take(self, own: _Worker) -> bool:
        """Wait for jobs, and take some; none where others took them first. False at the end."""
        with self._lock:
            self._idle += 1
            self._cores.tell(self._wanted - self._idle)
        self._tokens.get()
        with self._lock:
            self._idle -= 1
            if not self._waiting:
                return not self._stopping
            own.taken = self._pop()
            self._cores.tell(self._wanted - self._idle)
            own.spare = self._cores.free() and not self._waiting
            self._on_queue(len(self._waiting))
        return True

    def _pop(self) -> Sequence[Job[Any]]:
        """The oldest job and others of its group: no more than leaves idle workers their share."""
        share = math.ceil(len(self._waiting) / (1 + self._idle))
        most = min(self._max_batch, share)
        first = self._waiting.popleft()
        taken = [first]
        if first.group is None:
            return taken
        for job in tuple(self._waiting):
            if len(taken) >= most:
                break
            if job.group == first.group:
                taken.append(job)
                self._waiting.remove(job)
        return taken

    def _learn(self, job_s: float) -> None:
        """What a job takes, smoothed; two workers that say so at once lose one word of it."""
        weight = SMOOTHING if self._job_s else 1.0
        self._job_s += weight * (job_s - self._job_s)

    def _run(self, taken: Sequence[Job[Any]], spare: bool) -> None:
        # BaseException: Rust's panics are, and SystemExit in a query's code is its failure alone.
        if len(taken) > 1:
            try:
                self._together(taken, self._deliver)
            except BaseException as error:
                for job in taken:
                    self._deliver(job, error)
            return
        (job,) = taken
        try:
            self._deliver(job, job.work(spare))
        except BaseException as error:
            self._deliver(job, error)

    def _deliver(self, job: Job[Any], outcome: Any) -> None:
        if isinstance(outcome, BaseException):
            # What the failed frames hold, a picture say, would live until the next full collection.
            traceback.clear_frames(outcome.__traceback__)
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
            self._on_queue(len(self._waiting))
        return True

    def _died(self, worker: _Worker) -> None:
        """On the event loop: fail what it had, and replace it after a pause."""
        self._workers.discard(worker)
        self._on_death()
        for job in worker.taken:
            _settle(job.future, WorkerDied())
        now = time.monotonic()
        again = now - self._died_s < DEATHS_S
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S) if again else PAUSE_S
        self._died_s = now
        self._loop.call_later(self._pause_s, self._replace)

    def _replace(self) -> None:
        if self._stopping:
            return
        try:
            self._workers.add(self._another())
        except RuntimeError:  # no thread can be started now
            log.exception("a search worker can't be replaced yet")
            self._loop.call_later(self._pause_s, self._replace)
            return
        self._tokens.put(None)


def _settle(future: asyncio.Future[Any], outcome: Any) -> None:
    if future.done():  # nobody waits any more, or it failed with its worker
        return
    if not isinstance(outcome, BaseException):
        future.set_result(outcome)
    elif isinstance(outcome, Exception) and not isinstance(outcome, StopIteration):
        future.set_exception(outcome)
    else:  # asyncio would take it for its own
        wrapped = RuntimeError(f"{type(outcome).__name__}: {outcome}")
        wrapped.__cause__ = outcome
        future.set_exception(wrapped)
