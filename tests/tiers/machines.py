"""Machines made of files, for code that looks up limits; and real control groups, where a test may make one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from eager_offload.tiers.limits import System

MIB, GIB = 1 << 20, 1 << 30
#: How version 1 writes "no limit".
NO_LIMIT = 9223372036854771712


class FakeMachine:
    """Below ``root`` lies what a machine with this much memory, and one process in it, shows in its files."""

    def __init__(self, root: Path, *, total: int = 64 * GIB, available: int = 48 * GIB) -> None:
        self.root = root
        self.environ: dict[str, str] = {}
        self.process_limits: dict[str, int] = {}
        self._membership: list[str] = []
        self._mounts: list[str] = ["22 1 0:20 / /proc rw - proc proc rw", "23 1 8:1 / / rw - ext4 /dev/root rw"]
        self.write("proc/self/cgroup", "")
        self.set_memory(total=total, available=available)

    @property
    def system(self) -> System:
        return System(self.root, self.environ, self.process_limits.get)

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def set_memory(self, *, total: int = 64 * GIB, available: int, committed: tuple[int, int] | None = None) -> None:
        lines = {"MemTotal": total, "MemFree": available // 2, "MemAvailable": available, "SwapTotal": 0}
        if committed is not None:
            lines["CommitLimit"], lines["Committed_AS"] = committed
        self.write("proc/meminfo", "".join(f"{name}:   {n >> 10} kB\n" for name, n in lines.items()) + "HugePages: 0\n")

    def set_process(self, *, addresses: int, data: int) -> None:
        self.write("proc/self/status", f"Name:\tpython\nVmSize:\t {addresses >> 10} kB\nVmData:\t {data >> 10} kB\n")

    def belongs_to(self, group: str, *, version: int, mounted: str = "/", point: str | None = None) -> None:
        """The process is in ``group``; ``mounted`` and what is in it are seen at ``point``."""
        if version == 1:
            point = point or "/sys/fs/cgroup/memory"
            self._membership += [f"5:cpu,cpuacct:{group}", f"4:memory:{group}"]
            self._mounts += [
                f"31 23 0:28 {mounted} /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct",
                f"32 23 0:29 {mounted} {point} rw,nosuid shared:9 - cgroup cgroup rw,memory",
            ]
        else:
            point = point or "/sys/fs/cgroup"
            self._membership.append(f"0::{group}")
            self._mounts.append(f"33 23 0:30 {mounted} {point} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
        (self.root / point.lstrip("/")).mkdir(parents=True, exist_ok=True)
        self.write("proc/self/cgroup", "\n".join(self._membership) + "\n")
        self.write("proc/self/mountinfo", "\n".join(self._mounts) + "\n")

    def set_group_v2(self, directory: str, **numbers: int) -> None:
        """A group with these of: ``most`` and ``high``, its limits; ``used`` bytes, ``cache`` and ``dirty`` of them."""
        used, cache, dirty = (numbers.get(name, 0) for name in ("used", "cache", "dirty"))
        # What lies in tmpfs counts as file, and cannot be dropped.
        statistics = {"anon": used - cache, "file": cache + MIB, "shmem": MIB, "active_file": cache // 2}
        statistics |= {"inactive_file": cache - cache // 2, "file_dirty": dirty, "file_writeback": 0}
        limits = {"max": numbers.get("most", "max"), "high": numbers.get("high", "max"), "current": used}
        self._set_group(directory, limits, statistics)

    def set_group_v1(self, directory: str, *, hierarchical: bool = True, **numbers: int) -> None:
        """A group with these of: ``most``, ``with_swap`` and ``least_around``, its limits; ``used`` and ``cache``."""
        most, used, cache = numbers.get("most", NO_LIMIT), numbers.get("used", 0), numbers.get("cache", 0)
        limits = {"limit_in_bytes": most, "usage_in_bytes": used, "use_hierarchy": int(hierarchical)}
        limits |= {"memsw.limit_in_bytes": numbers.get("with_swap", NO_LIMIT), "memsw.usage_in_bytes": used}
        statistics = {"cache": cache, "active_file": 0}
        statistics |= {"hierarchical_memory_limit": numbers.get("least_around", most), "total_dirty": 0}
        statistics |= {"total_active_file": cache // 2, "total_inactive_file": cache - cache // 2}
        self._set_group(directory, limits, statistics)

    def _set_group(self, directory: str, numbers: dict[str, object], statistics: dict[str, int]) -> None:
        for name, number in numbers.items():
            self.write(f"{directory}/memory.{name}", f"{number}\n")
        self.write(f"{directory}/memory.stat", "".join(f"{name} {n}\n" for name, n in statistics.items()))


# -- real ones ------------------------------------------------------------------------------------------------------


class RealGroup:
    """A control group that a test has made, inside of the one that the test itself is in."""

    def __init__(self, directory: Path, limit_file: str) -> None:
        self.directory = directory
        self._limit_file = directory / limit_file

    def set_limit(self, nbytes: int) -> None:
        self._limit_file.write_text(str(nbytes))

    @property
    def used(self) -> int:
        """Bytes that what is in it uses, file cache counted."""
        return int(self._first("memory.current", "memory.usage_in_bytes"))

    @property
    def kills(self) -> int:
        """How many processes in it the kernel has killed for its limit."""
        pairs = dict(line.split(" ", 1) for line in self._first("memory.events", "memory.oom_control").splitlines())
        return int(pairs.get("oom_kill", 0))

    def _first(self, *names: str) -> str:
        """The text of the one of these files that it has: of version 2, or of version 1."""
        return next(file.read_text() for file in map(self.directory.joinpath, names) if file.exists())


@contextmanager
def real_group() -> Iterator[RealGroup]:
    """A new group below this process's own, which is gone at the end; skips the test where none can be made."""
    parent, limit_file = _own_group()
    directory = parent / f"eager_offload_test_{os.getpid()}"
    try:
        directory.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error.strerror}")
    try:
        if not (directory / limit_file).exists():
            # Version 2 hands a controller down only where that is asked for.
            with suppress(OSError):
                (parent / "cgroup.subtree_control").write_text("+memory")
        if not (directory / limit_file).exists():
            pytest.skip("control groups here do not limit memory")
        yield RealGroup(directory, limit_file)
    finally:
        for _ in range(10):  # it may stay for a moment after its last process; one that stays hides no failure
            with suppress(OSError):
                directory.rmdir()
                break
            time.sleep(0.05)


def _own_group() -> tuple[Path, str]:
    """The directory of this process's group, and the file that sets a limit in it."""
    with suppress(OSError):
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, controllers, path in lines:
            if "memory" in controllers.split(","):
                return Path("/sys/fs/cgroup/memory") / path.lstrip("/"), "memory.limit_in_bytes"
        for number, _, path in lines:
            if number == "0":
                return Path("/sys/fs/cgroup") / path.lstrip("/"), "memory.max"
    pytest.skip("this process is in no control group")
