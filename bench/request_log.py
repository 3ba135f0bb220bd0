"""What the line of a request costs: where it has one, where it is kept back, and probes.

    python bench/request_log.py

Microseconds of the event loop a request, the median of rounds; the line is formatted as JSON and
queued for the thread that writes it (to the null device here).
"""

from __future__ import annotations

import logging
import os
import time
from statistics import median

from hivlp.service import logs
from hivlp.service.queries import TextQuery
from hivlp.service.request_log import Ended, Noted, RequestLog
from hivlp.service.timeline import Timeline
from hivlp.service.watch_settings import LogSettings

ROUNDS, EACH = 30, 2_000
ANSWER = {
    "index": "default",
    "snapshot": "20260101T000000-000000",
    "plan": "cascade",
    "exit_level": 3,
    "returned": 10,
    "cached": False,
    "degraded": False,
    "partial": False,
}


def one(route: str) -> Ended:
    timeline = Timeline()
    for name in ("cache", "queue", "decode", "metadata"):
        timeline.add(name, 0.0, 0.001)
    for level in (1, 2, 3):
        for name in ("encode", "search"):
            with timeline.measure(name, level):
                pass
    noted = [Noted(timeline, TextQuery("red heart"), ANSWER)]
    return Ended("0" * 32, "POST", route, 200, 0.0, 0.002, None, noted)


def microseconds(log: RequestLog, route: str) -> float:
    request = one(route)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(EACH):
            log.ended(request)
        times.append((time.perf_counter() - began) / EACH * 1e6)
        logging.getLogger().handlers[0].flush()
    return median(times)


def main() -> None:
    handler = logs.LineHandler(open(os.devnull, "wb"))  # noqa: PTH123, SIM115
    handler.setFormatter(logs.JsonLines())
    logging.getLogger().handlers = [handler]
    logging.getLogger("hivlp").setLevel(logging.INFO)
    every = LogSettings(requests_per_s=1_000_000)
    for what, settings, route in (
        ("a line", every, "/search/text"),
        ("kept back", LogSettings(requests_per_s=0), "/search/text"),
        ("a probe", every, "/livez"),
    ):
        print(f"{what:10} {microseconds(RequestLog(settings), route):6.2f} us")
    handler.close()


if __name__ == "__main__":
    main()
