"""A model of 32 blocks on an H200."""

from __future__ import annotations

from benchmarks.models import Shape
from eager_offload.machine import TABLE

LARGE = Shape(layers=32, width=4096, hidden=11008, heads=32)
H200 = TABLE["h200"]
