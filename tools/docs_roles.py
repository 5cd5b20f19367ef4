"""Docstrings as mkdocstrings is to show them: references in the way of Python become links, code becomes Python.

An extension of griffe, which reads the docstrings for mkdocstrings (``mkdocs.yml`` names it).
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc):`(?P<short>~?)(?P<name>[\w.]+)`")
#: ``    one, another: what both are``, and the lines that go on with it.
_JOINT_ITEM = re.compile(r"^ {4}\*{0,2}[a-z]\w*(?:,\s+\*{0,2}[a-z]\w*)+: .*\n(?: {8}.*\n)*", re.MULTILINE)


class Roles(griffe.Extension):
    """Rewrites each docstring once it has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: _link(role, obj), obj.docstring.value)
            obj.docstring.value = _fence(_without_joint_items(text))


def _link(role: re.Match[str], obj: griffe.Object) -> str:
    """A link where the API page has such a name, else its name as code."""
    name = role["name"]
    shown = name.rpartition(".")[2] if role["short"] else name
    if "." not in name:
        scope = obj if obj.is_class else obj.parent
        inside = scope is not None and scope.is_class and name in scope.members
        name = f"{scope.path if inside else 'eager_offload'}.{name}"
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'


def _without_joint_items(text: str) -> str:
    """What says one thing of several arguments stands as a paragraph before ``Args:``; griffe would drop it."""
    for item in _JOINT_ITEM.findall(text):
        names, _, meaning = " ".join(item.split()).partition(": ")
        code = ", ".join(f"`{name}`" for name in names.split(", "))
        text = text.replace(item, "").replace("Args:\n", f"{code}: {meaning}\n\nArgs:\n", 1)
    return text


def _fence(text: str) -> str:
    """Indented code behind a paragraph is Python, and is coloured as such; the items of a section are no code."""
    lines, out, inside = text.split("\n"), [], False
    before = "\n".join(lines)
    sections = re.search(r"^(Args|Returns|Raises|Yields|Attributes):$", before, re.MULTILINE)
    last = before.count("\n", 0, sections.start()) if sections else len(lines)
    for number, line in enumerate(lines):
        indented = line.startswith("    ") and number < last
        if indented and not inside and not (number and lines[number - 1].strip()):
            out.append("```python")
            inside = True
        if inside and not indented and line.strip():
            while not out[-1].strip():
                out.pop()
            out += ["```", ""]
            inside = False
        out.append(line[4:] if inside else line)
    if inside:
        out.append("```")
    return "\n".join(out)
