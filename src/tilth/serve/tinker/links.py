"""Links to files that are valid for a while, signed, so that a program without the server's token can follow them."""

import hashlib
import hmac
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from tilth.core.errors import CheckpointError

SECONDS = 3600
"""Time for which a link is valid."""


@dataclass(frozen=True)
class Links:
    """Links signed with a secret."""

    secret: str

    def of(self, base: str, place: str, files: Sequence[str]) -> dict[str, Any]:
        """Return file -> URL, and when these end. place: of the files, RUN/KIND/NAME."""
        expires = int(time.time()) + SECONDS
        urls = {}
        for file in files:
            asked = f"expires={expires}&signature={self._signature(place, file, expires)}"
            urls[file] = f"{base.rstrip('/')}/api/v1/files/{quote(place)}/{quote(file)}?{asked}"
        return {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()}

    def check(self, place: str, file: str, expires: int, signature: str) -> None:
        """Raise CheckpointError for a link that is not this server's, or no longer valid."""
        if not hmac.compare_digest(signature.encode(), self._signature(place, file, expires).encode()):
            raise CheckpointError("the link's signature is wrong; ask for a new one", key="link.signature")
        if expires < time.time():
            raise CheckpointError("the link is no longer valid; ask for a new one", key="link.expired")

    def _signature(self, place: str, file: str, expires: int) -> str:
        return hmac.new(self.secret.encode(), f"{place}\n{file}\n{expires}".encode(), hashlib.sha256).hexdigest()
