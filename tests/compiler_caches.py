"""What the tests let a compiler keep: machine code, in a directory that goes with the run; graphs for ranks alone.

Where all caches are forced off, Inductor makes the C++ compiler's precompiled header anew for every graph, which takes
five times as long as the rest. A kernel's machine code is found by its whole source and says nothing of our passes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable

#: Graphs are compiled here and now, and not found where another test, or an earlier run, has left them.
NO_GRAPHS = {
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",  # the sizes that earlier processes have seen
}
_DIRECTORY = "TORCHINDUCTOR_CACHE_DIR"
_NOTHING = "TORCHINDUCTOR_FORCE_DISABLE_CACHES"


def keep_no_graphs() -> None:
    """For this process and those that it starts, before torch is imported."""
    os.environ.update(NO_GRAPHS)


def environment_with_graphs() -> dict[str, str]:
    """For a process that tests what is kept, or that shares it with others."""
    return {name: value for name, value in os.environ.items() if name not in {*NO_GRAPHS, _NOTHING}}


def move_machine_code() -> Callable[[], None] | None:
    """Names a new directory for it, for this process and those that it starts.

    Returns:
        What removes it, or ``None`` where whoever runs the tests, or the process that started this one, has named one.
    """
    if _DIRECTORY in os.environ:
        return None
    os.environ[_DIRECTORY] = found = tempfile.mkdtemp(prefix="eager_offload-compiled-")
    return lambda: shutil.rmtree(found, ignore_errors=True)
