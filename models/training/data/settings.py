"""Settings of a run's data: how it is read, changed and masked. Sections of a recipe."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hivlp.models.errors import TrainingError
from hivlp.models.fields import number

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """How corpora are read.

    `reader` names an entry point of the group `hivlp.corpora`. `workers` processes read and prepare
    batches ahead, 0: none, the training process does. With `stream`, files are read from end to end
    in a new order each pass and shuffled in a buffer of `buffer` pictures and `buffer_mib`; a pass
    then counts as `stream_items` pictures, since nobody counts them. Else they are listed once and
    drawn from anywhere. `only` and `leave_out` are text files with one id a line, "" for none.
    """

    reader: str = "files"
    workers: int = number(2, 0, 256, "processes")
    max_failures: float = number(0.05, 0, 1, "share")
    stream: bool = False
    stream_items: int = number(0, 0, unit="pictures a pass")
    buffer: int = number(2000, 1, 10**6, "pictures")
    buffer_mib: int = number(256, 1, 10**5, "MiB a stream")
    only: str = ""
    leave_out: str = ""


@dataclass(frozen=True, slots=True)
class AugmentSettings:
    """Random changes of pictures; see `augment`.

    `crop_least`: least share of the area that a crop keeps, 1 for no crop; `crop_aspect`: how far
    its aspect may be from the picture's. `flip`: share that is mirrored, unless a word of the
    caption begins with one of `flip_unless`, words, in letters of any case. The others: greatest
    change of a colour factor. Raises TrainingError naming a field that can't be.
    """

    crop_least: float = number(0.6, 0.01, 1, "share")
    crop_aspect: float = number(4 / 3, 1, 10, "factor")
    flip: float = number(0.5, 0, 1, "share")
    flip_unless: tuple[str, ...] = (
        "left",
        "right",
        "clockwise",
        "counterclockwise",
        "anticlockwise",
    )
    brightness: float = number(0.2, 0, 0.99)
    contrast: float = number(0.2, 0, 0.99)
    saturation: float = number(0.2, 0, 0.99)

    def __post_init__(self) -> None:
        for word in self.flip_unless:
            if not WORD.fullmatch(word):
                raise TrainingError(
                    f"flip_unless: {word!r} is no word: letters, digits and _ are wanted"
                )


@dataclass(frozen=True, slots=True)
class MaskSettings:
    """Masked language modelling: the share of tokens that must be told, and of these the shares
    that become [MASK] and that become another token; the others stay.
    """

    share: float = number(0.15, 0, 1, "share of tokens")
    masked: float = number(0.8, 0, 1, "share of those")
    random: float = number(0.1, 0, 1, "share of those")

    def __post_init__(self) -> None:
        if self.masked + self.random > 1:
            raise TrainingError(f"random: {self.random} and masked {self.masked} are more than 1")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """A `file` (tokenizer.json), or a WordPiece vocabulary of at most `vocabulary` pieces that
    occur `min_count` times, learned from the first `captions` captions.
    """

    file: str = ""
    vocabulary: int = number(30_522, 64, 10**6, "pieces")
    min_count: int = number(2, 1, 10**6, "times")
    captions: int = number(1_000_000, 1, unit="captions")
    lowercase: bool = True
