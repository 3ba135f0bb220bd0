"""Three questions, three answers.

`/livez`   is the process alive?        depends on nothing
`/readyz`  should it get requests?      green once every index and model is loaded and warm, as
                                        long as what searches, follows versions and publishes
                                        items is alive and not stuck; red from the first signal to
                                        stop
`/health`  what is going on?            for people
"""

from __future__ import annotations

import time
from typing import Any

from hivlp.service.errors import NotReady
from hivlp.service.state import ServingState


def liveness() -> dict[str, Any]:
    """Alive, whatever else."""
    return {"status": "live"}


def readiness(state: ServingState) -> dict[str, Any]:
    """Ready with at least one index, and with everything that must run. Raises NotReady."""
    if state.draining:
        raise NotReady("the service is being stopped")
    if not state.catalogue.indexes:
        raise NotReady("no index is loaded")
    if sick := state.pipeline.sick():
        raise NotReady(sick)
    if state.dead:
        raise NotReady(f"{', '.join(state.dead)}: failed too often; the log says why")
    return {"status": "ready"}


def report(state: ServingState) -> tuple[int, dict[str, Any]]:
    """Status code and everything: 200 when ready, else 503."""
    body: dict[str, Any] = {
        "status": state.status,
        "uptime_s": round(time.monotonic() - state.started_s, 3),
        "indexes": {},
    }
    try:
        readiness(state)
    except NotReady as error:
        status = state.status if state.status != "ready" else "failed"
        return 503, {**body, "status": status, "reason": error.message}
    for name in sorted(state.catalogue.indexes):  # in every process alike
        with state.catalogue.lease(name) as served:
            body["indexes"][name] = served.searcher.info.version
    return 200, body
