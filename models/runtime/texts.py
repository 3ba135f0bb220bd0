"""Texts to token ids: one canonical form for queries, captions, cache keys and training.

The tokenizer's truncation is set once, when it is loaded: setting it with each call, as the library
also allows, lets two threads change each other's lengths.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers

from hivlp.models.artifact import TextPreparation
from hivlp.models.encoder import EncoderBatch
from hivlp.models.errors import ArtifactError, TextError

MAX_TEXT_CHARS = 10_000
"""What `Tokenizer` accepts of one text; a service usually asks for less before that."""

_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SURROGATES = re.compile(r"[\ud800-\udfff]")
# Formats, separators and controls; and letters, marks and symbols that are drawn as nothing.
_INVISIBLE_CATEGORIES = frozenset({"Cf", "Cc", "Zs", "Zl", "Zp"})
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)


def clean_text(text: str, *, max_chars: int, param: str = "query") -> str:
    """The canonical form of a text: NFC, each run of white space one space, none at the ends.

    Raises TextError: `text_too_long` (characters as sent, with the limit), `invalid_text` (control
    characters other than tab and line ends, half surrogate pairs), `empty_text` (nothing visible).
    """
    if len(text) > max_chars:
        raise TextError(
            "text_too_long",
            f"the text has {len(text)} characters, the limit is {max_chars}",
            param=param,
            limit=max_chars,
        )
    _refuse(_SURROGATES, text, "half of a surrogate pair", param)
    _refuse(_CONTROLS, text, "the control character", param)
    cleaned = " ".join(unicodedata.normalize("NFC", text).split())
    if all(_is_invisible(character) for character in cleaned):
        raise TextError("empty_text", "the text has nothing to search for", param=param)
    return cleaned


def _refuse(pattern: re.Pattern[str], text: str, what: str, param: str) -> None:
    if found := pattern.search(text):
        raise TextError(
            "invalid_text",
            f"the text contains {what} U+{ord(found.group()):04X} at position {found.start()}",
            param=param,
        )


def _is_invisible(character: str) -> bool:
    if unicodedata.category(character) in _INVISIBLE_CATEGORIES:
        return True
    return _INVISIBLE.match(character) is not None


class Tokenizer:
    """An artifact's tokenizer. Safe to call from several threads at once."""

    def __init__(self, folder: Path, spec: TextPreparation) -> None:
        """Load `folder`/`spec.tokenizer_file`. Raises ArtifactError naming the file."""
        try:
            loaded = tokenizers.Tokenizer.from_file(str(folder / spec.tokenizer_file))
            # Keeps what the template adds (the end token) and cuts the text.
            loaded.enable_truncation(spec.max_tokens)
        except Exception as error:  # the library raises bare Exceptions
            raise ArtifactError(folder, f"{spec.tokenizer_file}: {error}") from error
        loaded.no_padding()
        # "</s>" typed by a user is text: it must not end the sequence.
        loaded.encode_special_tokens = True
        self._tokenizer = loaded
        self._spec = spec

    def encode(self, texts: Sequence[str], *, param: str = "texts") -> EncoderBatch:
        """Clean and tokenise: `input_ids` and `attention_mask`, both (n, t) int64.

        t is the longest text's length, or `max_tokens` where the model wants that. Raises TextError
        naming the text, as `clean_text`; `empty_text` too where no token is left of a text.
        """
        names = [f"{param}[{i}]" for i in range(len(texts))]
        encodings = [self._encode_one(*pair) for pair in zip(texts, names, strict=True)]
        longest = max((len(encoding.ids) for encoding in encodings), default=1)
        width = self._spec.max_tokens if self._spec.pad_to_max else longest
        input_ids = np.full((len(texts), width), self._spec.pad_id, dtype=np.int64)
        attention_mask = np.zeros((len(texts), width), dtype=np.int64)
        for row, encoding in enumerate(encodings):
            input_ids[row, : len(encoding.ids)] = encoding.ids
            attention_mask[row, : len(encoding.ids)] = 1
        return EncoderBatch(
            inputs={"input_ids": input_ids, "attention_mask": attention_mask},
            size=len(texts),
            truncated=tuple(bool(encoding.overflowing) for encoding in encodings),
        )

    def _encode_one(self, text: str, param: str) -> tokenizers.Encoding:
        # One at a time: the library's batches start a thread for every processor of the host.
        encoding = self._tokenizer.encode(clean_text(text, max_chars=MAX_TEXT_CHARS, param=param))
        if all(encoding.special_tokens_mask):
            raise TextError(
                "empty_text", "the model's tokenizer leaves nothing of the text", param=param
            )
        return encoding
