"""Settings of the Redis tier: checked before anything is asked, and silent about the password."""

from __future__ import annotations

import sys

import pytest
from pydantic import SecretStr, ValidationError

from hivlp.models.errors import MissingExtra
from hivlp.service.app import create_app
from hivlp.service.settings import CacheSettings, Settings, SettingsError, load_settings
from tests.unit.service.fakes_service import World
from tests.unit.service.serving_app import serving

VARIABLE = "HIVLP_CACHE__REDIS_URL"
SECRET = "s3cr3t"


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost",
        f"redis://:{SECRET}@10.0.0.7:6380/3",
        f"rediss://user:{SECRET}@cache.internal:6379?ssl_ca_certs=/etc/ca.pem&db=1",
        "redis://[::1]:6379/0",
        "unix:///run/redis.sock?db=2",
    ],
)
def test_urls_of_a_redis_are_taken_and_not_shown(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv(VARIABLE, url)
    settings = load_settings()
    assert settings.cache.redis_url is not None
    assert settings.cache.redis_url.get_secret_value() == url
    assert SECRET not in f"{settings!r} {settings} {settings.model_dump()} {settings.cache!r}"
    assert SECRET not in settings.model_dump_json()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "must be redis://HOST"),
        ("localhost:6379", "must be redis://HOST"),
        (f"http://:{SECRET}@localhost", "must be redis://HOST"),
        (f"redis://:{SECRET}@", "must be redis://HOST"),
        ("unix://", "must be redis://HOST"),
        (f"redis://:{SECRET}/x@localhost", "host or port can't be read"),
        (f"redis://:{SECRET}@localhost:99999", "host or port can't be read"),
        (f"redis://:{SECRET}@[::1", "host or port can't be read"),
        (f"redis://:{SECRET}@localhost/first", "database must be a number"),
        (f"redis://:{SECRET}@localhost?db=-1", "database must be a number"),
        (f"redis://:{SECRET}@localhost?socket_timeout=60", "takes no option 'socket_timeout'"),
        (f"redis://:{SECRET}@localhost?decode_responses=1", "takes no option"),
    ],
)
def test_another_url_is_refused_without_repeating_it(
    monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    monkeypatch.setenv(VARIABLE, url)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert said in str(caught.value)
    assert str(caught.value).startswith("setting cache.redis_url: ")
    assert SECRET not in str(caught.value)
    assert SECRET not in str(caught.value.__cause__)
    with pytest.raises(ValidationError) as direct:
        CacheSettings(redis_url=SecretStr(url))
    assert SECRET not in str(direct.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("REDIS_TIMEOUT_MS", "0", "greater than 0"),
        ("REDIS_TIMEOUT_MS", "1001", "less than or equal to 1000"),
        ("REDIS_CONNECT_TIMEOUT_MS", "60001", "less than or equal to 60000"),
        ("REDIS_CONNECTIONS", "0", "greater than or equal to 1"),
        ("REDIS_MAX_VALUE_BYTES", "10", "greater than or equal to 1024"),
        ("REDIS_PREFIX", "a b", "String should match"),
        ("BREAKER_FAILURES", "0", "greater than or equal to 1"),
        ("BREAKER_WINDOW_S", "0", "greater than 0"),
        ("BREAKER_RETRY_S", "0", "greater than or equal to 0.01"),
        ("TTL_S", "1e9", "less than or equal to"),
        ("REDIS_TIMEOUT", "20", "did you mean HIVLP_CACHE__REDIS_TIMEOUT_MS"),
    ],
)
def test_a_limit_that_is_crossed_is_named_with_its_field(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv(f"HIVLP_CACHE__{name}", value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert said in str(caught.value)
    assert name.lower() in str(caught.value).lower()


@pytest.fixture
def no_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the extra weren't installed."""
    monkeypatch.delitem(sys.modules, "hivlp.service.cache.redis", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)


@pytest.mark.usefixtures("no_redis")
def test_without_the_extra_answers_are_kept_in_this_process(world: World) -> None:
    with serving(create_app(Settings(), load=world.load)) as client:
        answers = [client.post("/search/text", json={"query": "red"}).json() for _ in range(2)]
    assert [answer["cached"] for answer in answers] == [False, True]


@pytest.mark.usefixtures("no_redis")
def test_asking_for_a_redis_without_the_extra_names_the_extra() -> None:
    settings = Settings(cache=CacheSettings(redis_url=SecretStr("redis://localhost")))
    with pytest.raises(MissingExtra, match=r"pip install 'hivlp\[redis\]'"):
        create_app(settings)
