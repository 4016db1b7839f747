"""Makes text from storage safe for a terminal or a page: control characters are shown as codes.

Names, values and notes of a checkpoint may contain anything: escape sequences that repaint a
terminal, marks that change the direction of text. Everything that a command prints goes through
`visible_streams`, errors and log lines too, so no command has to take care of it. What is written
around the streams (tables, pages) goes through `visible`.
"""

from __future__ import annotations

import io
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


def visible(text: str, keep: str = "") -> str:
    """`text` with a code such as `\\x1b` or `\\u202e` for what has no shape of its own.

    Control and format characters (directions, zero widths, line separators, lone surrogates),
    private and unassigned ones; those in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(one if _is_plain(one) or one in keep else _code(one) for one in text)


def _is_plain(one: str) -> bool:
    # Zs: spaces, of which Python calls only the usual one printable.
    return one.isprintable() or unicodedata.category(one) == "Zs"


def _code(one: str) -> str:
    number = ord(one)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class VisibleStream(io.TextIOBase):
    """A text stream over `raw` that shows control characters as codes, newlines and tabs apart."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str, /) -> int:
        """Write `text`; the number of its characters."""
        self.raw.write(visible(text, keep="\n\t"))
        return len(text)

    def flush(self) -> None:
        """Flush the stream below, which may have been closed first when Python ends."""
        if not self.raw.closed:
            self.raw.flush()

    def isatty(self) -> bool:
        """Whether the stream below is a terminal."""
        return self.raw.isatty()

    def fileno(self) -> int:
        """That of the stream below."""
        return self.raw.fileno()

    def writable(self) -> bool:
        """Always."""
        return True

    @property
    def encoding(self) -> Any:  # type: ignore[override]
        """That of the stream below."""
        return self.raw.encoding


@contextmanager
def visible_streams() -> Iterator[None]:
    """Within the block, everything that is printed to stdout and stderr goes through `visible`.

    After an unexpected exception it stays so, because the interpreter prints the exception's text.
    """
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = VisibleStream(below(out)), VisibleStream(below(err))
    try:
        yield
    except Exception:
        raise
    except BaseException:  # SystemExit of a wrong command line
        sys.stdout, sys.stderr = out, err
        raise
    else:
        sys.stdout, sys.stderr = out, err


def below(stream: TextIO) -> TextIO:
    """Where to write what has codes for a terminal on purpose, with texts made visible before."""
    return stream.raw if isinstance(stream, VisibleStream) else stream
