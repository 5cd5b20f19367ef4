"""What was decided about a graph, value by value: ``logging.getLogger("eager_offload.compile")``."""

from __future__ import annotations

import logging

from eager_offload.compile.select import Choice
from eager_offload.config import size_text

__all__ = ["log_choice"]

_logger = logging.getLogger("eager_offload.compile")


def log_choice(choice: Choice) -> None:
    """One line for each saved value of a graph, at the level ``DEBUG``."""
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    for group in choice.groups:
        names = ", ".join(node.name for node in group.members)
        _logger.debug("%s moves: %d bytes, as the storage of %s", names, group.nbytes, group.base.name)
    for node, reason in choice.kept.items():
        _logger.debug("%s stays: %s", node.name, reason.value)
    if (found := choice.prediction) is not None:
        _logger.debug("expected: a peak of %s, in %.3g s", size_text(found.peak_bytes), found.step_seconds)
    if not choice.groups:
        _logger.debug("nothing of this graph moves")
