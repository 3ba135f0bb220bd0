"""A served fake world: one a module for questions, a fresh one for tests that hold things up."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from hivlp.models.runtime.threads import available_threads
from hivlp.service.app import create_app
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import SMALL, serving


@pytest.fixture(scope="session", autouse=True)
def two_cores() -> Iterator[None]:
    """On a machine with one core, too: a search alone finds one to spare."""
    with pytest.MonkeyPatch.context() as patch:
        cores = max(2, available_threads())
        patch.setattr("hivlp.service.settings.available_threads", lambda: cores)
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[httpx.Client]:
    """A client of a world with small limits."""
    with serving(create_app(SMALL, load=World().load)) as client:
        yield client


@pytest.fixture
def world() -> World:
    """A world of one's own; serve it with `serving(create_app(...))`."""
    return World()
