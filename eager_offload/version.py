"""The version of the library, and digests. Imports nothing at load time, so that the version is cheap to read."""

from __future__ import annotations

VERSION = "0.2.0"


def digest(*parts: str | bytes) -> str:
    """Returns the SHA-256 of ``parts`` in hexadecimal; different lists of parts have different digests."""
    from hashlib import sha256

    found = sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        found.update(b"%d " % len(content) + content)
    return found.hexdigest()
