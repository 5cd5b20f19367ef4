"""Counts headless words in docstrings and comments: "what" and "where", for each thousand words of a file.

    python -m tools.prose             every file with its rate, the highest first
    python -m tools.prose --check     fails if a file is over its mark
    python -m tools.prose --lower     lowers the marks to the rates of today

A file may have two such words in a thousand, or one in all. ``tools/prose.json`` has the files that exceed this, each
with its count of today: a mark may fall, and not rise. The count is a thermometer and proves nothing: a sentence
without these words may be as hard to read.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MARKS = Path(__file__).with_suffix(".json")
FOLDERS = ("eager_offload",)
#: Words in a thousand that any file may have, and words that a short file may have.
RATE, FEW = 2, 1
HEADLESS = re.compile(r"\b(what|where)\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][\w'-]*")
CODE = re.compile(r"``[^`]*``|`[^`]*`")


def prose(source: str) -> Iterator[str]:
    """Yields the docstrings (of attributes, too) and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def counts(path: Path) -> tuple[int, int]:
    """Returns how many headless words, and how many words in all, a module's prose has."""
    text = CODE.sub("", "\n".join(prose(path.read_text())))
    return len(HEADLESS.findall(text)), len(WORD.findall(text))


def allowed(words: int) -> int:
    return max(FEW, RATE * words // 1000)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a file is over its mark")
    parser.add_argument("--lower", action="store_true", help="lower the marks to the rates of today")
    options = parser.parse_args(arguments)
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): counts(path) for path in paths}
    marks: dict[str, int] = json.loads(MARKS.read_text()) if MARKS.exists() else {}
    if options.lower:
        over = {name: count for name, (count, words) in found.items() if count > allowed(words)}
        lower = {name: min(count, marks.get(name, count)) for name, count in over.items() if name in marks or not marks}
        MARKS.write_text(json.dumps(lower, indent=2, sort_keys=True) + "\n")
    if options.check:
        bad = {name: pair for name, pair in found.items() if pair[0] > max(allowed(pair[1]), marks.get(name, 0))}
        for name, (count, words) in bad.items():
            print(
                f'{name}: {count} times "what" or "where" in {words:,} words of docstrings and comments',
                file=sys.stderr,
            )
        return bool(bad)
    for name, (count, words) in sorted(found.items(), key=lambda item: -item[1][0] / (item[1][1] or 1)):
        print(f"{1000 * count / (words or 1):6.1f}  {count:4}  {words:6,}  {name}")
    totals = [sum(column) for column in zip(*found.values(), strict=True)]
    print(f"{1000 * totals[0] / totals[1]:6.1f}  {totals[0]:4}  {totals[1]:6,}  all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
