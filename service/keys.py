"""API keys and the admin key: where they come from, and who a request's key says it is.

Nothing here keeps a key: the ring holds hashes under a secret of its own, so that all comparisons
are of equal length, and it compares what was sent with every key, whichever one is right.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, SecretStr, model_validator
from pydantic_settings import NoDecode

from hivlp.models.errors import HivlpError

# What a bearer token may be (RFC 6750), and no shorter than what can't be guessed.
KEY = re.compile(r"[A-Za-z0-9._~+/-]+=*")
MIN_CHARS, MAX_CHARS = 16, 512
SHAPE = f"{MIN_CHARS} to {MAX_CHARS} characters of A-Z a-z 0-9 . _ ~ + / -"


class KeyFileError(HivlpError):
    """A file of keys can't be read, or holds what is no key. Never quotes it."""

    def __init__(self, setting: str, file: Path, reason: str) -> None:
        super().__init__(f"setting keys.{setting}: {file}: {reason}")


class Role(enum.IntEnum):
    """Who a request is, by its key; an admin may do what a user may."""

    NOBODY = 0
    USER = 1
    ADMIN = 2


def _listed(given: Any) -> Any:
    """One key or a JSON list of keys, as an environment variable holds them; never an empty one."""
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.lstrip().startswith("[") else [given]
        except ValueError:
            raise ValueError("must be a key, or a JSON list of keys") from None
    if not given:  # it would open what it was to close
        raise ValueError("holds no key: leave it out where everyone may search")
    return given


class KeySettings(BaseModel):
    """The keys themselves, or files that hold them, one a line, with `#` for remarks.

    Without `api` whoever reaches the service may search. Without `admin` the admin routes are there
    for programs of this machine only, where the service listens on loopback and `api` isn't set.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    api: Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_listed)] = ()
    api_file: Path | None = None
    admin: SecretStr | None = None
    admin_file: Path | None = None

    @model_validator(mode="after")
    def _every_key_is_one(self) -> Self:
        for name, key in (*(("api", key) for key in self.api), ("admin", self.admin)):
            if key is not None and not _is_key(key.get_secret_value()):
                raise ValueError(f"{name}: a key must be {SHAPE}")
        return self

    @property
    def has_api(self) -> bool:
        """Whether there are API keys, wherever they are."""
        return bool(self.api) or self.api_file is not None

    @property
    def has_admin(self) -> bool:
        """Whether there is an admin key, wherever it is."""
        return self.admin is not None or self.admin_file is not None


class Keyring:
    """Tells who a key belongs to, in the same time for any key that isn't here."""

    def __init__(self, api: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        self._secret = secrets.token_bytes(32)
        roles = [(key, Role.USER) for key in api] + [(key, Role.ADMIN) for key in admin]
        self._known = tuple((self._digest(key.encode()), role) for key, role in roles)
        self.closed = any(role is Role.USER for _, role in self._known)
        self.has_admin = any(role is Role.ADMIN for _, role in self._known)

    @classmethod
    def of(cls, settings: KeySettings) -> Keyring:
        """The keys of the settings and of their files. Raises KeyFileError."""
        api = [key.get_secret_value() for key in settings.api]
        admin = [] if settings.admin is None else [settings.admin.get_secret_value()]
        if settings.api_file is not None:
            api += _read("api_file", settings.api_file)
        if settings.admin_file is not None:
            admin += _read("admin_file", settings.admin_file)
        return cls(api, admin)

    def role(self, given: bytes) -> Role:
        """Who sent this key. It is compared with all keys, and the right one ends nothing early."""
        digest, found = self._digest(given), Role.NOBODY
        for known, role in self._known:
            same = hmac.compare_digest(digest, known)
            found = Role(max(found, same * role))
        return found

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, hashlib.sha256)


def _read(setting: str, file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise KeyFileError(setting, file, error.strerror or "can't be read") from None
    except UnicodeDecodeError:
        raise KeyFileError(setting, file, "is not UTF-8") from None
    keys = []
    for number, line in enumerate(lines, start=1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not _is_key(key):
            raise KeyFileError(setting, file, f"line {number}: a key must be {SHAPE}")
        keys.append(key)
    if not keys:  # an empty file must not open what it was to close
        raise KeyFileError(setting, file, "holds no key")
    return keys


def _is_key(text: str) -> bool:
    return MIN_CHARS <= len(text) <= MAX_CHARS and KEY.fullmatch(text) is not None
