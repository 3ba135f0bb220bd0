"""The client of the HTTP API: `Client`, and `AsyncClient` for asyncio.

Nothing here needs what the service needs: no web framework, no index, no model.
"""

from hivlp.service.client.clients import AsyncClient, Client
from hivlp.service.client.endpoints import ItemPicture
from hivlp.service.client.errors import (
    BadAnswer,
    ClientError,
    Conflict,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    Refused,
    ServerFailed,
    TimedOut,
    TooLate,
    Unavailable,
    Unreachable,
)
from hivlp.service.client.fields import Search
from hivlp.service.client.timing import Retries, Timeouts

__all__ = [
    "AsyncClient",
    "BadAnswer",
    "Client",
    "ClientError",
    "Conflict",
    "InvalidRequest",
    "ItemPicture",
    "NotAllowed",
    "NotFound",
    "Overloaded",
    "Refused",
    "Retries",
    "Search",
    "ServerFailed",
    "TimedOut",
    "Timeouts",
    "TooLate",
    "Unavailable",
    "Unreachable",
]
