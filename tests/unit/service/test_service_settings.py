"""Settings: from code, environment and file, strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from hivlp.service.settings import Settings, SettingsError, Threads, load_settings


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HIVLP_HOME", raising=False)


def test_defaults_are_safe() -> None:
    settings = load_settings()
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert settings.home == Path(".hivlp")
    assert settings.workers >= 1


def test_the_environment_reaches_nested_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIVLP_HOME", "/srv/hivlp")
    monkeypatch.setenv("HIVLP_LIMITS__MAX_K", "7")
    monkeypatch.setenv("HIVLP_INDEXES", '["a", "b"]')
    monkeypatch.setenv("HIVLP_REQUIRE", "chromium")
    settings = load_settings()
    assert settings.home == Path("/srv/hivlp")
    assert settings.limits.max_k == 7
    assert settings.indexes == ("a", "b")


def test_what_is_given_wins_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "hivlp.toml"
    file.write_text('port = 1\nhost = "0.0.0.0"\n[limits]\nmax_k = 3\n')
    monkeypatch.setenv("HIVLP_SETTINGS_FILE", str(file))
    monkeypatch.setenv("HIVLP_PORT", "2")
    settings = load_settings()
    assert (settings.host, settings.port, settings.limits.max_k) == ("0.0.0.0", 2, 3)
    assert load_settings(port=4).port == 4


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("HIVLP_PROT", "1", "HIVLP_PROT: no such setting; did you mean HIVLP_PORT?"),
        ("HIVLP_LIMITS__MAX_KK", "1", "did you mean HIVLP_LIMITS__MAX_K"),
        ("HIVLP_PORT", "many", "setting port"),
        ("HIVLP_PORT", "70000", "setting port"),
        ("HIVLP_LIMITS__MAX_K", "0", "setting limits.max_k"),
        ("HIVLP_LIMITS__MAX_BATCH", "100", "max_batch may be at most"),
        ("HIVLP_LIMITS__MAX_ITEM_TEXTS", "65", "setting limits.max_item_texts"),
        ("HIVLP_LIMITS__MAX_CHANGE_BYTES", "2048", "must be at least max_body_bytes"),
        ("HIVLP_LIMITS__BODY_TIMEOUT_S", "0", "setting limits.body_timeout_s"),
        ("HIVLP_CHANGES__WAIT_S", "0", "setting changes.wait_s"),
        ("HIVLP_HUNG_S", "4.9", "hung_s must be 0 (never) or at least 5 seconds"),
        ("HIVLP_HUNG_S", "-1", "setting hung_s"),
        ("HIVLP_CHANGES__KEEP_VERSIONS", "-1", "setting changes.keep_versions"),
        ("HIVLP_SETTINGS_FILE", "/nowhere.toml", "no file at /nowhere.toml"),
    ],
)
def test_a_wrong_setting_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_key_in_the_file_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "hivlp.toml"
    file.write_text("[limits]\nmax_kk = 3\n")
    monkeypatch.setenv("HIVLP_SETTINGS_FILE", str(file))
    with pytest.raises(SettingsError, match=r"limits\.max_kk"):
        load_settings()


def test_settings_do_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]


@pytest.mark.parametrize("seconds", [0, 5])
def test_a_hung_process_is_never_killed_or_after_seconds_enough(seconds: float) -> None:
    assert load_settings(hung_s=seconds).hung_s == seconds


@pytest.mark.parametrize(
    ("processes", "workers", "shared"),
    [(1, None, 2), (1, 1, 1), (1, 8, 2), (2, None, 2), (4, None, 2), (4, 3, 2)],
)
def test_workers_share_no_more_cores_than_there_are(
    monkeypatch: pytest.MonkeyPatch, processes: int, workers: int | None, shared: int
) -> None:
    monkeypatch.setattr("hivlp.service.settings.available_threads", lambda: 2)
    settings = Settings(processes=processes, threads=Threads(workers=workers))
    assert settings.shared_cores == shared
