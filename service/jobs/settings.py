"""Settings of builds over HTTP."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

from hivlp.index.remote import is_url, local_path
from hivlp.service.cache.settings import checked_url


def _root(text: str) -> str:
    """A place below which corpora may lie. Raises ValueError."""
    path = local_path(text)
    if path is None and is_url(text):
        return text.rstrip("/")
    place = text if path is None else path
    if not place.startswith("/") or "\0" in place:
        raise ValueError("must be an absolute path or a URL")
    return place


class JobSettings(BaseModel):
    """Corpora may lie below `roots`, absolute paths or URLs; with none, nothing is built over HTTP.

    `runner`: `here`, one build at a time beside the service, or `worker`, by every `hivlp worker`
    that asks the Redis at `url` (the answer cache's unless given); None: `worker` where there is a
    `url` of its own. `queue` names it there. A worker that says nothing for `heartbeat_s` seconds
    has died. A build that is told to end is killed after `end_s` seconds. The last `keep` builds
    that ended are remembered; at most `max_waiting` wait or run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    roots: tuple[Annotated[str, AfterValidator(_root)], ...] = ()
    runner: Literal["here", "worker"] | None = None
    url: Annotated[SecretStr, AfterValidator(checked_url)] | None = None
    queue: str = Field(default="hivlp-builds", pattern=r"^[a-z0-9_-]{1,64}$")
    heartbeat_s: int = Field(default=10, ge=2, le=3_600)
    end_s: float = Field(default=10.0, gt=0, le=600)
    keep: int = Field(default=100, ge=1, le=10_000)
    max_waiting: int = Field(default=32, ge=1, le=1_000)

    @property
    def by_workers(self) -> bool:
        """Whether builds are left to `hivlp worker`."""
        return self.runner == "worker" or (self.runner is None and self.url is not None)

    @property
    def here(self) -> bool:
        """Whether builds may run beside the service, in processes of its own."""
        return bool(self.roots) and not self.by_workers
