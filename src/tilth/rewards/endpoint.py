"""Rewards from elsewhere: an HTTP endpoint. Imports no torch."""

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import Any, ClassVar

from tilth.core.errors import RewardError

TOKEN = "TILTH_REWARD_TOKEN"
"""Environment variable with a token for the endpoint."""
TRIES = 4
PAUSE = 0.2
"""Seconds before the second try; twice as many before each further one."""
MOST = 1 << 20
"""Bytes of the longest answer that is read."""
AGAIN = (408, 425, 429, 500, 502, 503, 504)
"""HTTP states after which the same request may succeed."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirections: they would carry the token to another host, and drop what was sent."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


@dataclass(frozen=True)
class HttpReward:
    """Asks an HTTP endpoint: POST of JSON {prompt, completion, info}, answered by a number or a dict with ``reward``.

    Requests that may succeed later are repeated; ``reward.timeout`` limits the whole call. Raises RewardError, which
    makes the reward missing.
    """

    url: str
    decides: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not urllib.parse.urlsplit(self.url).hostname:
            message = f"reward {self.url!r} names no host; an endpoint is https://HOST/PATH"
            raise RewardError(message, key="reward.function.url")

    def __call__(self, prompt: str, completion: str, info: dict[str, Any]) -> Any:
        body = json.dumps({"prompt": prompt, "completion": completion, "info": info}, default=str).encode()
        headers = {"Content-Type": "application/json"}
        if token := os.environ.get(TOKEN):
            headers["Authorization"] = f"Bearer {token}"
        request = urllib.request.Request(self.url, body, headers)
        for tried in range(1, TRIES + 1):
            try:
                return self._ask(request)
            except urllib.error.HTTPError as error:
                why, again = f"HTTP {error.code} {error.reason}", error.code in AGAIN
            except OSError as error:  # no connection, a reset, a time-out
                why, again = str(error), True
            if not again or tried == TRIES:
                raise RewardError(f"{self.url}: {why}, {tried} times tried", key="reward.function.url")
            time.sleep(PAUSE * 2 ** (tried - 1))
        raise AssertionError

    def _ask(self, request: urllib.request.Request) -> Any:
        with _OPENER.open(request) as answer:
            text = answer.read(MOST + 1)
        if len(text) > MOST:
            raise RewardError(f"{self.url}: the answer is longer than {MOST} bytes", key="reward.function.size")
        try:
            return json.loads(text)
        except ValueError as error:
            message = f"{self.url}: the answer is no JSON ({error}): {text[:60]!r}"
            raise RewardError(message, key="reward.function.json") from None

    def check(self, info: Any) -> str:
        """Accept any record: the endpoint judges."""
        return ""
