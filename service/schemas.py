"""The bodies of the HTTP API. Requests are strict and closed: no coercion, no unknown field.

Bounds that a setting moves (k, offset, ...) are checked by `check_limits`, so that the limits in
force are those of this server. The first thing wrong ends the check of a list or of unknown fields:
a body of millions of wrong values must not become millions of errors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from hivlp.index.filters import parse_filter
from hivlp.index.level_index import Must
from hivlp.index.snapshot.activation_files import MAX_CANARIES, Canary
from hivlp.models.errors import InputError
from hivlp.models.levels import Modality
from hivlp.models.reranker import DEFAULT_RERANKED
from hivlp.service.settings import Limits

MAX_METADATA_NAMES = 64
MAX_STAGES = 16
MAX_ID_CHARS = 4_096
MAX_DEADLINE_MS = 600_000


def _no_nul(text: str) -> str:
    if "\x00" in text:
        raise PydanticCustomError("invalid_text", "must not hold a NUL character")
    return text


Text = Annotated[str, AfterValidator(_no_nul)]
Name = Annotated[str, Field(min_length=1, max_length=256), AfterValidator(_no_nul)]
ItemId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS), AfterValidator(_no_nul)]
Columns = Annotated[list[Name], Field(max_length=MAX_METADATA_NAMES, fail_fast=True)]
PlanChoice = Literal["auto", "cascade", "funnel", "exact"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_field_is_enough(cls, value: Any) -> Any:
        known = cls.model_fields
        if not isinstance(value, dict) or len(value) <= len(known):
            return value
        unknown = next(name for name in value if name not in known)
        return {name: value[name] for name in (*known, unknown) if name in value}


class Width(_Strict):
    """How many candidates a level of the cascade keeps."""

    level: int = Field(ge=1)
    keep: int = Field(ge=1)


class SearchOptions(_Strict):
    """What every search takes."""

    index: Name = Field(default="default", description="The index to search.")
    snapshot: Name | None = Field(
        default=None, description="The version to search; the active one unless given."
    )
    k: int = Field(default=10, ge=1, description="How many hits to return.")
    offset: int = Field(default=0, ge=0, description="How many hits to skip.")
    modality: Modality = Field(default="image", description="What is searched.")
    filter: dict[str, Any] | None = Field(
        default=None,
        description="What items' metadata must fulfil: `field` with one of `eq`, `in`, `range` or "
        "`exists`, or `and`, `or`, `not` of such.",
        examples=[{"field": "colour", "in": ["red", "blue"]}],
    )
    with_metadata: Columns | bool = Field(
        default=True, description="All metadata, none, or the named columns."
    )
    explain: bool = Field(default=False, description="Score and rank of each hit at every level.")
    rerank: bool = Field(
        default=False,
        description="Score the first hits again with the model's cross-modal encoder, and sort "
        "them by what it says.",
    )
    rerank_k: int = Field(
        default=DEFAULT_RERANKED,
        ge=1,
        description="How many of the first hits, `offset` included, are scored again.",
    )
    plan: PlanChoice = Field(
        default="auto",
        description="`cascade` searches each level as its output arrives, `funnel` encodes fully "
        "first, `exact` scores every row at the finest level.",
    )
    cascade: list[Width] = Field(
        default_factory=list,
        max_length=MAX_STAGES,
        fail_fast=True,
        description="Widths, coarse first.",
    )
    max_level: int | None = Field(default=None, ge=1, description="Use no level beyond this one.")
    early_exit: bool = Field(
        default=False,
        description="Allow the cascade to answer with an earlier level where calibration found "
        "that later ones would not answer better.",
    )
    min_score: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Leave out hits with a lower `score`; they still count for `offset`.",
    )
    deadline_ms: float | None = Field(
        default=None,
        ge=1,
        le=MAX_DEADLINE_MS,
        allow_inf_nan=False,
        description="Milliseconds from the arrival of the request. The levels searched by then "
        "are the answer, `degraded`; 504 when not even the first is.",
    )


class TextSearch(SearchOptions):
    """Search by a sentence."""

    query: Text = Field(description="The sentence.", examples=["red heart"])


class ImageSearch(SearchOptions):
    """Search by a picture, whose bytes travel beside these fields."""


class SimilarSearch(SearchOptions):
    """More like an item of the index; the item itself is left out."""

    id: ItemId = Field(description="The item's id.")


class VectorSearch(SearchOptions):
    """Search by a vector of the finest level, or by one as vectors were imported."""

    vector: list[float] = Field(
        min_length=1,
        max_length=65_536,
        fail_fast=True,
        description="All dimensions of the finest level; on an index of imported vectors, a "
        "vector as they were imported.",
    )


class BatchSearch(_Strict):
    """Several searches, each with its own answer or error.

    Each is the body of its own endpoint with `kind` beside: text, image, similar or vector.
    """

    searches: list[dict[str, Any]] = Field(min_length=1, fail_fast=True)


class PutItem(_Strict):
    """An item as it shall be: all that it was before is replaced.

    It needs a text, a picture (its bytes travel beside these fields) or a vector to be found by.
    """

    texts: list[Text] = Field(
        default_factory=list,
        max_length=1_000,
        fail_fast=True,
        description="Captions, each of which finds it.",
    )
    metadata: dict[str, Any] = Field(
        default_factory=dict,
        description="Values by name: texts, numbers, booleans, lists of texts, ISO 8601 dates.",
    )
    vector: list[float] | None = Field(
        default=None,
        min_length=1,
        max_length=65_536,
        fail_fast=True,
        description="Its own vector, all dimensions of the finest level, in place of encoding.",
    )
    modality: Modality = Field(default="image", description="What the vector stands for.")


class ActivateSnapshot(_Strict):
    """A version to make the active one, and queries that it must answer rightly before it is."""

    snapshot: Name
    canary: list[Canary] | None = Field(
        default=None,
        max_length=MAX_CANARIES,
        fail_fast=True,
        description="The index's own canary.jsonl unless given; [] for none.",
    )


class EmbedText(_Strict):
    """Embed one text."""

    index: Name = "default"
    text: Text


class EmbedImage(_Strict):
    """Embed one picture, whose bytes travel beside these fields."""

    index: Name = "default"


Place = Annotated[str, Field(min_length=1, max_length=4_096), AfterValidator(_no_nul)]


class StartBuild(_Strict):
    """Build a version of an index from a corpus, as `hivlp build` does with the same options."""

    index: Name = Field(default="default", description="The index; one that is new is made.")
    corpus: Place = Field(
        description="An absolute path or a URL: a folder, a table, a tar, or a pattern of several.",
        examples=["/data/corpora/pictures"],
    )
    artifact: Place | None = Field(
        default=None,
        description="The model: its name in HIVLP_HOME/artifacts or its path; the index's last one "
        "unless given.",
    )
    activate: bool = Field(default=True, description="Make it the active version when it is built.")
    key: Name | None = Field(
        default=None,
        description="A word of yours: asked again with the same one, you get the same build.",
    )
    split: Literal["all", "train", "val", "test", "restval"] = Field(
        default="all", description="Of a Karpathy split JSON."
    )
    images: Place | None = Field(default=None, description="The folder of its pictures.")
    aliases: Literal["img2dataset"] | None = Field(
        default=None, description="Columns are named as this program does it."
    )
    metadata_group: Name | None = Field(
        default=None, description="Metadata column whose equals answer each other."
    )
    max_failures: float = Field(
        default=0.05, ge=0, le=1, description="Share of bad items, or captions, that is allowed."
    )
    batch_size: int = Field(default=32, ge=1, le=4_096, description="Items encoded at once.")
    workers: int = Field(default=2, ge=1, le=256, description="Threads that read pictures.")
    threads: int = Field(default=1, ge=1, le=256, description="Threads of the encoder.")
    build_threads: int | None = Field(
        default=None, ge=1, le=1_024, description="Threads that build graphs; all unless given."
    )
    store_states: bool = Field(
        default=False, description="Keep pictures' token states for the model's re-ranker."
    )
    forget_changes: bool = Field(
        default=False,
        description="The corpus alone, without items that were put or deleted since.",
    )
    materialise: bool = Field(default=False, description="Every level as a FAISS index.")
    family: Literal["auto", "scan", "graph"] = Field(default="auto", description="How it finds.")
    level1: Literal["auto", "flat", "sq8", "pq64x4fs", "rabitqfs"] = Field(
        default="auto", description="Level 1's codes."
    )
    rows: Literal["fp32", "fp16"] = Field(default="fp32", description="How rows are kept.")
    must: list[Must] = Field(
        default=["mask"],
        max_length=3,
        fail_fast=True,
        description="What it is for.",
    )
    max_memory: int | None = Field(default=None, ge=1, description="Most bytes searched.")
    max_query_ms: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="Most milliseconds of one search."
    )
    max_build_s: float = Field(
        default=1_800.0, gt=0, allow_inf_nan=False, description="Most seconds to build levels."
    )
    target: float = Field(default=0.99, ge=0, le=1, description="ANN recall wanted.")


def check_limits(options: SearchOptions, limits: Limits) -> None:
    """Raise InputError for what is over this server's limits or contradicts itself."""
    if "rerank_k" in options.model_fields_set and not options.rerank:
        message = "rerank_k: it says how many hits are re-ranked, and rerank is false"
        raise InputError("invalid_value", message, param="rerank_k")
    if options.filter is not None:
        parse_filter(options.filter)
    for param, value, limit in (
        ("k", options.k, limits.max_k),
        ("offset", options.offset, limits.max_offset),
        ("rerank_k", options.rerank_k if options.rerank else 0, limits.max_rerank_k),
    ):
        if value > limit:
            raise _over(param, value, limit)
    for place, width in enumerate(options.cascade):
        if width.keep > limits.max_keep:
            raise _over(f"cascade.{place}.keep", width.keep, limits.max_keep)


def _over(param: str, value: int, limit: int) -> InputError:
    message = f"{param}: {value} is over the limit of {limit}"
    return InputError("out_of_range", message, param=param, limit=limit)
