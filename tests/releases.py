"""What a release of torch gets wrong by itself, without any ``Offload``: the cases that are skipped there, and why."""

from __future__ import annotations

import pytest
import torch

_RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def wrong_before(release: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Skips a case where torch is older than ``release``."""
    return pytest.mark.skipif(release > _RELEASE, reason=f"before torch {release[0]}.{release[1]} {reason}")
