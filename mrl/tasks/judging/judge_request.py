"""One question to a judge over HTTP: every wait has a bound, and a request that may pass later is repeated.

It uses only the standard library, since a verifier process asks one question at a time. Redirects are not followed, for
they would take the key elsewhere.
"""

import http.client
import json
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mrl.tasks.rewards import JudgeCosts

MAX_REPLY_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
MAX_WAIT_S = 60.0
"""Longest pause before a repetition, whatever the server asks for (Retry-After)."""
MAX_SHOWN_CHARS = 200
WORTH_ASKING_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 529)


class JudgeError(Exception):
    """The judge gave no score. `spent` is the cost all the same."""

    def __init__(self, what: str, spent: JudgeCosts) -> None:
        super().__init__(what)
        self.spent = spent


@dataclass(frozen=True, slots=True)
class JudgeBounds:
    """Seconds of one request, seconds of all together, repetitions, and seconds before the first repetition."""

    timeout_s: float
    total_s: float
    retries: int
    backoff_s: float


class _Passing(Exception):
    """A request failed, and a repetition may pass; `after_s` is the pause that the server asks for."""

    def __init__(self, what: str, after_s: float = 0.0) -> None:
        super().__init__(what)
        self.after_s = after_s


def ask(
    url: str, body: Mapping[str, Any], headers: Mapping[str, str], bounds: JudgeBounds
) -> tuple[dict[str, Any], JudgeCosts]:
    """Return the reply of `url` to a question, as an object, and the number of requests. Raises JudgeError."""
    began_s, data = time.monotonic(), json.dumps(body).encode()
    for number in range(1, bounds.retries + 2):
        left_s = bounds.total_s - (time.monotonic() - began_s)
        try:
            return _asked(url, data, headers, min(bounds.timeout_s, left_s)), JudgeCosts(requests=number)
        except _Passing as error:
            # A random part keeps processes that were refused together from coming together again.
            pause_s = max(error.after_s, bounds.backoff_s * 2 ** (number - 1) * random.uniform(1.0, 1.5))
            is_last = number > bounds.retries
            if is_last or time.monotonic() - began_s + pause_s >= bounds.total_s:
                after = f" after {number} requests" if number > 1 else ""
                what = f"{error}{after}" + ("; no time left for another request" if not is_last else "")
                raise JudgeError(what, JudgeCosts(requests=number)) from None
            time.sleep(pause_s)
        except _Final as error:
            raise JudgeError(str(error), JudgeCosts(requests=number)) from None
    raise AssertionError


class _Final(Exception):
    """A request failed, and a repetition would fail too."""


def _asked(url: str, data: bytes, headers: Mapping[str, str], within_s: float) -> dict[str, Any]:
    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    deadline_s = time.monotonic() + within_s
    connection = kind(address.hostname or "", address.port, timeout=max(0.001, within_s))
    path = address.path + (f"?{address.query}" if address.query else "")
    try:
        connection.request("POST", path or "/", data, {"Content-Type": "application/json", **headers})
        with connection.getresponse() as reply:
            text = _body(reply, deadline_s)
    except TimeoutError:
        raise _Passing(f"no reply within {within_s:.3g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Passing(f"{type(error).__name__}: {error}") from None
    finally:
        connection.close()
    if reply.status in WORTH_ASKING_AGAIN:
        raise _Passing(_shown(reply.status, text), _pause_s(reply.headers.get("Retry-After", "")))
    if reply.status != http.HTTPStatus.OK:
        raise _Final(_shown(reply.status, text))
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _Final(f"the reply is not a JSON object: {text[:MAX_SHOWN_CHARS].decode(errors='replace')!r}")
    return found


def _body(reply: http.client.HTTPResponse, deadline_s: float) -> bytes:
    """Read the whole reply, at most one timeout of the socket beyond the deadline. Raises TimeoutError."""
    text = b""
    while True:
        if time.monotonic() > deadline_s:
            raise TimeoutError
        part = reply.read1(CHUNK_BYTES)
        text += part
        if len(text) > MAX_REPLY_BYTES:
            raise _Final(f"the reply is longer than {MAX_REPLY_BYTES:,} bytes")
        if not part:
            return text


def _pause_s(word: str) -> float:
    """Return the seconds that Retry-After asks for, at most `MAX_WAIT_S`; 0 for a date or any other text."""
    return min(MAX_WAIT_S, float(word)) if word.isdecimal() else 0.0


def _shown(status: int, text: bytes) -> str:
    said = " ".join(text[: 4 * MAX_SHOWN_CHARS].decode(errors="replace").split())[:MAX_SHOWN_CHARS]
    return f"status {status}: {said}"
