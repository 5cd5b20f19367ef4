"""What stands in ``on_device`` runs in processes of its own; see ``test_on_virtual_device.py``."""

from __future__ import annotations

import sys

collect_ignore = [] if "tests.virtual_device.plugin" in sys.modules else ["on_device"]
