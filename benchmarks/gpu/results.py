"""What a stage leaves: lines of JSON, each written at once, so that one that is killed loses nothing it had found."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The names of the files in the folder of results.
RESULTS, LOG, TABLE, PICTURE = "results.jsonl", "log.txt", "table.md", "memory.png"


class NotHereError(Exception):
    """What a stage is to measure is not installed, or not in the installed version."""


@dataclass(frozen=True)
class Job:
    """A stage, as its process knows it."""

    stage: str
    folder: Path
    #: Tiny shapes, to see that everything runs.
    small: bool = False

    def add(self, **values: object) -> None:
        """Appends a result, and prints it."""
        line = json.dumps({"stage": self.stage, **values}, default=str)
        with (self.folder / RESULTS).open("a") as file:
            file.write(line + "\n")  # one call: a line is there whole or not at all
        print(line, flush=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the results of the last card of a file, which several runs may have appended to; later ones count."""
    rows, card = [], None
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # cut off in its midst
        if row.get("what") == "machine" and (found := (row["card"], row["torch"], row["small"])) != card:
            rows, card = [], found
        rows.append(row)
    return rows


def latest(rows: Iterable[dict[str, Any]], what: str) -> dict[str, dict[str, Any]]:
    """Returns the last result of a kind by stage, or by its name where a stage has several."""
    return {row.get("name", row["stage"]): row for row in rows if row.get("what") == what}


def environment(folder: str) -> dict[str, str]:
    """Returns the environment of a stage: what is set already stands, caches of compilers are in ``folder``."""
    return {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # or products on several streams differ in their last bits
        "HF_HUB_OFFLINE": "1",
        "PYTHONFAULTHANDLER": "1",  # a stage that overruns its limit shows where it was
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        **os.environ,
    }
