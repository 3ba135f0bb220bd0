"""Texts: what is refused, what is canonical, and token ids that don't depend on company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hivlp.models.artifact import TextPreparation
from hivlp.models.errors import ArtifactError, TextError
from hivlp.models.runtime.texts import MAX_TEXT_CHARS, Tokenizer, clean_text
from tests.tiny_artifact import MAX_TOKENS, make_tiny_artifact

SPEC = TextPreparation(tokenizer_file="text/tokenizer.json", max_tokens=MAX_TOKENS, pad_id=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_artifact(tmp_path_factory.mktemp("artifact"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder, SPEC)


def refused(text: str, code: str, max_chars: int = 100) -> TextError:
    with pytest.raises(TextError) as caught:
        clean_text(text, max_chars=max_chars, param="q")
    assert caught.value.code == code
    assert caught.value.param == "q"
    return caught.value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\t\r\n",
        "\u00a0\u3000",
        "\u200b",
        "\ufeff",
        "\u00ad\u2060 \u200d",
        "\u3164",
        "\u2800\u2800",
        "\ufe0f",
        "\U000e0041\U000e007f",
        "\u115f\u1160",
        "\u202e",
        "\x85",
    ],
)
def test_text_of_nothing_visible_is_empty(text: str) -> None:
    refused(text, "empty_text")


@pytest.mark.parametrize("text", ["a\x00b", "\x01", "a\x0bb", "a\x0c", "\x1b[31m", "\x1f", "\x7f"])
def test_control_characters_are_invalid(text: str) -> None:
    assert "U+00" in refused(text, "invalid_text").message


@pytest.mark.parametrize("code", [0xD83D, 0xDE00, 0xDFFF])
def test_half_surrogate_pairs_are_invalid(code: int) -> None:
    text = f"a{chr(code)}b"
    error = refused(text, "invalid_text")
    error.message.encode()  # the message itself can be sent


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  a \t red\r\n\n picture ", "a red picture"),
        ("a\u00a0b\u3000c\u2028d", "a b c d"),
        ("cafe\u0301", "caf\u00e9"),
        ("\u212b", "\u00c5"),
        (
            "\U0001f468\u200d\U0001f469\u200d\U0001f467",
            "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        ),
        ("\u2764\ufe0f", "\u2764\ufe0f"),
        ("\u65e5\u672c \u062e\u0637", "\u65e5\u672c \u062e\u0637"),
        ("-", "-"),
    ],
)
def test_canonical_form(text: str, expected: str) -> None:
    assert clean_text(text, max_chars=100) == expected


def test_character_limit_is_exact_and_named() -> None:
    assert clean_text("x" * 100, max_chars=100) == "x" * 100
    error = refused("x" * 101, "text_too_long")
    assert error.limit == 100
    assert "101" in error.message
    refused(" " * 101, "text_too_long")


@given(st.text())
def test_cleaning_is_idempotent_or_refuses(text: str) -> None:
    try:
        once = clean_text(text, max_chars=10_000)
    except TextError:
        return
    assert clean_text(once, max_chars=30_000) == once


def test_batch_pads_to_its_longest_and_masks(tokenizer: Tokenizer) -> None:
    batch = tokenizer.encode(["red", "a red picture of something", "blue square"])
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    assert ids.dtype == mask.dtype == np.int64
    assert ids.shape == mask.shape == (3, 7)
    assert mask.sum(axis=1).tolist() == [3, 7, 4]
    assert not ids[mask == 0].any()
    assert batch.truncated == (False, False, False)


def test_row_of_a_batch_equals_the_text_alone(tokenizer: Tokenizer) -> None:
    texts = ["red", "a red picture of something " * 9, "zebra", "blue  square"]
    batch = tokenizer.encode(texts)
    for row, text in enumerate(texts):
        single = tokenizer.encode([text])
        length = single.inputs["input_ids"].shape[1]
        assert np.array_equal(
            batch.inputs["input_ids"][row, :length], single.inputs["input_ids"][0]
        )
        assert batch.inputs["attention_mask"][row].sum() == length
        assert single.truncated == (batch.truncated[row],)


def test_truncation_keeps_the_end_token_and_is_told(tokenizer: Tokenizer) -> None:
    end = int(tokenizer.encode(["red"]).inputs["input_ids"][0, -1])
    batch = tokenizer.encode(["red " * (MAX_TOKENS - 2), "red " * (MAX_TOKENS - 1)])
    assert batch.truncated == (False, True)
    assert batch.inputs["input_ids"].shape == (2, MAX_TOKENS)
    assert batch.inputs["input_ids"][:, -1].tolist() == [end, end]


def test_pad_to_max_gives_one_length(folder: Path) -> None:
    fixed = Tokenizer(folder, SPEC.model_copy(update={"pad_to_max": True, "pad_id": 5}))
    batch = fixed.encode(["red"])
    assert batch.inputs["input_ids"].shape == (1, MAX_TOKENS)
    assert (batch.inputs["input_ids"][0, 3:] == 5).all()
    assert batch.inputs["attention_mask"].sum() == 3


def test_special_tokens_typed_by_a_user_are_text(tokenizer: Tokenizer) -> None:
    end = int(tokenizer.encode(["red"]).inputs["input_ids"][0, -1])
    ids = tokenizer.encode(["red [SEP] blue"]).inputs["input_ids"][0]
    assert np.count_nonzero(ids == end) == 1


def test_padding_saved_in_the_file_is_not_followed(folder: Path, tmp_path: Path) -> None:
    import tokenizers

    saved = tokenizers.Tokenizer.from_file(str(folder / SPEC.tokenizer_file))
    saved.enable_padding(length=30, pad_id=9)
    saved.enable_truncation(4)
    saved.save(str(tmp_path / "tokenizer.json"))
    spec = SPEC.model_copy(update={"tokenizer_file": "tokenizer.json"})
    batch = Tokenizer(tmp_path, spec).encode(["a red picture"])
    assert batch.inputs["input_ids"].shape == (1, 5)


def test_one_bad_text_is_named(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextError) as caught:
        tokenizer.encode(["a", " "], param="captions")
    assert (caught.value.code, caught.value.param) == ("empty_text", "captions[1]")
    with pytest.raises(TextError) as caught:
        tokenizer.encode(["a" * (MAX_TEXT_CHARS + 1)])
    assert caught.value.limit == MAX_TEXT_CHARS


def test_text_that_the_tokenizer_strips_is_empty(folder: Path, tmp_path: Path) -> None:
    import tokenizers

    strict = tokenizers.Tokenizer.from_file(str(folder / SPEC.tokenizer_file))
    strict.normalizer = tokenizers.normalizers.Replace("x", "")
    strict.save(str(tmp_path / "tokenizer.json"))
    spec = SPEC.model_copy(update={"tokenizer_file": "tokenizer.json"})
    with pytest.raises(TextError) as caught:
        Tokenizer(tmp_path, spec).encode(["xxx"])
    assert caught.value.code == "empty_text"


def test_no_texts_give_no_rows(tokenizer: Tokenizer) -> None:
    batch = tokenizer.encode([])
    assert batch.size == 0
    assert batch.inputs["input_ids"].shape[0] == 0


@pytest.mark.parametrize("content", [None, b"", b"{}", b"not json", b"\xff\xfe"])
def test_unreadable_tokenizer_is_named(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "broken.json").write_bytes(content)
    spec = SPEC.model_copy(update={"tokenizer_file": "broken.json"})
    with pytest.raises(ArtifactError, match=r"broken\.json"):
        Tokenizer(tmp_path, spec)


def test_threads_get_what_one_caller_gets(tokenizer: Tokenizer) -> None:
    texts = ["red " * count for count in range(1, 25)]
    alone = [tokenizer.encode([text]) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda text: tokenizer.encode([text]), texts * 5))
    for i, batch in enumerate(together):
        expected = alone[i % len(texts)]
        assert batch.truncated == expected.truncated
        assert np.array_equal(batch.inputs["input_ids"], expected.inputs["input_ids"])
