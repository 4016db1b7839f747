"""What a key may look like: the same on every back-end, so that a checkpoint can move."""

from __future__ import annotations

import functools
import re
from urllib.parse import urlsplit

from storage.errors import InvalidKeyError

# Objects under construction on back-ends that need a name for them; never a key, never listed.
UNFINISHED_MARK = ".tmp-"

# A file name has at most 255 bytes (ext4, xfs, NFS), and an unfinished one is this much longer.
PART_BYTES_MAX = 255 - len(UNFINISHED_MARK) - 17
# The limit of S3, with room for the prefix of the store.
KEY_BYTES_MAX = 768


@functools.lru_cache(maxsize=4096)  # a key is used for thousands of small reads in a row
def check_key(key: str) -> str:
    """`key` itself. Raises InvalidKeyError when it must not be used in any store."""
    problem = _key_problem(key)
    if problem:
        raise InvalidKeyError(
            f"{key[:200]!r} is not a key: {problem}; expected a relative path like 'steps/1/data'"
        )
    return key


def check_prefix(prefix: str) -> str:
    """`prefix` itself, which may end anywhere within a key. Raises InvalidKeyError."""
    whole_parts, _, rest = prefix.rpartition("/")
    if whole_parts:
        check_key(whole_parts)
    elif prefix.startswith("/"):
        raise InvalidKeyError(f"{prefix[:200]!r} is not a prefix: keys are relative")
    if rest in (".", ".."):
        raise InvalidKeyError(f"{prefix[:200]!r} is not a prefix: it ends in {rest!r}")
    if rest and not rest.startswith("."):
        check_key(rest)
    return prefix


def unfinished_name(name: str, token: str) -> str:
    """Name for the object `name` while it is under construction; `token` has 16 characters."""
    return f"{UNFINISHED_MARK}{token}-{name}"


def finished_name(name: str) -> str | None:
    """The name that an unfinished object was meant to get; None for any other name."""
    if not name.startswith(UNFINISHED_MARK) or len(name) < len(UNFINISHED_MARK) + 18:
        return None
    return name[len(UNFINISHED_MARK) + 17 :]


def _key_problem(key: str) -> str:
    if not key:
        return "it is empty"
    try:
        nbytes = len(key.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    if nbytes > KEY_BYTES_MAX:
        return f"it has {nbytes} bytes, the limit is {KEY_BYTES_MAX}"
    # isprintable is the quick test; spaces and any script are fine, control characters are not.
    if not key.isprintable() and any(ord(c) < 32 or ord(c) == 127 for c in key):
        return "it holds a control character"
    for part in key.split("/"):
        if part in ("", ".", ".."):
            return f"it has the part {part!r}"
        if part.startswith(UNFINISHED_MARK):
            return f"names that start with {UNFINISHED_MARK!r} are for objects under construction"
        if len(part) > PART_BYTES_MAX // 4 and len(part.encode()) > PART_BYTES_MAX:
            return f"a part has more than {PART_BYTES_MAX} bytes"
    return ""


def redacted(url: str) -> str:
    """`url` without user names, passwords and query values: fit for messages and logs."""
    if "::" in url and "[" not in url:  # a chain of urls, and no IPv6 address
        return "::".join(map(redacted, url.split("::")))
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("://")[0] + "://***"
    if not parts.scheme or "://" not in url:
        return url
    place, path = parts.netloc, parts.path
    if "@" in place or (":" in place and "@" in path):  # a password may hold a slash
        place, _, path = f"{place}{path}".rpartition("@")[2].partition("/")
        place, path = f"***@{place}", f"/{path}" if path else ""
    query = re.sub(r"=[^&;]*", "=***", f"?{parts.query}" if parts.query else "")
    return f"{parts.scheme}://{place}{path}{query}{'#***' if parts.fragment else ''}"
