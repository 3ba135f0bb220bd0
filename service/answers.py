"""The bodies of answers, as documented; the service builds plain dictionaries of this form.

Answers aren't validated on their way out (validation is the dearest part of a small response);
tests hold real answers against these models instead, with fields that they don't know forbidden.
The client reads answers into the same models and lets such fields pass: a newer service adds some.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hivlp.models.levels import Modality


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(_Answer):
    """What went wrong: `code` is for programs, `param` names the field to blame."""

    code: str
    message: str
    param: str | None
    request_id: str


class ErrorAnswer(_Answer):
    """Every error has this body."""

    error: ErrorDetail


class LevelScore(_Answer):
    """A hit at one level: its score there, and its rank among what that level kept."""

    level: int
    score: float
    rank: int | None


class Hit(_Answer):
    """One result. `text` is the caption that matched, when texts were searched.

    `match` is the re-ranker's probability that text and picture belong together, of hits that were
    re-ranked; `score` stays that of `level`.
    """

    id: str
    rank: int
    score: float
    level: int
    match: float | None = None
    metadata: dict[str, Any] | None = None
    text: str | None = None
    explain: list[LevelScore] | None = None


class StageTime(_Answer):
    """One stage of the work, in milliseconds from the arrival of the request."""

    name: str
    level: int | None
    start_ms: float
    duration_ms: float
    candidates_in: int | None
    candidates_out: int | None


class SearchAnswer(_Answer):
    """Hits, best first, and how they were found."""

    hits: list[Hit]
    returned: int
    took_ms: float
    index: str
    snapshot: str
    model: str
    plan: str
    exit_level: int
    degraded: bool
    partial: bool
    truncated: bool
    cached: bool
    stages: list[StageTime]
    request_id: str


class BatchAnswer(_Answer):
    """One entry a search, in order: an answer or an error."""

    results: list[SearchAnswer | ErrorAnswer]
    took_ms: float
    request_id: str


class LevelVector(_Answer):
    """The embedding of one level, L2-normalised."""

    level: int
    dim: int
    vector: list[float]


class EmbedAnswer(_Answer):
    """The embeddings of one input, coarse first."""

    index: str
    model: str
    query_encoder: str
    gallery_space: str
    levels: list[LevelVector]
    truncated: bool
    took_ms: float
    request_id: str


class ItemAnswer(_Answer):
    """One item; `image` is where its picture is served, if it has one."""

    id: str
    index: str
    snapshot: str
    metadata: dict[str, Any]
    image: str | None
    request_id: str


class ChangeAnswer(_Answer):
    """An item that was put or deleted, and the version that says so.

    `searchable` false: the version is published, and is found in once its levels are loaded.
    """

    id: str
    index: str
    snapshot: str
    created: bool
    deleted: bool
    searchable: bool
    request_id: str


class BuildProgress(_Answer):
    """How far a step of a build is: what counts nothing has no `unit`.

    `total` is null where nobody knows it, `rate` is what was done a second lately.
    """

    step: str
    unit: str | None
    done: int
    total: int | None
    rate: float | None
    seconds_left: float | None


class BuildInfo(_Answer):
    """A build: what was asked for, how far it is, and what came of it.

    `state` is queued, running, done, failed or cancelled; `cancelling`: told to end, and still at
    it. `snapshot` is the version that it made, `reason` why it failed.
    """

    id: str
    state: str
    cancelling: bool
    asked: dict[str, Any] = Field(description="The request, with places as they were found.")
    tries: int
    created_at: str
    started_at: str | None
    ended_at: str | None
    progress: BuildProgress | None
    snapshot: str | None
    active: bool | None
    items: int | None
    encoded: int | None
    left_out: int | None
    notes: list[str]
    reason: str | None


class BuildAnswer(BuildInfo):
    """One build."""

    request_id: str


class BuildList(_Answer):
    """Builds, newest first."""

    builds: list[BuildInfo]
    request_id: str


class LevelInfo(_Answer):
    """One level of an index."""

    level: int
    dim: int


class IndexInfo(_Answer):
    """An index and the version that is being searched."""

    name: str
    snapshot: str
    created_at: str
    model: str
    gallery: str
    gallery_space: str
    levels: list[LevelInfo]
    items: int
    rows: dict[Modality, int]
    queries: list[Modality] = Field(description="What it can be asked with, besides items.")
    rerank: bool = Field(description="Whether its model has a re-ranker.")
    states: bool = Field(description="Whether it keeps pictures' states for that re-ranker.")


class IndexList(_Answer):
    """The indexes served here."""

    indexes: list[IndexInfo]
    request_id: str


class SnapshotList(_Answer):
    """The versions of one index, as the store lists them; `active` is the one searched."""

    index: str
    active: str
    snapshots: list[str]
    request_id: str


class SourceInfo(_Answer):
    """Where a model or pictures come from, and what their licence asks for."""

    name: str
    licence: str
    url: str
    attribution: str


class RerankerInfo(_Answer):
    """A model's re-ranker, and the states that an index may keep for it of each picture."""

    layers: int
    image_tokens: int
    image_width: int
    states_space: str


class ModelInfo(_Answer):
    """A model served here."""

    name: str
    gallery_space: str
    query_encoder: str
    precision: str
    reranker: RerankerInfo | None
    levels: dict[Modality, list[LevelInfo]]
    measured: dict[str, float]
    sources: list[SourceInfo]


class InfoAnswer(_Answer):
    """What this server is, holds and allows."""

    name: str
    version: str
    indexes: list[IndexInfo]
    models: list[ModelInfo]
    limits: dict[str, int | float]
    request_id: str


class ActivationProcess(_Answer):
    """One process that serves the index: how far it is. `reason` is why it failed."""

    pid: int
    state: Literal["staging", "staged", "failed", "serving"]
    reason: str | None


class ActivationAnswer(_Answer):
    """An activation or rollback. `state` active: `snapshot` is active, and every process flips.

    Where it was so before anybody asked, there is no time, and no process is listed.
    """

    index: str
    kind: Literal["activate", "rollback"]
    snapshot: str
    previous: str | None
    state: Literal["staging", "active", "failed"]
    reason: str | None
    asked_at: str | None
    ended_at: str | None
    processes: list[ActivationProcess]
    request_id: str


class HealthAnswer(_Answer):
    """`status` is live, loading, ready, draining or failed."""

    status: str
    uptime_s: float | None = None
    indexes: dict[str, str] | None = None
