"""Tries every site; see the package."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.virtual_device import build
from tools.mutants.equivalent import why_equivalent
from tools.mutants.sites import KINDS, Site, find
from tools.mutants.suites import device_suites_of, suites_of
from tools.mutants.trial import ROOT, Verdict, Workplace


@dataclass(frozen=True)
class Tried:
    """A site and its verdict."""

    site: Site
    verdict: Verdict

    def show(self) -> str:
        found = self.verdict
        caught = "SURVIVED" if found.survived else f"{'timeout in ' if found.timeout else ''}{found.caught_by}"
        return f"{self.site.kind:<9} {self.site.name}  {self.site.source}\n          {caught}  ({found.seconds:.0f} s)"

    def as_json(self) -> dict[str, object]:
        site = {name: value for name, value in asdict(self.site).items() if name not in ("start", "stop")}
        found = self.verdict
        return {**site, "caught_by": found.caught_by, "timeout": found.timeout, "seconds": round(found.seconds, 1)}


def chosen(options: argparse.Namespace) -> list[Site]:
    """The sites that the command line asks for."""
    sites = [
        site
        for site in find(ROOT / "eager_offload")
        if site.kind in options.kind and (not options.only or any(only in site.name for only in options.only))
    ]
    return sites[:: options.every][: options.limit]


def leave_out_equivalent(sites: list[Site]) -> list[Site]:
    """The sites that something may notice; the reason of the others is printed."""
    left = []
    for site in sites:
        if (reason := why_equivalent(site)) is None:
            left.append(site)
        else:
            print(f"{site.kind:<9} {site.name}  {site.source}\n          equivalent: {reason}", flush=True)
    return left


def check_whole(workplace: Workplace, sites: list[Site], limit: float) -> list[str]:
    """The tests that fail although nothing was taken out; with them, nothing could be told."""
    imported = workplace.module_file()
    assert imported.is_relative_to(workplace.directory), f"the tests would see {imported}"
    failing = []
    for suites_for, on_device in ((suites_of, False), (device_suites, True)):
        suites = list(dict.fromkeys(suite for site in sites for suite in suites_for(site.path)))
        if suites:
            found = workplace.run(suites, limit, on_device=on_device, all_of_them=True)
            if found.survived:
                where = "on the virtual device" if on_device else "on the host"
                print(f"{len(suites)} suites pass {where} in {found.seconds:.0f} s with nothing taken out", flush=True)
            else:
                lines = [line for line in found.output.splitlines() if line.startswith(("FAILED", "ERROR"))]
                failing += lines or [str(found.caught_by)]
    return failing


def device_suites(path: str) -> list[str]:
    """Those of the virtual device for a module, where that can be built."""
    return device_suites_of(path) if build.reason_not_to_build() is None else []


def try_all(directory: Path, sites: list[Site], options: argparse.Namespace) -> list[Tried]:
    """Each site in one of as many workplaces as there are jobs."""
    mine, numbers = threading.local(), itertools.count(1)

    def begin() -> None:
        mine.workplace = Workplace(directory / f"worker-{next(numbers)}")

    def try_one(site: Site) -> Tried:
        suites, further = suites_of(site.path), device_suites(site.path)
        tried = Tried(site, mine.workplace.try_out(site, suites, further, options.timeout))
        print(tried.show(), flush=True)
        return tried

    with ThreadPoolExecutor(options.jobs, initializer=begin) as pool:
        return list(pool.map(try_one, sites))


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    sites = chosen(options)
    if (reason := build.reason_not_to_build()) is not None:
        print(f"without the virtual device: {reason}")
    if options.list:
        for site in sites:
            print(f"{site.kind:<9} {site.name}  {site.source}")
        return 0
    sites = leave_out_equivalent(sites)
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        directory = Path(name)
        failing = [] if options.no_baseline else check_whole(Workplace(directory / "whole"), sites, options.timeout)
        if failing:
            print("these fail with nothing taken out:", *failing, sep="\n  ")
            return 2
        tried = try_all(directory, sites, options)
    survivors = [one for one in tried if one.verdict.survived]
    counts = Counter(one.site.kind for one in tried)
    print(f"\n{len(tried)} sites: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]))
    print(f"{len(survivors)} survived")
    for one in survivors:
        print(f"  {one.site.kind:<9} {one.site.name}  {one.site.source}")
    if options.json:
        content = {"sites": len(tried), "survived": len(survivors), "mutants": [one.as_json() for one in tried]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(survivors))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description="Takes out what keeps order, a call site at a time.")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many at once (2)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="sites whose path:line holds this; repeatable")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="only of these kinds")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each Nth site")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N sites")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test; a hang is caught (60)")
    parser.add_argument("--no-baseline", action="store_true", help="do not first see whether the tests pass as it is")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the list as JSON too")
    parser.add_argument("--list", action="store_true", help="show the sites and try nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
