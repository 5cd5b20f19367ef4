"""A diagnosis as a text of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from eager_offload.observe.doctor.findings import Device, Diagnosis, Disk, Feature, Memory, SelfTest, Speed, Verdict

__all__ = ["WIDTH", "to_text"]

WIDTH = 80
#: Where what is said of something begins.
_COLUMN = 17
_GIB = 1 << 30


def to_text(diagnosis: Diagnosis) -> str:
    """The whole report; ends in the verdict."""
    parts = [
        ["eager_offload doctor"],
        _section("Software", _software(diagnosis)),
        _section("Devices", (line for device in diagnosis.devices for line in _device(device))),
        _section("Host memory", _memory(diagnosis.memory)),
        _section("Directories for a spill file", _disks(diagnosis.disks)),
        _section("Features", _features(diagnosis.features)),
        _section("Self test", (line for test in diagnosis.self_tests for line in _self_test(test))),
        _section("What failed", (line for failure in diagnosis.failures for line in _item(failure))),
        _section("Verdict", _verdict(diagnosis.verdict)),
        [f"({diagnosis.seconds:.1f} seconds)"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _section(title: str, lines: Iterator[str]) -> list[str]:
    body = list(lines)
    return [title, *body] if body else []


def _row(name: str, text: str) -> Iterator[str]:
    """A name and, beside it, as many lines as the text takes."""
    first = f"  {name:<{_COLUMN - 3}} "
    yield from _wrapped(text, first, " " * _COLUMN)


def _item(text: str) -> Iterator[str]:
    yield from _wrapped(text, "  - ", "    ")


def _wrapped(text: str, first: str, other: str) -> list[str]:
    # Paths and settings stay whole: they are copied.
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=other,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _software(diagnosis: Diagnosis) -> Iterator[str]:
    software = diagnosis.software
    yield from _row("eager_offload", software.eager_offload)
    built = f" ({software.accelerator})" if software.accelerator else ""
    yield from _row("torch", software.torch + built)
    yield from _row("python", software.python)
    yield from _row("system", software.system)


def _device(device: Device) -> Iterator[str]:
    memory = f", {_gib(device.memory_bytes)}" if device.memory_bytes else ""
    node = f", node {device.numa_node}" if device.numa_node is not None else ""
    yield from _row(device.name, device.model + memory + node)
    if device.flops is not None:
        yield from _row("  compute", f"{_flops(device.flops)} ({device.dtype} product)")
    if device.link is not None and device.name == "cpu":
        yield from _row("  copy", f"{_rate(device.link.out)} within host memory")
    elif device.link is not None:
        yield from _row("  link", _both(device.link, "out", "back"))
    if device.duplex is not None:
        yield from _row("  both at once", _both(device.duplex, "out", "back"))
    if device.pin_seconds is not None:
        yield from _row("  pinning", f"{device.pin_seconds * 1e3:,.0f} ms a GiB")


def _memory(memory: Memory | None) -> Iterator[str]:
    if memory is None:
        return
    yield from _row("headroom", f"{_gib(memory.headroom_bytes)} of {_gib(memory.total_bytes)}")
    yield from _row("bound by", memory.bound_by)
    if memory.limits and memory.limits[0].kind != "memory":
        yield from _row("to raise it", memory.remedy)
    ranks = f", one of {memory.ranks} ranks here" if memory.ranks > 1 else ""
    yield from _row("host_budget", f'"auto" is {_gib(memory.budget_bytes)} for this process{ranks}')


def _disks(disks: list[Disk]) -> Iterator[str]:
    for disk in disks:
        if disk.refused:
            yield from _item(f"{disk.path}: cannot serve: {disk.refused}")
            continue
        same = next(one for one in disks if one.device == disk.device and not one.refused)
        if same is not disk:
            yield from _item(f"{disk.path}: on the same disk as {same.path}")
            continue
        yield from _item(f"{disk.path}: {disk.filesystem or 'unknown filesystem'}, {_gib(disk.free_bytes)} free")
        for name, speed in (("O_DIRECT", disk.direct), ("page cache", disk.buffered)):
            yield from _row(f"  {name}", _both(speed, "write", "read") if speed else "refused or not measured")


def _features(features: list[Feature]) -> Iterator[str]:
    if not features:
        return
    yield from _row("there", f"{sum(one.there for one in features)} of {len(features)} that are probed")
    for feature in features:
        if not feature.there:
            yield from _item(f"not there: {feature.name}. Without it: {feature.without}")


def _self_test(test: SelfTest) -> Iterator[str]:
    if not test.equal:
        told = "GRADIENTS DIFFER from those without offload"
    elif not test.moved_bytes:
        told = "nothing was moved"
    else:
        told = f"moved {test.moved_bytes / (1 << 20):,.0f} MiB; gradients are equal, bit for bit"
    yield from _row(test.device, told)


def _verdict(verdict: Verdict) -> Iterator[str]:
    yield from _wrapped(verdict.summary, "  ", "  ")
    for advice in verdict.advice:
        yield from _item(advice)
    if not verdict.works:
        return
    if not verdict.settings:
        yield "  The defaults fit this machine."
        return
    yield from ("", "  Recommended:", f"    {verdict.python}")
    yield from ("  or, for OffloadConfig.from_env(), in the environment:", f"    {verdict.environment}")


def _both(speed: Speed, out: str, back: str) -> str:
    return f"{_rate(speed.out)} {out}, {_rate(speed.back)} {back}"


def _rate(value: float) -> str:
    """Bytes a second, in thousands as links and disks are sold."""
    return f"{value / 1e9:,.2f} GB/s" if value >= 1e9 else f"{value / 1e6:,.0f} MB/s"


def _flops(value: float) -> str:
    return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.0f} GFLOP/s"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.1f} GiB"
