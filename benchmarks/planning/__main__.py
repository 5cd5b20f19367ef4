"""Runs it: see ``__init__.py``."""

import sys

from benchmarks.planning import main

if __name__ == "__main__":
    sys.exit(main())
