"""HiVLP's text tower, trained from nothing: tokens, learned positions, 6 or 12 layers.

Notable: [TXT] is no weight of its own but the token that the tokenizer puts at position 0 ([CLS],
<s>, or one that is called [TXT]), so the tokenizer's file says everything about the text side, and
its exports are tokenised by the service as every other tower's. A tokenizer that puts nothing fixed
there is refused. Padding is masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor, nn

from hivlp.models.artifact import TextPreparation
from hivlp.models.fields import number
from hivlp.models.network.blocks import key_mask
from hivlp.models.network.stack import (
    MOST_LAYERS,
    StackShape,
    StackTower,
    at_least,
    learned_positions,
)
from hivlp.models.network.tower import Tensors, TowerError
from hivlp.models.network.weights import initialise

LEAST_TOKENS, MOST_TOKENS = 3, 8192
"""Room for one token at least between what the tokenizer's template puts around a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextShape(StackShape):
    """A stack that reads at most `max_tokens` tokens, those of the tokenizer's template included.

    `pad_token`: what the tokenizer calls its padding.
    """

    depth: int = number(6, 1, MOST_LAYERS, "layers")
    max_tokens: int = number(60, LEAST_TOKENS, MOST_TOKENS, "tokens")
    pad_token: str = "[PAD]"

    def __post_init__(self) -> None:
        StackShape.__post_init__(self)  # a slotted dataclass has no super() without arguments
        at_least("max_tokens", self.max_tokens, LEAST_TOKENS)


@dataclass(frozen=True, slots=True)
class TokenizerFile:
    """A tokenizer.json, and what a tower must know of it: `size` ids from 0, and the padding's."""

    path: Path
    size: int
    pad_id: int

    @staticmethod
    def read(path: Path, pad_token: str) -> TokenizerFile:
        """Read a tokenizer file. Raises TowerError where a text tower can't be built on it."""
        if not path.is_file():
            raise TowerError(path, "no such file")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise TowerError(path, f"not a tokenizer: {error}") from error
        pad_id = tokenizer.token_to_id(pad_token)
        if pad_id is None:
            raise TowerError(path, f"has no token {pad_token!r}, named by pad_token")
        _check_first(tokenizer, path)
        ids = tokenizer.get_vocab(with_added_tokens=True).values()
        return TokenizerFile(path, max(ids) + 1, pad_id)


def _check_first(tokenizer: Tokenizer, path: Path) -> None:
    """Raise TowerError unless every text starts with one and the same special token."""
    tokenizer.no_padding()
    empty, one = tokenizer.encode(""), tokenizer.encode("a")
    if not (empty.ids and one.special_tokens_mask[0] and empty.ids[0] == one.ids[0]):
        raise TowerError(
            path, "puts no special token at position 0, where the whole text is read ([TXT])"
        )


class TextTower(StackTower):
    """`input_ids` and `attention_mask` (n, t) int64 to states (n, t, width)."""

    modality = "text"
    family = "hivlp-text"
    input_names = ("input_ids", "attention_mask")
    carried_inputs = ("attention_mask",)

    def __init__(self, shape: TextShape, tokenizer: TokenizerFile) -> None:
        super().__init__(shape)
        self.sizes, self.tokenizer = shape, tokenizer
        self.words = nn.Embedding(tokenizer.size, shape.width)
        self.positions = learned_positions(shape.max_tokens, shape.width)
        initialise(self, shape.width)

    @property
    def vocabulary(self) -> int:
        """The number of token ids."""
        return self.tokenizer.size

    @property
    def preparation(self) -> TextPreparation:
        """Its tokenizer, token limit and padding id."""
        return TextPreparation(
            tokenizer_file=self.tokenizer.path.name,
            max_tokens=self.sizes.max_tokens,
            pad_id=self.tokenizer.pad_id,
        )

    @property
    def sources(self) -> tuple[Path, ...]:
        """The tokenizer; the weights are in no file yet."""
        return (self.tokenizer.path,)

    def _embed(self, inputs: Tensors) -> Tensor:
        ids = inputs["input_ids"]  # (n, t)
        embedded: Tensor = self.words(ids) + self.positions[: ids.shape[1]]
        return embedded

    def _mask(self, inputs: Tensors) -> Tensor | None:
        return key_mask(inputs["attention_mask"])

    def _pooled(self, hidden: Tensor, inputs: Tensors) -> Tensor:  # noqa: ARG002
        """Every token, the first and the last of the template too."""
        return inputs["attention_mask"]
