"""Which version of the library this is, and whether something is as it was; nothing is imported to say the first."""

from __future__ import annotations

VERSION = "0.2.0"


def digest(*parts: str | bytes) -> str:
    """Returns the SHA-256 of ``parts`` in hexadecimal, by which other parts are told apart."""
    from hashlib import sha256

    found = sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        found.update(b"%d " % len(content) + content)
    return found.hexdigest()
