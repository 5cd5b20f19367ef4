"""``python -m eager_offload.report trace.json -o report.html``: a trace as one page to look at."""

from __future__ import annotations

import sys

from eager_offload.observe.report import main

if __name__ == "__main__":
    sys.exit(main())
