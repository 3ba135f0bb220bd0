"""Settings of the service: environment `HIVLP_...` with `__` for nesting, or a TOML file.

Built once, by the command line or a test, and passed by value. Unknown keys are errors in both
places: a misspelt limit must not pass for a default.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from pydantic_settings import SettingsError as UnreadableSetting

from hivlp.index.backends.choose import Backend
from hivlp.index.build.upserts import MAX_TEXTS
from hivlp.models.errors import HivlpError
from hivlp.models.reranker import DEFAULT_RERANKED
from hivlp.models.runtime.threads import available_threads
from hivlp.service.activation_settings import ActivationSettings
from hivlp.service.bounds import ConnectionSettings
from hivlp.service.cache.settings import CacheSettings
from hivlp.service.cors import CorsSettings
from hivlp.service.fetch_settings import FetchSettings
from hivlp.service.jobs.settings import JobSettings
from hivlp.service.keys import KeySettings
from hivlp.service.watch_settings import (
    LogSettings,
    RecallSettings,
    ShadowSettings,
    SpareSettings,
    TraceSettings,
)

PREFIX = "HIVLP_"
FILE_VARIABLE = "HIVLP_SETTINGS_FILE"
# Read elsewhere, by this package's tests and by nothing that serves.
FOREIGN_VARIABLES = frozenset(
    {"HIVLP_REQUIRE", "HIVLP_KILL_ROUNDS", "HIVLP_FUZZ_ROUNDS", FILE_VARIABLE}
)
MIB = 1 << 20
LEAST_HUNG_S = 5.0
"""A process of a busy machine may give no sign for seconds, and the parent looks once a second."""


class SettingsError(HivlpError):
    """A setting is unknown, of the wrong type or out of range."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Limits(_Part):
    """The most that one request may ask or send, and how many may be in flight."""

    max_body_bytes: int = Field(default=16 * MIB, ge=1024)
    # Of JSON where no picture may be: a text, a vector, a filter.
    max_json_bytes: int = Field(default=MIB, ge=1024)
    # Bytes of all bodies that are here or on their way, without the small ones; beyond, 429.
    max_held_bytes: int = Field(default=256 * MIB, ge=1024)
    # Bytes of all answers that clients have not read; beyond, who has taken nothing for longest is
    # given up.
    max_unread_bytes: int = Field(default=256 * MIB, ge=1024)
    # Values (numbers, texts, objects, lists) in the JSON of one body.
    max_body_values: int = Field(default=300_000, ge=100)
    max_image_bytes: int = Field(default=10 * MIB, ge=1024)
    max_pixels: int = Field(default=40_000_000, ge=1)
    # Pixels decoded at once, by all threads; a decoder takes up to 17 bytes of memory for each.
    max_decoding_pixels: int = Field(default=80_000_000, ge=1)
    max_text_chars: int = Field(default=2_000, ge=1)
    max_k: int = Field(default=1_000, ge=1)
    max_offset: int = Field(default=10_000, ge=0)
    max_keep: int = Field(default=100_000, ge=1)
    max_rerank_k: int = Field(default=100, ge=DEFAULT_RERANKED)
    # Milliseconds that re-ranking may take once the levels are done; then it is left out.
    max_rerank_ms: float = Field(default=2_000.0, gt=0, le=600_000)
    max_batch: int = Field(default=32, ge=1)
    # Accepted and waiting for a worker; beyond workers + max_queue the answer is 429.
    max_queue: int = Field(default=64, ge=0)
    # Milliseconds that a search may be expected to wait for a worker; beyond, 429.
    max_wait_ms: float = Field(default=2_000.0, gt=0, le=600_000)
    max_thumbnail_px: int = Field(default=1_024, ge=16)
    # Items put or deleted that wait to be published; beyond, the answer is 429.
    max_changes: int = Field(default=256, ge=1)
    # Bytes of the bodies of items that arrive or wait to be published; beyond, 429.
    max_change_bytes: int = Field(default=128 * MIB, ge=1024)
    max_item_texts: int = Field(default=MAX_TEXTS, ge=1, le=MAX_TEXTS)
    # Seconds from the head of a request until all of its body has come; then 408.
    body_timeout_s: float = Field(default=30.0, gt=0, le=3_600)

    @model_validator(mode="after")
    def _a_full_body_must_fit(self) -> Self:
        if self.max_change_bytes < self.max_body_bytes:
            raise ValueError("max_change_bytes must be at least max_body_bytes")
        if self.max_held_bytes < self.max_body_bytes:
            raise ValueError("max_held_bytes must be at least max_body_bytes")
        if self.max_decoding_pixels < self.max_pixels:
            raise ValueError("max_decoding_pixels must be at least max_pixels")
        return self

    @model_validator(mode="after")
    def _a_full_batch_must_fit(self) -> Self:
        if self.max_batch > self.max_queue + 1:
            raise ValueError("max_batch may be at most max_queue + 1, or a full batch never fits")
        return self


class Threads(_Part):
    """`workers` run searches (None: the cores a process may use); `encoder` is per stage.

    `reranker` run the pairs of one search (None: the cores again, it is most of a search's work).
    """

    workers: int | None = Field(default=None, ge=1)
    encoder: int = Field(default=1, ge=1)
    reranker: int | None = Field(default=None, ge=1)


class BatchSettings(_Part):
    """How searches share workers: at most `max_size` of those that wait are encoded together.

    `overlap`: while fewer are in flight than there are cores, a search is begun before its encoder
    has finished.
    """

    max_size: int = Field(default=8, ge=1, le=256)
    overlap: bool = True


class ChangeSettings(_Part):
    """How versions change under a running service.

    Every `poll_s` seconds it looks whether another version was made active. Items put or deleted
    over HTTP are published together, at most every `publish_s` seconds; for another process that
    changes the index they wait `wait_s` seconds. Versions that item changes superseded can be asked
    for by name for `keep_s` seconds, the last `keep_versions` of them. `writes` None: items may be
    changed over HTTP only with the admin key, or where there are no keys by programs of this
    machine; True: by whoever may search.
    """

    poll_s: float = Field(default=0.25, gt=0, le=60)
    publish_s: float = Field(default=0.25, ge=0, le=60)
    wait_s: float = Field(default=10.0, gt=0, le=600)
    keep_s: float = Field(default=60.0, ge=0, le=3_600)
    keep_versions: int = Field(default=8, ge=0, le=64)
    writes: bool | None = None


class Settings(BaseSettings):
    """All settings of `hivlp serve`. `indexes` empty means every index found under `home`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,  # it may hold a password
    )

    home: Path = Path(".hivlp")
    host: str = "127.0.0.1"
    # Names besides localhost that it is asked at, where it listens on loopback without API keys.
    hosts: tuple[str, ...] = ()
    port: int = Field(default=8080, ge=0, le=65535)
    indexes: tuple[str, ...] = ()
    artifact: Path | None = None
    # What scans the levels: the GPU where there is one, else the CPU. See docs/operations.md.
    backend: Backend = "auto"
    warm: bool = True
    # Processes that serve, each with everything loaded; files are mapped into memory once for all.
    processes: int = Field(default=1, ge=1, le=256)
    # Seconds without a sign of one of several processes after which it is replaced; 0: never. Or
    # at least LEAST_HUNG_S.
    hung_s: float = Field(default=60.0, ge=0, le=86_400)
    # Seconds for which requests are still taken after SIGTERM, while /readyz says no.
    drain_s: float = Field(default=1.0, ge=0, le=600)
    # How fast large files of served versions are hashed in the background; 0 turns it off.
    scrub_mib_per_s: float = Field(default=50.0, ge=0, allow_inf_nan=False)
    limits: Limits = Limits()
    cache: CacheSettings = CacheSettings()
    threads: Threads = Threads()
    batches: BatchSettings = BatchSettings()
    changes: ChangeSettings = ChangeSettings()
    activation: ActivationSettings = ActivationSettings()
    keys: KeySettings = KeySettings()
    connections: ConnectionSettings = ConnectionSettings()
    fetch: FetchSettings = FetchSettings()
    cors: CorsSettings = CorsSettings()
    log: LogSettings = LogSettings()
    spare: SpareSettings = SpareSettings()
    recall: RecallSettings = RecallSettings()
    shadow: ShadowSettings = ShadowSettings()
    trace: TraceSettings = TraceSettings()
    jobs: JobSettings = JobSettings()

    @field_validator("hung_s")
    @classmethod
    def _nothing_healthy_is_killed(cls, value: float) -> float:
        if 0 < value < LEAST_HUNG_S:
            raise ValueError(f"hung_s must be 0 (never) or at least {LEAST_HUNG_S:g} seconds")
        return value

    @model_validator(mode="after")
    def _enough_are_remembered(self) -> Self:
        if self.recall.share and self.activation.recall_checks > self.recall.window:
            raise ValueError("activation.recall_checks may be at most recall.window")
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is given in code, then the environment, then the file."""
        file = os.environ.get(FILE_VARIABLE)
        sources = (init_settings, env_settings)
        return (*sources, TomlConfigSettingsSource(settings_cls, Path(file))) if file else sources

    @property
    def writable(self) -> bool:
        """Whether items may be put and deleted over HTTP at all; `service.writers` says by whom."""
        if self.changes.writes is not None:
            return self.changes.writes
        return self.keys.has_admin or self.trusts_machine

    @property
    def trusts_machine(self) -> bool:
        """Whether programs of this machine may do what else needs the admin key.

        Not with API keys: a proxy of this machine can't be told from a program of it.
        """
        return is_loopback(self.host) and not (self.keys.has_api or self.keys.has_admin)

    @property
    def cores(self) -> int:
        """The cores that one of the processes may keep busy, at least 1."""
        return max(1, available_threads() // self.processes)

    @property
    def workers(self) -> int:
        """How many searches run at once in one process."""
        return self.threads.workers or self.cores

    @property
    def shared_cores(self) -> int:
        """The cores that the workers of all processes can keep busy together."""
        return min(self.processes * self.workers, available_threads())


def is_loopback(host: str) -> bool:
    """Whether an address, or the name localhost, is this machine's own."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def load_settings(**given: Any) -> Settings:
    """Settings from `given`, the environment and the file. Raises SettingsError in one line."""
    check_environment(os.environ)
    file = os.environ.get(FILE_VARIABLE)
    if file and not Path(file).is_file():
        raise SettingsError(f"{FILE_VARIABLE}: no file at {file}")
    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"setting {where}: {first['msg']}") from error
    except UnreadableSetting as error:  # an environment variable that must be JSON
        raise SettingsError(str(error)) from None


def check_environment(environ: Mapping[str, str]) -> None:
    """Raise SettingsError for a `HIVLP_` variable that is no setting, naming the nearest one."""
    known = {name.upper() for name in _variables(Settings, PREFIX)} | FOREIGN_VARIABLES
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"{name}: no such setting{hint}")


def _variables(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _variables(field.annotation, f"{prefix}{name}__")
