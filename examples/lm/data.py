"""Real text that every machine with Python has: the sources of the standard library, a token a byte."""

from __future__ import annotations

import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Batch", "Text", "batches", "read_text"]

MIB = 1 << 20
#: Packages that were installed on top of the standard library differ from machine to machine.
INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Text:
    """What the model is trained on."""

    content: bytes
    #: Where it comes from, for the reader of the report.
    source: str


@dataclass(frozen=True)
class Batch:
    """Windows of the text: ``inputs`` and, a byte later, ``targets``; (batch, sequence), int64."""

    inputs: Tensor
    targets: Tensor


def read_text(root: Path | None = None, *, least: int = MIB, most: int = 4 * MIB) -> Text:
    """Reads the ``*.py`` files under ``root``, in the order of their names, until ``most`` bytes are read.

    Args:
        root: a directory; ``None`` means the standard library of the running Python.
        least: bytes; with fewer the text repeats itself too soon to be called real.

    Raises:
        SystemExit: there are fewer than ``least`` bytes.
    """
    directory = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    content = bytearray()
    files = 0
    for path in sorted(directory.rglob("*.py")):
        if len(content) >= most:
            break
        if path.is_file() and not INSTALLED.intersection(path.relative_to(directory).parts):
            content += path.read_bytes()
            files += 1
    if len(content) < least:
        raise SystemExit(
            f"train_lm.py: {directory} holds {len(content):,} bytes of *.py files, and at least {least:,} are needed: "
            f"this Python comes without the sources of its standard library; run with one that has them"
        )
    library = f"the standard library of Python {platform.python_version()}" if root is None else str(directory)
    source = f"{library} ({files} files)"
    return Text(content=bytes(content[:most]), source=source)


def batches(text: Text, *, count: int, batch: int, sequence: int, seed: int) -> list[Batch]:
    """``count`` batches of random windows; the same for the same text and ``seed``, in every process."""
    content = torch.frombuffer(bytearray(text.content), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)
    chosen = []
    for _ in range(count):
        starts = torch.randint(len(content) - sequence, (batch, 1), generator=generator)
        windows = content[starts + torch.arange(sequence + 1)].long()
        chosen.append(Batch(inputs=windows[:, :-1].contiguous(), targets=windows[:, 1:].contiguous()))
    return chosen
