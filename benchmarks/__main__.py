"""``python -m benchmarks``: the same as ``python -m fastattn bench``."""

import sys

from fastattn.bench.cli import main

sys.exit(main())
