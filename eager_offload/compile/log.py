"""What was decided about a graph, value by value: ``logging.getLogger("eager_offload.compile")``."""

from __future__ import annotations

import logging

from eager_offload.compile.select import Choice

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
    if not choice.groups:
        _logger.debug("nothing of this graph moves")
