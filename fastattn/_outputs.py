"""Files that a command of ``python -m fastattn`` is to write when its work is done."""

from __future__ import annotations

import os
from pathlib import Path


def why_not_writable(path: Path) -> str:
    """Why no file can be written at `path`; empty where one can.

    It is opened, as only that tells; a file that is there stays as it is.
    """
    target = os.path.realpath(path)
    is_new = not os.path.exists(target)
    try:
        with open(target, "ab"):
            pass
        if is_new:
            os.unlink(target)
    except OSError as error:
        return error.strerror or str(error)
    return ""
