"""A trace as one self-contained page: what ran when, what memory that took, who saved what, and what stayed."""

from __future__ import annotations

from eager_offload.observe.report.page import render

__all__ = ["render"]
