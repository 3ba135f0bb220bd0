"""Keys: where they come from, what they look like, and that they are shown nowhere."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError

from hivlp.service.keys import KeyFileError, Keyring, KeySettings, Role
from hivlp.service.settings import Settings, SettingsError, load_settings

ONE, TWO, ADMIN = "first-key-0123456789", "second.key_0123456789==", "admin~key+0123/456789"


def test_each_key_has_its_role_and_no_other_text_has_one() -> None:
    keys = Keyring([ONE, TWO], [ADMIN])
    assert keys.role(ONE.encode()) is keys.role(TWO.encode()) is Role.USER
    assert keys.role(ADMIN.encode()) is Role.ADMIN
    for wrong in (b"", ONE[:-1].encode(), ONE.encode() + b"x", ONE.upper().encode(), b"\xff\xfe"):
        assert keys.role(wrong) is Role.NOBODY


def test_a_key_that_is_both_is_the_admins() -> None:
    assert Keyring([ONE], [ONE]).role(ONE.encode()) is Role.ADMIN


@pytest.mark.parametrize("sent", [ONE, TWO, ADMIN, "nobody's", ""])
def test_every_key_is_compared_whichever_is_right(
    monkeypatch: pytest.MonkeyPatch, sent: str
) -> None:
    keys, compared = Keyring([ONE, TWO], [ADMIN]), list[int]()
    whole = hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        compared.append(len(one))
        assert len(one) == len(other)
        return whole(one, other)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    keys.role(sent.encode())
    assert compared == [32, 32, 32]


def test_the_environment_holds_one_key_or_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVLP_KEYS__API", ONE)
    assert [key.get_secret_value() for key in load_settings().keys.api] == [ONE]
    monkeypatch.setenv("HIVLP_KEYS__API", f'["{ONE}", "{TWO}"]')
    monkeypatch.setenv("HIVLP_KEYS__ADMIN", ADMIN)
    keys = Keyring.of(load_settings().keys)
    assert (keys.closed, keys.has_admin) == (True, True)
    assert keys.role(TWO.encode()) is Role.USER


@pytest.mark.parametrize("given", ["[]", " [ ] ", ""])
def test_an_empty_list_of_keys_is_an_error_and_not_an_open_door(
    given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIVLP_KEYS__API", given)
    with pytest.raises(SettingsError, match="key"):
        load_settings()


def test_files_hold_keys_with_remarks_between(tmp_path: Path) -> None:
    api, admin = tmp_path / "api", tmp_path / "admin"
    api.write_text(f"# of the shop\n{ONE}\r\n\n  {TWO}  \n")
    admin.write_text(ADMIN)
    extra = SecretStr("third-key-0123456789")
    keys = Keyring.of(KeySettings(api=(extra,), api_file=api, admin_file=admin))
    for key in (ONE, TWO, extra.get_secret_value()):
        assert keys.role(key.encode()) is Role.USER
    assert keys.role(ADMIN.encode()) is Role.ADMIN
    assert keys.role(b"# of the shop") is Role.NOBODY


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no key"),
        (b"# only a remark\n", "holds no key"),
        (b"\n\nsecret word\n", "line 3: a key must be 16 to 512"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (None, "No such file"),
    ],
)
def test_a_file_without_keys_is_an_error_and_not_an_open_door(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(KeyFileError, match=f"keys.api_file.*{said}") as caught:
        Keyring.of(KeySettings(api_file=file))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HIVLP_KEYS__API", "hush-hush", "setting keys"),
        ("HIVLP_KEYS__API", "hush hush hush hush hush", "setting keys"),
        ("HIVLP_KEYS__API", '["hush-hush-hush-hush"', "a key, or a JSON list of keys"),
        ("HIVLP_KEYS__API", '[["hush-hush-hush-hush"]]', "setting keys.api.0"),
        ("HIVLP_KEYS__ADMIN", "hüsh-hush-hush-hush", "admin: a key must be"),
        ("HIVLP_KEYS__ADMIN", "hush" * 200, "16 to 512 characters"),
        ("HIVLP_KEYS", '{"api": "hush-hush-hush-hush"', "keys"),
        ("HIVLP_KEYS__APIS", "hush-hush-hush-hush", "did you mean HIVLP_KEYS__API"),
    ],
)
def test_a_bad_key_is_named_by_its_setting_and_never_quoted(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    shown = f"{caught.value} {caught.value.__cause__!r} {caught.value.__cause__}"
    assert said in str(caught.value)
    assert "hush" not in shown
    assert "hüsh" not in shown


def test_settings_with_keys_show_none_of_them() -> None:
    settings = Settings(keys=KeySettings(api=(SecretStr(ONE),), admin=SecretStr(ADMIN)))
    shown = f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
    assert ONE not in shown
    assert ADMIN not in shown
    assert ONE not in repr(vars(Keyring.of(settings.keys)))


def test_keys_are_strict_about_what_they_take() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        KeySettings(user="x")  # type: ignore[call-arg]
