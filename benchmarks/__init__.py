"""Measures the library against what it promises; `python -m benchmarks.NAME --help` from the repository's root.

The model and its text are those of the demo in `examples/`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
