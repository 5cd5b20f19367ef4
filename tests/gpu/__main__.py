"""Runs the scenarios on the accelerator of this machine, without pytest: ``python -m tests.gpu``."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

import torch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--virtual", action="store_true", help="on the virtual device; see tests/virtual_device")
    parser.add_argument(
        "names",
        nargs="*",
        help='parts of names, "" for all; if none is given, those of devices and one in four of the corpus',
    )
    arguments = parser.parse_args()
    if arguments.virtual:
        from tests.virtual_device import install

        install()
    if not torch.accelerator.is_available():
        print("python -m tests.gpu: torch finds no accelerator on this machine", file=sys.stderr)
        return 2
    from tests.gpu.machine import Machine, Skipped  # torch is asked for its accelerator, which is there by now
    from tests.gpu.scenarios import OF_DEVICES, PROGRAMS, SCENARIOS

    failed, names = 0, arguments.names
    few = (*SCENARIOS, *OF_DEVICES, *[one for one in PROGRAMS[::4] if one not in OF_DEVICES])
    chosen = [one for one in (*SCENARIOS, *PROGRAMS) if any(name in one.__name__ for name in names)] if names else few
    for scenario in chosen:
        machine, began = Machine(), time.perf_counter()
        try:
            scenario(machine)
            verdict = "passed"
        except Skipped as reason:
            verdict = f"skipped: {reason}"
        except Exception:
            traceback.print_exc()
            verdict, failed = "FAILED", failed + 1
        finally:
            machine.close()
        print(f"{scenario.__name__:80} {time.perf_counter() - began:6.2f} s  {verdict}", flush=True)
    print(f"{len(chosen)} scenarios, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
