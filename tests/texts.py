"""Every text that a user meets: errors, warnings, advice, the report of stats and the help of commands.

    python -m tests.texts     writes tests/texts.txt

The file shows all of them side by side, and a change of one is seen in a review. ``{}`` stands for a value.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_suffix(".txt")
#: Modules all of whose sentences are given to users.
_REPORTS = ("observe/advice", "observe/memory", "observe/no_effect", "observe/report", "stats", "planning/figures")
_WARNS = re.compile(r"(^|\.)_?(warn|warn_once|warn_of_\w+|add_note|captured|unknown_name|print)$")
_HELPS = {"help", "description", "epilog"}
#: A text of fewer words is a name or a part of a format.
_WORDS = 4


def text(node: ast.AST) -> str | None:
    """Returns the text of a literal, of an f-string, or of several of them added."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(text(one) or "{}" for one in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            parts = text(left), text(right)
            return None if parts == (None, None) else "".join(part or "{}" for part in parts)
    return None


def _texts(node: ast.AST) -> Iterator[str]:
    if (found := text(node)) is not None:
        yield found
        return
    for child in ast.iter_child_nodes(node):
        yield from _texts(child)


def _given(tree: ast.Module, *, is_report: bool) -> Iterator[str]:
    docstrings = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        match node:
            case ast.Raise():
                yield from _texts(node)
            case ast.Call(func=func) if _WARNS.search(ast.unparse(func)):
                yield from _texts(node)
            case ast.Call(keywords=keywords) if helps := [one for one in keywords if one.arg in _HELPS]:
                for one in helps:
                    yield from _texts(one.value)
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.AST() as value):
                yield from _texts(value)  # constants that are formatted later
            case ast.Constant() | ast.JoinedStr() if is_report and id(node) not in docstrings:
                yield from _texts(node)
                continue
        todo += ast.iter_child_nodes(node)


def texts() -> str:
    """Returns the whole page, module by module."""
    lines = list[str]()
    for path in sorted((ROOT / "eager_offload").rglob("*.py")):
        name = path.relative_to(ROOT / "eager_offload").with_suffix("").as_posix()
        found = {" ".join(one.split()) for one in _given(ast.parse(path.read_text()), is_report=name in _REPORTS)}
        if said := sorted(one for one in found if len(one.split()) >= _WORDS):
            lines += [f"== {name}", *said, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(texts())
