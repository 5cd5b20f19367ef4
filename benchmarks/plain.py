"""Tables and lines of text for where ``rich`` is not installed."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["PlainConsole", "PlainTable"]

_STYLE = re.compile(r"\[/?[a-z ]*\]")


class PlainTable:
    """Text in the first column, numbers in the others."""

    def __init__(self) -> None:
        self._headers: list[str] = []
        self._rows: list[list[str]] = []

    def add_column(self, header: str, **_: Any) -> None:
        self._headers.append(header)

    def add_row(self, *cells: str) -> None:
        self._rows.append([_STYLE.sub("", cell) for cell in cells])

    def __str__(self) -> str:
        lines = [self._headers, *self._rows]
        lines = [[*line, *[""] * (len(self._headers) - len(line))] for line in lines]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self._headers))]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in lines
        )


class PlainConsole:
    """Prints."""

    def print(self, *what: object, **_: Any) -> None:
        print(*(_STYLE.sub("", str(part)) for part in what))
