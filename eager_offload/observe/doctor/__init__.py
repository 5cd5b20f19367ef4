"""Examines a machine: what is installed, how fast its devices, links and disks are, and which settings follow."""

from __future__ import annotations

from eager_offload.observe.doctor.examination import examine
from eager_offload.observe.doctor.findings import Diagnosis

__all__ = ["Diagnosis", "examine"]
