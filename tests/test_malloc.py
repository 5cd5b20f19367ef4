"""Freed memory goes back to the system when the C library is told to; a setting of the whole process."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

import eager_offload as eo
from eager_offload import malloc

#: Trains nothing: makes many blocks, frees every one but the last, and says whether they stayed resident.
PROGRAM = """
import sys, psutil, torch
from eager_offload import release_freed_memory
if not release_freed_memory(*eval(sys.argv[1])):
    sys.exit("it was refused")
me, mib = psutil.Process(), 1 << 20
blocks = []
for _ in range(3):  # as an allocator meets them in training: again and again
    before = me.memory_info().rss
    blocks = [torch.ones(mib // 2) for _ in range(64)]
    grown = me.memory_info().rss - before
    last = blocks.pop()
    blocks.clear()
    left = me.memory_info().rss - before
    del last
print("it goes back" if grown > 100 * mib and left < 16 * mib else "it stays", file=sys.stderr)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")


def run(arguments: str) -> str:
    command = [sys.executable, "-c", PROGRAM, arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stderr.strip()


@glibc
@pytest.mark.parametrize("arguments", ["()", "('2MiB',)"])
def test_what_is_freed_goes_back_at_once(arguments: str) -> None:
    assert run(arguments) == "it goes back"


@glibc
def test_a_threshold_beyond_what_the_c_library_counts_with_is_none_for_smaller_blocks() -> None:
    """4 GiB would wrap around to 0 in its int, and every small block would become a mapping of its own."""
    assert run("('4GiB',)") in ("it stays", "it was refused")


@glibc
@pytest.mark.parametrize(
    ("environment", "calls", "keeps"),
    [({}, "", True), ({}, "release_freed_memory();", False), ({"MALLOC_TRIM_THRESHOLD_": "65536"}, "", False)],
)
def test_the_advice_on_a_cpu_names_it_where_it_would_change_something(
    environment: dict[str, str], calls: str, keeps: bool
) -> None:
    """Of the very process, since it is a setting of one."""
    program = (
        f"import torch, eager_offload as eo; eo.{calls or 'Offload'}\n"
        "offload, x = eo.Offload(keep_last_bytes=0), torch.randn(1 << 23, requires_grad=True)\n"
        "with offload: loss = x.sigmoid().exp().square().sum()\n"
        "loss.backward()\n"
        "stats = offload.stats(synchronize=True)\n"
        "print(stats.keeps_freed_memory, any('release_freed_memory()' in one for one in stats.advice))"
    )
    others = {name: value for name, value in os.environ.items() if name not in malloc._OTHERWISE}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=others | environment
    )
    assert ran.stdout.split() == [str(keeps)] * 2, ran.stderr


def test_a_bad_threshold_is_refused_before_anything_is_changed() -> None:
    with pytest.raises(eo.ConfigError, match="threshold=-1 is not accepted"):
        eo.release_freed_memory(-1)


@pytest.mark.parametrize("missing", [OSError, TypeError, AttributeError])
def test_a_c_library_without_the_setting_is_no_error(missing: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert eo.release_freed_memory() is False
