"""Text from storage as a terminal or a page may have it: what would steer either is shown as code.

Names, values and notes of a checkpoint are whatever somebody wrote: escape sequences that repaint a
terminal, marks that turn the direction of text. Everything that a command prints goes through
`visible_streams`, errors and log lines too, so that no command has to think of it; what is written
past the streams (tables, pages) goes through `visible` and `page_text`.
"""

from __future__ import annotations

import html
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


def page_text(text: str) -> str:
    """`text` for a page of HTML, in an attribute too."""
    return html.escape(visible(text))


def _is_plain(one: str) -> bool:
    # Zs: spaces, of which Python calls only the usual one printable.
    return one.isprintable() or unicodedata.category(one) == "Zs"


def _code(one: str) -> str:
    number = ord(one)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class VisibleStream(io.TextIOBase):
    """A text stream that shows what it is given; lines and tabs stay. `raw` is the one below."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str, /) -> int:
        """Write `text`; the number of its characters."""
        self.raw.write(visible(text, keep="\n\t"))
        return len(text)

    def flush(self) -> None:
        """Flush the stream below."""
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
    """Have all that is printed meanwhile be shown, on stdout and stderr.

    After an exception that nobody expected it stays so: the interpreter prints its text.
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
