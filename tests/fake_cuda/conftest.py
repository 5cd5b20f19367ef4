"""What stands in ``on_cuda`` runs over the stand-in alone; see the package."""

from __future__ import annotations

import os

from tests.fake_cuda import LIBRARY

collect_ignore = [] if LIBRARY in os.environ else ["on_cuda"]
