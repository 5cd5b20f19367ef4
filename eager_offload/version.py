"""Which version of the library this is; nothing is imported to say it."""

from __future__ import annotations

VERSION = "0.1.0"
