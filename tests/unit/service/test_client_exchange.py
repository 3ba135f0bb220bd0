"""A call from its first try to its result: a clock that a test moves, and no socket."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import httpx
import orjson
import pytest

from hivlp.service.answers import ErrorAnswer, ErrorDetail
from hivlp.service.client import (
    BadAnswer,
    ClientError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    Refused,
    Retries,
    Search,
    ServerFailed,
    TimedOut,
    Timeouts,
    TooLate,
    Unavailable,
    Unreachable,
    endpoints,
)
from hivlp.service.client.exchange import (
    Call,
    Outcome,
    Prepare,
    Reply,
    Send,
    Terms,
    Wait,
    entry_error,
    exchange,
)
from hivlp.service.client.timing import retry_after_s

GOOD = Reply(200, {}, b'{"indexes": [], "request_id": "theirs"}')
LIST = endpoints.indexes()
LOST = httpx.ReadError("connection reset")


def refused(status: int, code: str, **headers: str) -> Reply:
    inner = {"code": code, "message": code, "param": "k", "request_id": "theirs"}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, httpx.Headers(named), orjson.dumps({"error": inner}))


HIT = {"id": "red", "rank": 1, "score": 0.5, "level": 3}
GOOD_SEARCH = Reply(
    200,
    {},
    orjson.dumps(
        {
            "hits": [HIT],
            "returned": 1,
            "took_ms": 1.0,
            "index": "default",
            "snapshot": "v",
            "model": "fake",
            "plan": "cascade",
            "exit_level": 3,
            "degraded": False,
            "partial": False,
            "truncated": False,
            "cached": False,
            "stages": [],
            "request_id": "theirs",
        }
    ),
)
BATCH = b'{"results": [], "took_ms": 1.0, "request_id": "theirs"}'


@dataclass
class Driver:
    """Plays the transport: says `outcomes` in turn, each after `takes_s`, and moves the clock."""

    outcomes: list[Outcome]
    takes_s: float = 0.0
    drawn: float = 0.5
    oversleeps_s: float = 0.0
    now_s: float = 1000.0
    waited: list[float] = field(default_factory=list)
    sent: list[Send] = field(default_factory=list)

    def run(self, call: Call[Any], timeouts: Any = None, retries: Any = None) -> Any:
        terms = Terms(
            timeouts or Timeouts(), retries or Retries(), lambda: self.now_s, lambda: self.drawn
        )
        steps = exchange(call, terms)
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                return done.value
            outcome = self._take(step)

    def _take(self, step: object) -> Outcome:
        match step:
            case Prepare():
                return step.fields()
            case Wait():
                self.waited.append(step.seconds)
                self.now_s += step.seconds + self.oversleeps_s
                return None
            case Send():
                self.sent.append(step)
                self.now_s += self.takes_s
                return self.outcomes.pop(0)
        raise AssertionError(step)

    def body(self, place: int) -> Any:
        return orjson.loads(self.sent[place].request["content"])


def failing(driver: Driver, call: Call[Any], **terms: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        driver.run(call, **terms)
    return caught.value


@pytest.mark.parametrize(
    "first",
    [
        refused(429, "overloaded"),
        refused(503, "not_ready"),
        Reply(502, {}, b"<html>bad gateway</html>"),
        LOST,
        httpx.ConnectError("refused"),
        httpx.ConnectTimeout("slow"),
        httpx.RemoteProtocolError("Server disconnected without sending a response."),
    ],
    ids=repr,
)
def test_what_passes_is_tried_again(first: Outcome) -> None:
    driver = Driver([first, GOOD])
    assert driver.run(LIST).indexes == []
    assert driver.waited == [0.05]
    first_id, second_id = (one.request["headers"]["X-Request-ID"] for one in driver.sent)
    assert first_id == second_id


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (refused(400, "malformed_body"), InvalidRequest),
        (refused(401, "no_key"), NotAllowed),
        (refused(403, "read_only"), NotAllowed),
        (refused(404, "no_such_item"), NotFound),
        (refused(405, "method_not_allowed"), InvalidRequest),
        (refused(408, "body_timeout", Retry_After="1"), InvalidRequest),
        (refused(413, "body_too_large"), InvalidRequest),
        (refused(415, "unsupported_image"), InvalidRequest),
        (refused(418, "teapot"), Refused),
        (refused(422, "out_of_range", Retry_After="1"), InvalidRequest),
        (refused(500, "internal_error", Retry_After="1"), ServerFailed),
        (refused(504, "deadline"), TooLate),
        (refused(507, "storage"), ServerFailed),
    ],
    ids=lambda value: str(getattr(value, "status", "")),
)
def test_what_would_be_refused_again_is_not_sent_again(said: Reply, kind: type[Refused]) -> None:
    driver = Driver([said])
    error = failing(driver, LIST)
    assert type(error) is kind
    assert (error.status, error.param, error.request_id) == (said.status, "k", "theirs")
    assert error.code == orjson.loads(said.content)["error"]["code"]
    assert (error.tries, driver.waited) == (1, [])


@pytest.mark.parametrize(
    "slow", [httpx.ReadTimeout("slow"), httpx.WriteTimeout("slow"), TimeoutError()], ids=repr
)
def test_a_slow_service_is_not_given_the_same_work_twice(slow: Outcome) -> None:
    driver = Driver([slow])
    error = failing(driver, LIST)
    assert type(error) is TimedOut
    assert error.code == "timed_out"
    assert error.request_id == driver.sent[0].request["headers"]["X-Request-ID"]


def test_retry_after_is_honoured_with_a_random_wait_on_top() -> None:
    busy = refused(429, "overloaded", Retry_After="2")
    driver = Driver([busy, busy, busy, GOOD], drawn=1.0)
    driver.run(LIST)
    assert driver.waited == pytest.approx([2.1, 2.2, 2.4])


def test_a_retry_after_beyond_the_time_there_is_fails_at_once() -> None:
    driver = Driver([refused(503, "not_ready", Retry_After="86400")])
    error = failing(driver, LIST)
    assert type(error) is Unavailable
    assert (error.retry_after_s, driver.waited) == (86400.0, [])


def test_waits_double_up_to_the_longest_and_tries_end() -> None:
    driver = Driver([LOST] * 6, drawn=1.0)
    error = failing(driver, LIST, retries=Retries(tries=6, first_s=1.0, longest_s=3.0))
    assert driver.waited == [1.0, 2.0, 3.0, 3.0, 3.0]
    assert type(error) is Unreachable
    assert error.tries == 6
    assert error.__cause__ is LOST


def test_one_try_means_none_again() -> None:
    driver = Driver([LOST])
    assert failing(driver, LIST, retries=Retries(tries=1)).tries == 1


def test_the_whole_time_covers_tries_and_waits() -> None:
    busy = refused(503, "not_ready", Retry_After="2")
    driver = Driver([busy] * 9, takes_s=3.0, drawn=0.0)
    error = failing(driver, LIST, timeouts=Timeouts(total_s=12.0), retries=Retries(tries=9))
    # Sent at 0, 5 and 10 s; at 13 s all is over.
    assert [one.left_s for one in driver.sent] == [12.0, 7.0, 2.0]
    assert error.tries == 3


def test_a_try_gets_no_more_time_than_is_left() -> None:
    timeouts = Timeouts(connect_s=5, read_s=30, total_s=60)
    assert timeouts.within(2.0) == httpx.Timeout(connect=2.0, read=2.0, write=2.0, pool=2.0)
    assert timeouts.within(40.0) == httpx.Timeout(connect=5.0, read=30.0, write=30.0, pool=40.0)


def test_no_try_begins_after_the_whole_time_when_sleep_took_longer() -> None:
    driver = Driver([LOST], oversleeps_s=60.0)
    assert failing(driver, LIST).tries == 1


def test_what_is_sent_again_says_how_much_of_its_deadline_is_left() -> None:
    driver = Driver([LOST, GOOD_SEARCH], takes_s=0.1, drawn=0.5)
    driver.run(endpoints.search_text("red", deadline_ms=500.0))
    assert driver.body(0)["deadline_ms"] == 500.0
    assert driver.body(1)["deadline_ms"] == pytest.approx(350.0)
    assert driver.body(1)["query"] == "red"


def test_nothing_is_sent_again_after_its_deadline() -> None:
    busy = refused(429, "overloaded", Retry_After="1")
    driver = Driver([busy])
    error = failing(driver, endpoints.search_text("red", deadline_ms=500.0))
    assert (type(error), error.tries, driver.waited) == (Overloaded, 1, [])


def test_a_deadline_does_not_cut_off_an_answer_that_is_on_its_way() -> None:
    driver = Driver([GOOD_SEARCH], takes_s=2.0)
    driver.run(endpoints.search_text("red", deadline_ms=500.0))
    assert driver.sent[0].left_s == 60.0


def test_a_batch_waits_for_its_most_patient_search() -> None:
    busy, good = refused(429, "overloaded", Retry_After="1"), Reply(200, {}, BATCH)
    hasty, patient, any_time = (
        Search.text("a", deadline_ms=100.0),
        Search.text("b", deadline_ms=3000.0),
        Search.text("c"),
    )
    driver = Driver([busy, good], drawn=0.0)
    driver.run(endpoints.search_batch([hasty, patient]))
    assert [one["deadline_ms"] for one in driver.body(1)["searches"]] == pytest.approx([1.0, 2000])
    driver = Driver([busy, good], drawn=0.0)
    driver.run(endpoints.search_batch([hasty, any_time]))
    assert "deadline_ms" not in driver.body(1)["searches"][1]
    driver = Driver([busy])
    failing(driver, endpoints.search_batch([hasty, hasty]))


@pytest.mark.parametrize("deadline", [math.nan, math.inf])
def test_numbers_that_json_has_no_word_for_are_never_sent(deadline: float) -> None:
    driver = Driver([])
    error = failing(driver, endpoints.search_text("red", deadline_ms=deadline))
    assert (type(error), error.status, error.param) == (InvalidRequest, None, "deadline_ms")
    assert (error.tries, driver.sent) == (0, [])


@pytest.mark.parametrize(
    "reply",
    [
        Reply(200, {}, b"<html>Sign in</html>"),
        Reply(200, {}, b'{"indexes": 5}'),
        Reply(200, {}, b""),
        Reply(302, {"Location": "https://elsewhere.example"}, b""),
        Reply(204, {}, b""),
    ],
    ids=lambda reply: f"{reply.status}",
)
def test_what_is_no_answer_of_this_service_is_said_to_be_none(reply: Reply) -> None:
    error = failing(Driver([reply]), LIST)
    assert type(error) is BadAnswer
    assert error.status == reply.status
    assert "Sign in" not in str(error)


def test_a_body_that_can_not_be_unpacked_is_a_bad_answer() -> None:
    assert type(failing(Driver([httpx.DecodingError("zlib")]), LIST)) is BadAnswer


@pytest.mark.parametrize("body", [b"<html>secret</html>", b"", b"[]", b'{"error": "odd"}'])
def test_an_error_of_a_proxy_has_its_status_and_not_its_words(body: bytes) -> None:
    error = failing(Driver([Reply(413, {}, body)]), LIST)
    assert (type(error), error.code, error.status) == (InvalidRequest, "http_413", 413)
    assert "secret" not in str(error)
    assert error.request_id is not None


def test_an_unready_service_answers_how_it_is() -> None:
    loading = Reply(503, {}, b'{"status": "loading", "uptime_s": 1.5, "indexes": {}}')
    assert Driver([loading]).run(endpoints.health()).status == "loading"
    assert Driver([loading]).run(endpoints.ready()) is False
    assert Driver([Reply(200, {}, b"{}")]).run(endpoints.ready()) is True
    driver = Driver([Reply(503, {}, b"no backend")] * 4)
    assert type(failing(driver, endpoints.health())) is Unavailable


def test_an_entry_of_a_batch_has_the_status_that_it_would_have_alone() -> None:
    for code, status, kind in (
        ("out_of_range", 422, InvalidRequest),
        ("no_such_item", 404, NotFound),
        ("internal_error", 500, ServerFailed),
        ("newer_than_the_client", None, Refused),
    ):
        detail = ErrorDetail(code=code, message="m", param="p", request_id="r")
        error = entry_error(ErrorAnswer(error=detail))
        assert (type(error), error.code, error.status) == (kind, code, status)
        assert (error.message, error.param, error.request_id) == ("m", "p", "r")


def test_fields_that_a_newer_service_adds_pass() -> None:
    answer = orjson.loads(GOOD_SEARCH.content)
    answer["novel"] = answer["hits"][0]["novel"] = {"a": 1}
    found = Driver([Reply(200, {}, orjson.dumps(answer))]).run(endpoints.search_text("red"))
    assert found.hits[0].id == "red"


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        ("12", 12.0),
        (" 1.5 ", 1.5),
        ("9" * 400, math.inf),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2015 07:28:00 -0000", 0.0),  # a date without a zone
        ("-1", None),
        ("soon", None),
        ("", None),
        ("²", None),
        (None, None),
    ],
)
def test_retry_after_is_read_in_every_form(header: str | None, seconds: float | None) -> None:
    assert retry_after_s(header) == seconds


def test_retry_after_may_be_a_date() -> None:
    then = datetime.now(UTC) + timedelta(seconds=90)
    assert 80 < (retry_after_s(format_datetime(then, usegmt=True)) or 0) <= 90


def test_patience_that_makes_no_sense_is_refused() -> None:
    for wrong in ({"connect_s": 0}, {"read_s": -1}, {"total_s": math.nan}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Timeouts(**wrong)
    for odd in ({"tries": 0}, {"first_s": -1}, {"first_s": 9, "longest_s": 1}):
        with pytest.raises(ValueError, match=next(iter(odd))):
            Retries(**odd)  # type: ignore[arg-type]


def test_errors_go_from_process_to_process_whole() -> None:
    error = failing(Driver([refused(422, "out_of_range")]), LIST)
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), vars(copied), str(copied)) == (type(error), vars(error), str(error))
