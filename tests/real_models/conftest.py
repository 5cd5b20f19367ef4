"""Trainers lie in cycles here, too."""

from __future__ import annotations

from tests.integrations.leftovers import nothing_outlives_a_file

__all__ = ["nothing_outlives_a_file"]
