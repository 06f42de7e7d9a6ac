"""Files that the user names."""

from __future__ import annotations

from io import BytesIO, TextIOWrapper
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO

from fastattn.demo._errors import DemoError

#: No text that a demo reads is longer; a device may have no end.
MAX_BYTES = 10**8


def read_text(path: Path, option: str) -> str:
    """All of a UTF-8 text file, without a byte order mark; `option` named it.

    Raises
    ------
    DemoError
        If the file is missing, cannot be read, is not text, is blank, or has more than `MAX_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise DemoError(f"{option} {path} is too long: expected {MAX_BYTES} bytes at most")
        text = TextIOWrapper(BytesIO(content), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DemoError(
            f"{option} {path} is not UTF-8 text: byte 0x{byte:02x} at position {error.start} "
            "cannot be decoded. Save it as UTF-8 first."
        ) from None
    except OSError as error:
        raise DemoError(f"{option} {path} cannot be read: {error.strerror}") from None
    if "\0" in text:
        raise DemoError(f"{option} {path} is not text: it contains NUL bytes")
    if not text.strip():
        raise DemoError(f"{option} {path} has no text in it: it is empty, or every line is blank")
    return text


def open_file(path: Path, hint: str = "", option: str = "") -> BinaryIO:
    """A file to read bytes from; `hint` is for users who have no such file, `option` what named it.

    Raises
    ------
    DemoError
        If it is missing, cannot be read, or is not a file but, say, a folder or a pipe.
    """
    name = f"{option} {path}".lstrip()
    try:
        if S_ISREG(path.stat().st_mode):
            return path.open("rb")
    except (OSError, ValueError) as error:  # ValueError: of a path with a NUL in it
        reason = getattr(error, "strerror", None) or error
        is_missing = isinstance(error, FileNotFoundError)
        raise DemoError(f"{name} cannot be read: {reason}", hint if is_missing else "") from None
    raise DemoError(f"{name} cannot be read: it is not a file")
