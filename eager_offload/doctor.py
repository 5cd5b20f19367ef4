"""``python -m eager_offload.doctor``: what this machine offers to offloading, as a text for an issue or as JSON."""

from __future__ import annotations

import sys

from eager_offload.observe.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
