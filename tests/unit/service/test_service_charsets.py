"""Forms whose names and values claim to be in some charset, and errors that quote them."""

from __future__ import annotations

import httpx
import pytest

from hivlp.service.errors import Problem, problem_response

FORM = (
    b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\nAAA\r\n'
    b'--x\r\nContent-Disposition: form-data; name="%s"\r\n\r\nnot json\r\n--x--\r\n'
)


def sent(client: httpx.Client, charset: str, name: bytes) -> tuple[int, str]:
    kind = f"multipart/form-data; boundary=x; charset={charset}"
    response = client.post("/search/image", content=FORM % name, headers={"Content-Type": kind})
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("charset", ["undefined", "punycode", "utf-7", "raw_unicode_escape", "x"])
@pytest.mark.parametrize("name", [b"+2D0-", b"\\ud83d", b"\xff"])
def test_a_form_must_be_utf_8(shared: httpx.Client, charset: str, name: bytes) -> None:
    assert sent(shared, charset, name) == (415, "unsupported_media_type")


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", '"utf-8"'])
def test_a_form_may_say_that_it_is_utf_8(shared: httpx.Client, charset: str) -> None:
    assert sent(shared, charset, b"k") == (422, "invalid_value")
    assert sent(shared, charset, b"\xff") == (422, "invalid_value")


def test_any_text_can_be_told() -> None:
    problem = Problem(422, "invalid_value", "\ud83d: is no field", "\ud83d")
    error = problem.body("1")["error"]
    assert (error["message"], error["param"]) == ("\\ud83d: is no field", "\\ud83d")
    assert problem_response(problem, "1").status_code == 422
