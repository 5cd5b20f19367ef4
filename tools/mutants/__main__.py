"""Takes out, one at a time, every call that keeps copies in order and memory alive, and sees which test notices.

    python -m tools.mutants               every site, in an hour on two busy cores
    python -m tools.mutants --list        only the sites
    python -m tools.mutants --only eager/moves --kind after fence

A site that no test misses is either code that is not needed or a test that is not there.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.virtual_device import build
from tools.mutants.sites import EQUIVALENT, KINDS, Site, find
from tools.mutants.suites import device_suites_of, suites_of
from tools.mutants.trial import ROOT, Verdict, Workplace


def show(site: Site, what: str = "") -> None:
    print(f"{site.kind:<9} {site.name}  {site.source}" + (f"\n          {what}" if what else ""), flush=True)


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


def try_all(directory: Path, sites: list[Site], options: argparse.Namespace) -> list[Verdict]:
    """Each site in one of as many workplaces as there are jobs."""
    mine, numbers = threading.local(), itertools.count(1)

    def begin() -> None:
        mine.workplace = Workplace(directory / f"worker-{next(numbers)}")

    def try_one(site: Site) -> Verdict:
        found: Verdict = mine.workplace.try_out(site, suites_of(site.path), device_suites(site.path), options.timeout)
        caught = "SURVIVED" if found.survived else f"{'timeout in ' if found.timeout else ''}{found.caught_by}"
        show(site, f"{caught}  ({found.seconds:.0f} s)")
        return found

    with ThreadPoolExecutor(options.jobs, initializer=begin) as pool:
        return list(pool.map(try_one, sites))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-j", "--jobs", type=int, default=2, help="how many at once (2)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="sites whose path:line holds this; repeatable")
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS, help="only of these kinds")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for one test; a hang is caught (60)")
    parser.add_argument("--no-baseline", action="store_true", help="do not first see whether the tests pass as it is")
    parser.add_argument("--list", action="store_true", help="show the sites and try nothing")
    options = parser.parse_args(arguments)
    sites = [
        site
        for site in find(ROOT / "eager_offload")
        if site.kind in options.kind and any(only in site.name for only in options.only or [""])
    ]
    if (reason := build.reason_not_to_build()) is not None:
        print(f"without the virtual device: {reason}")
    if options.list:
        for site in sites:
            show(site)
        return 0
    for site in sites:
        if site.what in EQUIVALENT:
            show(site, f"equivalent: {EQUIVALENT[site.what]}")
    sites = [site for site in sites if site.what not in EQUIVALENT]
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        directory = Path(name)
        failing = [] if options.no_baseline else check_whole(Workplace(directory / "whole"), sites, options.timeout)
        if failing:
            print("these fail with nothing taken out:", *failing, sep="\n  ")
            return 2
        verdicts = try_all(directory, sites, options)
    survivors = [site for site, verdict in zip(sites, verdicts, strict=True) if verdict.survived]
    counts = Counter(site.kind for site in sites)
    print(f"\n{len(sites)} sites: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind]))
    print(f"{len(survivors)} survived")
    for site in survivors:
        show(site)
    return int(bool(survivors))


if __name__ == "__main__":
    sys.exit(main())
