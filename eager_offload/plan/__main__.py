"""``python -m eager_offload.plan``: what fits and what is to move, before the first step."""

from __future__ import annotations

import sys

from eager_offload.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
