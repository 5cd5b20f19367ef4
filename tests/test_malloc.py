"""Freed memory goes back to the system when the C library is told to; a setting of the whole process."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest

import eager_offload as eo
from eager_offload import malloc
from tests.processes import printed_by

#: Trains nothing: makes many blocks, frees every one but the last, and says whether they stayed resident.
MEMORY = """
eo.release_freed_memory({arguments})
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
print("it goes back" if grown > 100 * mib and left < 16 * mib else "it stays", flush=True)
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")


#: The advice of a process that offloads, where it has made a call before or none.
ADVICE = """
offload, x = eo.Offload(keep_last_bytes=0), torch.randn(1 << 23, requires_grad=True)
with offload: loss = x.sigmoid().exp().square().sum()
loss.backward()
stats = offload.stats(synchronize=True)
print(stats.keeps_freed_memory, any("release_freed_memory()" in one for one in stats.advice), flush=True)
"""
PROGRAMS = [
    *(MEMORY.format(arguments=arguments) for arguments in ("", "'2MiB'", "'4GiB'")),
    ADVICE,
    "eo.release_freed_memory()" + ADVICE,
]
#: Each in a fork of its own, since the setting is one of the whole process.
FORKS = f"""
import os, sys, psutil, torch, eager_offload as eo
for program in {PROGRAMS!r}:
    if os.fork() == 0:
        exec(program)
        os._exit(0)
    os.wait()
"""


def said(program: str, **environment: str) -> list[str]:
    """The lines that a process prints which has none of the settings of malloc but these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in malloc._OTHERWISE:
            patch.delenv(name, raising=False)
        return printed_by("-c", program, **environment).splitlines()


@pytest.fixture(scope="module")
def forks() -> list[str]:
    return said(FORKS)


@glibc
def test_what_is_freed_goes_back_at_once(forks: list[str]) -> None:
    assert forks[:2] == ["it goes back", "it goes back"]
    # 4 GiB would wrap around to 0 in the C library's int, and every small block would be a mapping of its own.
    assert forks[2] == "it stays"


@glibc
def test_the_advice_on_a_cpu_names_it_where_it_would_change_something(forks: list[str]) -> None:
    assert forks[3:] == ["True True", "False False"]
    by_the_environment = said("import torch, eager_offload as eo" + ADVICE, MALLOC_TRIM_THRESHOLD_="65536")
    assert by_the_environment == ["False False"]


@pytest.mark.parametrize("missing", [OSError, TypeError, AttributeError])
def test_a_c_library_without_the_setting_is_no_error(missing: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> Any:
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert eo.release_freed_memory() is False
