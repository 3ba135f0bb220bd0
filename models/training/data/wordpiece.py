"""A WordPiece vocabulary learned from the captions themselves, the same from the same captions.

Notable: the library's trainer numbers the letters within words (`##a`) in an order that changes
from call to call, and breaks ties by these numbers. Given them beforehand, in order, it has nothing
left to choose; since it then takes them for special tokens, the tokenizer is built anew from the
vocabulary alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from hivlp.models.errors import TrainingError
from hivlp.models.training.data.settings import TokenizerSettings

PAD, UNKNOWN, START, END, MASK = "[PAD]", "[UNK]", "[TXT]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, START, END, MASK)
LONGEST_WORD = 100
INSIDE = "##"


def learn_wordpiece(captions: Iterable[str], settings: TokenizerSettings, path: Path) -> None:
    """Learn pieces from captions and write a tokenizer.json: `[TXT]` in front, `[SEP]` behind.

    [TXT] is the position that HiVLP's text tower is read at. Holds the captions that it learns from
    in memory. Raises TrainingError where not one piece is found.
    """
    read = list(islice(captions, settings.captions))
    learning = _tokenizer({}, settings)
    letters = _letters(learning, read)
    if not letters:
        raise TrainingError("the captions hold nothing that a vocabulary could be learned from")
    trainer = trainers.WordPieceTrainer(
        vocab_size=settings.vocabulary,
        min_frequency=settings.min_count,
        special_tokens=[*SPECIAL, *letters],
        show_progress=False,
    )
    learning.train_from_iterator(read, trainer)
    tokenizer = _tokenizer(learning.get_vocab(), settings)
    tokenizer.add_special_tokens(list(SPECIAL))
    ends = [(token, tokenizer.token_to_id(token)) for token in (START, END)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=ends
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    tokenizer.save(str(part))
    part.replace(path)


def _tokenizer(vocabulary: dict[str, int], settings: TokenizerSettings) -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordPiece(vocab=vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD)
    )
    folding = [normalizers.Lowercase()] if settings.lowercase else []
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), *folding])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _letters(tokenizer: Tokenizer, captions: Sequence[str]) -> list[str]:
    """Every letter that may stand within a word, sorted, as the piece it is there."""
    normalise, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    found = {letter for caption in captions for letter in normalise(caption)}
    inner = [letter for letter in found if len(split(f"a{letter}")) == 1 and not letter.isspace()]
    return sorted(f"{INSIDE}{letter}" for letter in inner)
