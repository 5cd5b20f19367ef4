"""HTML that is escaped by construction: whatever is no ``Markup`` is text."""

from __future__ import annotations

import html

__all__ = ["Markup", "figure", "rate_text", "seconds_text", "size_text", "tag"]


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: str | int | float | None) -> Markup:
    """An element. An underscore at the end of an attribute's name is left out, one inside is a hyphen.

    Args:
        children: text, or what this function returned.
        attributes: ``None`` leaves one out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(child if isinstance(child, Markup) else html.escape(child, quote=False) for child in children)
    return Markup(f"<{name}{given}>{inner}</{name}>")


def figure(key: str, value: float, text: str) -> Markup:
    """A number as people read it, with its exact value and what it is for programs."""
    return tag("data", text, value=value, data_figure=key)


def size_text(nbytes: int) -> str:
    """Such as ``"1.5 GiB"``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{nbytes:,} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Such as ``"12.3 ms"``."""
    if not seconds:
        return "0 s"
    if seconds >= 1:
        return f"{seconds:,.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:,.1f} ms"
    return f"{seconds * 1e6:,.0f} µs"


def rate_text(bytes_a_second: float) -> str:
    """In thousands, as links and disks are sold."""
    return f"{bytes_a_second / 1e9:,.2f} GB/s" if bytes_a_second >= 1e9 else f"{bytes_a_second / 1e6:,.1f} MB/s"
