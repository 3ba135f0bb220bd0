"""A checkpoint's tokenizer, from whichever files it has, doing what it was trained with.

Notable: serving reads one file, tokenizer.json, and nothing else. Where a folder has only a
vocabulary, or its tokenizer.json leaves out what the tokenizer's class does besides (SigLIP's
lower-casing and removal of punctuation), that file is not what it must be: `hivlp import` writes
the right one, and loading such a folder as it is says so instead of searching with wrong ids.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from hivlp.models.network.fields import Fields
from hivlp.models.network.tower import TowerError

TOKENIZER = "tokenizer.json"
CONFIG, SENTENCE_CONFIG = "tokenizer_config.json", "sentence_bert_config.json"
SPECIAL = "special_tokens_map.json"
# Split as in OpenAI's CLIP: contractions, runs of letters, single digits, runs of anything else.
_CLIP_PARTS = (
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}]+"
)
_PROBE = "  A Cat, (it's)\tRED!\u00c9 "


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How a tokenizer is made of a vocabulary: the files it needs, and what makes it.

    `lowered`: classes whose tokenizer.json keeps upper case, though the family was trained without,
    and which are therefore lower-cased unless `do_lower_case` is false.
    """

    files: tuple[str, ...]
    make: Callable[[Path, Fields], Tokenizer]
    lowered: tuple[str, ...] = ()


def read_tokenizer(folder: Path, vocabulary: Vocabulary) -> Tokenizer:
    """The checkpoint's tokenizer, made of its vocabulary where there is no tokenizer.json.

    Raises TowerError naming the file.
    """
    told = Fields.read_if_there(folder / CONFIG)
    path = folder / TOKENIZER
    if path.is_file():
        made = _parse(path)
    elif all((folder / name).is_file() for name in vocabulary.files):
        try:
            made = vocabulary.make(folder, told)
        except TowerError:
            raise
        except Exception as error:  # the library raises bare Exceptions
            raise TowerError(folder / vocabulary.files[0], f"no vocabulary: {error}") from error
    else:
        raise TowerError(path, f"no such file, nor {' and '.join(vocabulary.files)}")
    before = _trained_with(folder, told, vocabulary.lowered)
    if before is not None and not _does_already(made, before):
        own = [] if made.normalizer is None else [made.normalizer]
        made.normalizer = normalizers.Sequence([before, *own])
    return made


def check_tokenizer(folder: Path, vocabulary: Vocabulary, known: int) -> Tokenizer:
    """The tokenizer of a folder whose tokenizer.json can be served as it is, with `known` ids.

    Raises TowerError where it can't.
    """
    wanted, path = read_tokenizer(folder, vocabulary), folder / TOKENIZER
    highest = max(wanted.get_vocab(with_added_tokens=True).values(), default=-1)
    if highest >= known:
        raise TowerError(
            path, f"knows id {highest}, but the tower's vocabulary ends at {known - 1}"
        )
    if not path.is_file():
        raise TowerError(path, f"no such file: hivlp import {folder} makes it of the vocabulary")
    if _parse(path).to_str() != wanted.to_str():
        raise TowerError(
            path,
            "leaves out the lower-casing that the checkpoint was trained with: "
            f"hivlp import {folder} writes one that does it",
        )
    return wanted


def pad_id(folder: Path, tokenizer: Tokenizer, default: int) -> int:
    """The id of the padding token that the folder names, `default` where it names none."""
    for name in (CONFIG, SPECIAL):
        if (folder / name).is_file():
            fields = Fields.read(folder / name)
            found = token(fields, "pad_token", "")
            number = tokenizer.token_to_id(found) if found else None
            if found and number is None:
                raise fields.error("pad_token", f"is {found!r}, which the tokenizer doesn't know")
            if number is not None:
                return int(number)
    return default


def token(fields: Fields, name: str, default: str) -> str:
    """A special token, which is written as a string or as an object with its content."""
    if isinstance(fields.values.get(name), dict):
        return fields.part(name).text("content", default or None)
    return fields.text(name, default)


def _parse(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise TowerError(path, f"not a tokenizer: {error}") from error


def _trained_with(
    folder: Path, told: Fields, lowered: tuple[str, ...]
) -> normalizers.Normalizer | None:
    """What a tokenizer's class does before its tokenizer.json; None for nothing."""
    kind = told.text("tokenizer_class", "").removesuffix("Fast")
    if kind == "SiglipTokenizer":
        lower = [normalizers.Lowercase()] if told.flag("do_lower_case", True) else []
        signs = "[" + "".join(f"\\{sign}" for sign in string.punctuation) + "]"
        gone = [normalizers.Replace(Regex(signs), ""), normalizers.Replace(Regex(r"\s+"), " ")]
        return normalizers.Sequence([*lower, *gone, normalizers.Strip()])
    sentences = Fields.read_if_there(folder / SENTENCE_CONFIG)
    lowers = told.flag("do_lower_case", kind in lowered) or sentences.flag("do_lower_case", False)
    return normalizers.Lowercase() if lowers else None


def _does_already(made: Tokenizer, before: normalizers.Normalizer) -> bool:
    """Whether a normaliser before the tokenizer's own would change nothing."""
    own = made.normalizer
    if own is None:
        return before.normalize_str(_PROBE) == _PROBE
    return bool(own.normalize_str(before.normalize_str(_PROBE)) == own.normalize_str(_PROBE))


def _with_ends(made: Tokenizer, first: str, last: str, others: tuple[str, ...]) -> Tokenizer:
    """Put `first` and `last` around every text, and mark all of them as special."""
    known = [name for name in (first, last, *others) if made.token_to_id(name) is not None]
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in known])
    ends: Mapping[str, int | None] = {name: made.token_to_id(name) for name in (first, last)}
    if missing := [name for name, number in ends.items() if number is None]:
        raise ValueError(f"the special token {missing[0]!r} is not in it")
    made.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(name, ends[name]) for name in (first, last)]
    )
    return made


def _word_pieces(folder: Path, told: Fields) -> Tokenizer:
    """BERT's: WordPiece, lower-cased unless the folder says otherwise."""
    unknown = token(told, "unk_token", "[UNK]")
    model = models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token=unknown)
    made = Tokenizer(model)
    made.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=told.flag("tokenize_chinese_chars", True),
        strip_accents=told.flag("strip_accents", False) if "strip_accents" in told else None,
        lowercase=told.flag("do_lower_case", True),
    )
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    first, last = token(told, "cls_token", "[CLS]"), token(told, "sep_token", "[SEP]")
    return _with_ends(made, first, last, (unknown, token(told, "pad_token", "[PAD]"), "[MASK]"))


def _byte_pairs(folder: Path, told: Fields) -> Tokenizer:
    """RoBERTa's: byte-level BPE, upper case kept."""
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    made = Tokenizer(model)
    spaced = told.flag("add_prefix_space", False)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    made.decoder = decoders.ByteLevel()
    first, last = token(told, "cls_token", "<s>"), token(told, "sep_token", "</s>")
    unknown, padding = token(told, "unk_token", "<unk>"), token(told, "pad_token", "<pad>")
    return _with_ends(made, first, last, (unknown, padding, "<mask>"))


def _clip_pairs(folder: Path, told: Fields) -> Tokenizer:
    """CLIP's: BPE over bytes, lower-cased, the end of a word marked."""
    unknown = token(told, "unk_token", "<|endoftext|>")
    model = models.BPE.from_file(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        unk_token=unknown,
        continuing_subword_prefix="",
        end_of_word_suffix="</w>",
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    split = pre_tokenizers.Split(Regex(_CLIP_PARTS), behavior="removed", invert=True)
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([split, whole])
    made.decoder = decoders.ByteLevel()
    first = token(told, "bos_token", "<|startoftext|>")
    return _with_ends(made, first, token(told, "eos_token", "<|endoftext|>"), (unknown,))


WORD_PIECES = Vocabulary(("vocab.txt",), _word_pieces)
BYTE_PAIRS = Vocabulary(("vocab.json", "merges.txt"), _byte_pairs)
CLIP_PAIRS = Vocabulary(("vocab.json", "merges.txt"), _clip_pairs)


def _no_pieces(folder: Path, told: Fields) -> Tokenizer:  # noqa: ARG001 - one signature for all
    raise TowerError(
        folder / TOKENIZER,
        "no such file, and sentencepiece's spiece.model alone isn't read: save the tokenizer of "
        "this checkpoint as tokenizer.json first",
    )


# SigLIP 2 was trained on lower-cased texts, though its checkpoints name Gemma's tokenizer, which
# keeps upper case (transformers' pull request 43101, big_vision's issue 187).
PIECES = Vocabulary(("spiece.model",), _no_pieces, ("GemmaTokenizer", "Siglip2Tokenizer"))


def vocabulary_of(kind: str) -> Vocabulary:
    """The vocabulary of a family of text towers, by the family's name."""
    return {"bert": WORD_PIECES, "roberta": BYTE_PAIRS, "siglip": PIECES}.get(kind, CLIP_PAIRS)
