"""Settings of what watches the service: its logs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Level = Literal["debug", "info", "warning", "error"]


class LogSettings(BaseModel):
    """What is logged, and how; all of it goes to standard error.

    `format` auto: text for a terminal, JSON for all else. `level` is that of the service's own
    words; libraries are heard from `warning` on. A request slower than `slow_ms`, or that failed,
    is logged at WARNING, at most `slow_per_s` of them a second; of the others `requests_per_s` are,
    so that every request has a line under little load, and a bounded number under much.
    `queries`: what was asked for is logged too, but never a picture.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    level: Level = "info"
    format: Literal["auto", "json", "text"] = "auto"
    queries: bool = False
    slow_ms: float = Field(default=250.0, gt=0, le=600_000)
    slow_per_s: float = Field(default=20.0, ge=0, le=1_000_000)
    requests_per_s: float = Field(default=10.0, ge=0, le=1_000_000)


class SpareSettings(BaseModel):
    """What checks of answers that were given already may cost, `recall` and `shadow` together.

    At most `core_share` of one core; a check that requests keep waiting for `patience_s` seconds in
    all is given up.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    core_share: float = Field(default=0.02, gt=0, le=1)
    patience_s: float = Field(default=10.0, ge=0, le=600)


class RecallSettings(BaseModel):
    """Live queries that are answered again exactly: a `share` of them (0: none), `max_per_s`.

    `hivlp_ann_recall` is the mean of the last `window` of a version. Sides of more than `max_rows`
    rows aren't searched exactly.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float = Field(default=0.01, ge=0, le=1)
    max_per_s: float = Field(default=1.0, gt=0, le=1_000)
    window: int = Field(default=200, ge=1, le=100_000)
    max_rows: int = Field(default=10_000_000, ge=1)


class ShadowSettings(BaseModel):
    """A `share` of the searches of index `live` are also answered by another version, and compared.

    It is on where `index`, `version` or `artifact` say which: of this index (the live one), this
    version (the active one), queried with this model folder (the newest that fits).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    live: str = Field(default="default", min_length=1)
    index: str | None = Field(default=None, min_length=1)
    version: str | None = Field(default=None, min_length=1)
    artifact: Path | None = None
    share: float = Field(default=0.01, gt=0, le=1)
    max_per_s: float = Field(default=1.0, gt=0, le=1_000)

    @model_validator(mode="after")
    def _not_itself(self) -> Self:
        if self.index == self.live and self.version is None and self.artifact is None:
            raise ValueError("index is the live one: name its version or an artifact too")
        return self

    @property
    def on(self) -> bool:
        """Whether another version is named."""
        return not (self.index is None and self.version is None and self.artifact is None)

    @property
    def name(self) -> str:
        """The index of the other version."""
        return self.index or self.live


class TraceSettings(BaseModel):
    """OpenTelemetry: spans go to `endpoint`, by OTLP over HTTP; None: there are none.

    Of requests that no traced caller sent, a `share` is traced; a caller's decision is kept.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s@]+$")
    share: float = Field(default=0.01, ge=0, le=1)
    service_name: str = Field(default="hivlp", min_length=1, max_length=255)
