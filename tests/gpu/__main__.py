"""Runs the scenarios on the accelerator of this machine, without pytest: ``python -m tests.gpu``."""

from __future__ import annotations

import sys
import time
import traceback

import torch

from tests.gpu.machine import DeviceMachine
from tests.gpu.scenarios import SCENARIOS, Skipped


def main() -> int:
    if not torch.accelerator.is_available():
        print("python -m tests.gpu: torch finds no accelerator on this machine", file=sys.stderr)
        return 2
    failed = 0
    for scenario in SCENARIOS:
        machine, began = DeviceMachine(), time.perf_counter()
        try:
            scenario(machine)
            verdict = "passed"
        except Skipped as reason:
            verdict = f"skipped: {reason}"
        except Exception:
            traceback.print_exc()
            verdict, failed = "FAILED", failed + 1
        finally:
            machine.finish()
            machine.close()
        print(f"{scenario.__name__:80} {time.perf_counter() - began:6.2f} s  {verdict}", flush=True)
    print(f"{len(SCENARIOS)} scenarios, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
