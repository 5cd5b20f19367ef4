"""Where offloading enters the graphs that AOTAutograd makes, whatever compiles them.

[Note: a graph that cannot be offloaded]
Nothing may fail that compiles without an ``Offload``. So what decides and inserts works on copies of the two graphs; if
it raises, they are dropped, the graphs are compiled as if no ``Offload`` were there, and what they save is counted as
``failed`` whenever they run. That is a defect of the library and warned of as one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from torch.fx import GraphModule

from eager_offload import contexts
from eager_offload.compile.cache_key import read_text
from eager_offload.compile.decide import is_whole
from eager_offload.compile.graphs import copied
from eager_offload.compile.insert import insert_into_pair, insert_report
from eager_offload.compile.select import Choice, choose, choose_nothing
from eager_offload.config import OffloadConfig, size_text
from eager_offload.contexts import configuration_on_top
from eager_offload.errors import warn
from eager_offload.torch_private import Patch
from eager_offload.torch_private.inductor import leave_out_of_precompile, on_bans_of_hooks, on_splits

#: What was decided about a graph, value by value.
_logger = logging.getLogger("eager_offload.compile")


class _Thread(threading.local):
    """What the calling thread is compiling for."""

    text: str | None = None


_thread = _Thread()


@contextmanager
def compiling_for(text: str) -> Iterator[None]:
    """What the calling thread compiles meanwhile is offloaded by the configuration ``text``, whatever hooks are on top.

    Where torch does not let it, that is warned of.
    """
    if not patches():
        warn(f'torch {torch.__version__} does not let backend="eager_offload" offload inside of its graphs')
    contexts.patches.add(patches())
    before, _thread.text = _thread.text, text
    try:
        with contexts.patches.used():
            yield
    finally:
        _thread.text = before


@cache
def patches() -> tuple[Patch, ...]:
    """What has AOTAutograd offload between forward and backward, where the hooks on top are the library's.

    Transforms of ``torch.func`` are traced under those as without any: what they save is in the graph, like all else.

    Returns:
        Nothing where this torch does not let it.
    """
    splits = on_splits(_in_place_of_hooks)
    return (*splits, *on_bans_of_hooks(lambda: configuration_on_top() is not None)) if splits else ()


def _in_place_of_hooks(
    forward: GraphModule, backward: GraphModule, num_outputs: int, parameters: Sequence[int]
) -> bool:
    """What AOTAutograd does in place of tracing hooks into its graphs; whether there is nothing left for it to do."""
    text = configuration_on_top() if _thread.text is None else _thread.text
    if text is None:
        return False
    offload_between(forward, backward, num_outputs, text, parameters)
    return True


def offload_between(
    forward: GraphModule, backward: GraphModule, num_outputs: int, text: str, parameters: Sequence[int] = ()
) -> None:
    """Moves what ``forward`` saves for ``backward``.

    Args:
        forward: its outputs are ``num_outputs`` of the user's, then what is saved.
        backward: takes what is saved under the names of the forward's nodes.
        num_outputs: how many of the forward's outputs are the user's.
        text: the configuration, and a plan's fraction: see [Note: the text of a configuration].
        parameters: which of the forward's inputs are parameters and buffers.
    """
    leave_out_of_precompile("eager_offload moves what this graph saves, for one configuration")
    config_key, fraction = read_text(text)
    config = OffloadConfig.from_text(config_key)
    try:
        (ours, _), (theirs, _) = copied(forward.graph), copied(backward.graph)
        whole = is_whole(ours, theirs, num_outputs, parameters)
        choice = choose(ours, theirs, num_outputs, config, fraction=fraction, whole=whole)
        insert_into_pair(ours, theirs, num_outputs, choice, config)
    except Exception as error:  # [Note: a graph that cannot be offloaded]
        warn(
            "a compiled graph is not offloaded, since the pass that would have done it raised "
            f"{type(error).__name__}: {error}. Its results are right, its memory is as without; please report it, with "
            "TORCH_LOGS=aot_graphs"
        )
        ours, theirs = forward.graph, backward.graph
        choice = choose_nothing(ours, num_outputs)
    _log(choice)
    insert_report(ours, choice, config)
    forward.graph, backward.graph = ours, theirs  # which compiles both


def _log(choice: Choice) -> None:
    """One line for each saved value of a graph, at the level ``DEBUG``."""
    if not _logger.isEnabledFor(logging.DEBUG):
        return
    for group in choice.groups:
        names = ", ".join(node.name for node in group.members)
        _logger.debug("%s moves: %d bytes, as the storage of %s", names, group.nbytes, group.base.name)
    for node, reason in choice.kept.items():
        _logger.debug("%s stays: %s", node.name, reason.value)
    if (found := choice.outcome) is not None:
        _logger.debug("expected: a peak of %s, in %.3g s", size_text(found.peak_bytes), found.step_seconds)
    if not choice.groups:
        _logger.debug("nothing of this graph moves")
