"""The error tree of the whole project. Errors carry fields; no HTTP word appears here.

HivlpError
├── InputError              something a user sent; names the parameter and the limit
│   ├── TextError           empty_text · text_too_long · invalid_text
│   └── ImageError          empty_image · unsupported_image · broken_image · image_too_large
├── ArtifactError           an exported model that can't be used
│   ├── ArtifactCorrupt     a file differs from its manifest; names the file
│   └── SpaceMismatch       a query encoder and an index that don't fit together
├── DeadlinePassed          work that was stopped, or not begun: its time was up
├── TrainingError           data, tower or settings of a fit or an export
└── MissingExtra            an optional package is absent; names the extra to install
"""

from __future__ import annotations

from pathlib import Path


class HivlpError(Exception):
    """Root of every error raised on purpose."""


class InputError(HivlpError):
    """Something a user sent can't be used.

    `code` is a stable word for programs, `param` names the field, `limit` the bound.
    """

    def __init__(
        self, code: str, message: str, *, param: str, limit: int | float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.limit = limit


class TextError(InputError):
    """A text that can't be encoded: `empty_text`, `text_too_long`, `invalid_text`."""


class ImageError(InputError):
    """A picture that can't be encoded.

    Codes: `empty_image`, `unsupported_image`, `broken_image`, `image_too_large`.
    """


class ArtifactError(HivlpError):
    """An exported model folder can't be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class ArtifactCorrupt(ArtifactError):
    """A file of the artifact is missing or differs from its manifest."""


class SpaceMismatch(HivlpError):
    """A query encoder aims at another gallery space than the one an index was built in."""

    def __init__(self, *, expected: str, received: str) -> None:
        super().__init__(
            f"the query encoder aims at gallery_space {received[:12]}, "
            f"the index holds gallery_space {expected[:12]}: encode the gallery with this model, "
            "or serve the index with the model it was built with"
        )
        self.expected = expected
        self.received = received


class DeadlinePassed(HivlpError):
    """Work was stopped, or not begun, since its time was up."""


class TrainingError(HivlpError):
    """Data, towers or settings from which nothing can be fitted or exported."""


class CheckpointError(TrainingError):
    """The folder of a fit or a run that can't be used; names the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class MissingExtra(HivlpError):
    """An optional package is absent."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed: pip install 'hivlp[{extra}]'")
        self.package = package
        self.extra = extra
