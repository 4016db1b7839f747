"""No frame and no object of ours shows a key or a credential that a caller passed.

Method: every public callable that takes options of a store is called so that it fails. The frames
of the traceback are looked at as a page of errors does: the reprs of all variables, and of their
attributes. Then objects that are kept for long.
"""

from __future__ import annotations

import importlib.util
import inspect
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

import ckpt
from ckpt import operate
from ckpt.cli.commandline import build_parser
from ckpt.integrations.dcp import DcpReader, DcpWriter
from ckpt.process import this_process
from ckpt.tools.polling import RunPoller
from storage import StorageError, open_store
from storage.hidden import hides_secrets, without_secrets
from storage.retry import RetryPolicy
from tests.e2e.test_encoded_roots import shown_by

pytest.importorskip("cryptography", reason="the extra 'encode' is not installed")

KEY = b"\xf0\x9f\x94\x91 the thirty-two bytes of a key"[:32]
WORD = "a-credential-of-the-user"
OPTIONS: dict[str, Any] = {
    "encryption_key": KEY,
    "secret": WORD,
    "client_kwargs": {"aws_session_token": WORD, "verify": True},
    "token": {"private": [WORD]},
    "headers": {"Authorization": f"Bearer {WORD}"},
}
OF_STORES = {f"{of}_options" for of in ("storage", "other", "config")}
HERE = str(Path(__file__).parents[2])


@pytest.fixture(autouse=True)
def _nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames show all that their process has open: roots of earlier tests take 2 s in each case."""
    monkeypatch.setattr(this_process, "_contexts", [])


def frames(traceback: TracebackType | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The frames of our packages, with their variables."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        packages = ("ckpt", "storage", "sharding")
        if code.co_filename.startswith(tuple(f"{HERE}/{name}/" for name in packages)):
            yield f"{code.co_filename}:{code.co_name}", traceback.tb_frame.f_locals
        traceback = traceback.tb_next


def assert_hidden(error: BaseException | None, seen: int = 1) -> None:
    """`error`, its causes, and the variables of their frames show no secret."""
    count = 0
    while error is not None:
        for where, variables in frames(error.__traceback__):
            count += 1
            for name, value in variables.items():
                text = " ".join(shown_by(value, set()))
                assert WORD not in text and repr(KEY)[2:-1] not in text, f"{where}: {name}"
        assert WORD not in str(error)
        error = error.__cause__ or error.__context__
    assert count >= seen


def takes_options(thing: object) -> list[str]:
    """The parameters of a callable that are options of a store."""
    if not callable(thing):
        return []
    try:
        parameters = inspect.signature(thing).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in parameters if name in OF_STORES]


def public() -> list[tuple[str, Callable[..., Any]]]:
    things = {name: getattr(ckpt, name) for name in dir(ckpt) if not name.startswith("_")}
    things |= {name: getattr(operate, name) for name in operate.__all__}
    others: list[Any] = [RunPoller, DcpReader, DcpWriter]
    if importlib.util.find_spec("lightning"):  # of an extra
        others.append(importlib.import_module("ckpt.integrations.lightning").LightningCheckpoints)
    things |= {one.__name__: one for one in others}
    return [(name, thing) for name, thing in sorted(things.items()) if takes_options(thing)]


class Bad:
    """No url, step or state: whoever uses it fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"there is no {name}")

    def __repr__(self) -> str:
        return "<bad>"


@pytest.mark.parametrize(("name", "call"), public(), ids=[name for name, _ in public()])
@pytest.mark.parametrize("url", ["bad", "no-such://bucket/run", "s3://bucket/run"])
def test_no_frame_of_a_failing_call_shows_a_secret(
    name: str, call: Callable[..., Any], url: str
) -> None:
    parameters = inspect.signature(call).parameters
    named: dict[str, Any] = {option: OPTIONS for option in takes_options(call)}
    for parameter in parameters.values():
        is_one = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.name not in named and parameter.default is parameter.empty and is_one:
            named[parameter.name] = url if url != "bad" else Bad()
    try:
        made = call(**named)
    except Exception as error:
        assert_hidden(error)
    else:  # it opens nothing yet; what it keeps is looked at
        text = " ".join(shown_by(made, set()))
        assert WORD not in text and repr(KEY)[2:-1] not in text
    assert OPTIONS["secret"] == WORD and type(OPTIONS["secret"]) is str, "the caller's own"


def test_most_public_calls_take_options() -> None:
    """So that the test above looks at what there is."""
    names = {name for name, _ in public()}
    assert names > {"save", "async_save", "load", "Checkpointer", "export", "copy", "DcpWriter"}
    assert len(names) > 20


def test_options_as_a_positional_argument_are_hidden() -> None:
    with pytest.raises(Exception) as caught:
        ckpt.list_steps("no-such://bucket/run", OPTIONS)
    assert_hidden(caught.value)


def test_opening_a_store_shows_no_secret() -> None:
    options = {name: value for name, value in OPTIONS.items() if name != "encryption_key"}
    for url in ("no-such://bucket/run", "s3://bucket/run", "gs://bucket/run", "file:///tmp/x"):
        with pytest.raises(Exception) as caught:
            open_store(url, **options, encryption_key=KEY, no_such_option=3)
        assert_hidden(caught.value)


def test_hidden_options_open_what_the_others_do(tmp_path: Path) -> None:
    """A key by its bytes, a file or a function; each reads what the others wrote."""
    file = tmp_path / "key"
    file.write_bytes(KEY)
    file.chmod(0o600)
    sources: list[Any] = [KEY, bytearray(KEY), file, str(file), lambda wanted: KEY]
    for step, source in enumerate(sources):
        options = {"encryption_key": source}
        ckpt.save({"w": torch.ones(3)}, tmp_path / "run", step=step, storage_options=options)
    for source in sources:
        ckpt.forget(tmp_path / "run")
        assert (
            ckpt.load(
                {"w": torch.zeros(3)}, tmp_path / "run", storage_options={"encryption_key": source}
            ).step
            == 4
        )


def test_what_is_hidden_is_equal_to_what_it_was() -> None:
    seen: list[Any] = []

    @hides_secrets
    def look(storage_options: Any) -> None:
        seen.append(storage_options)

    look({"key": "AB", "secret": "AB", "region": "x"})
    look({"key": "CD", "url": "https://me:AB@host/x"})
    first, second = seen
    assert first["key"] == "AB" and str(first["key"]) == f"{first['key']}" == "AB"
    assert repr(first["key"]) == repr(first["secret"]) != repr(second["key"])
    assert without_secrets(first) == first and repr(without_secrets(first)) == repr(first)
    assert repr(first["region"]) == "'x'" and "AB" not in repr(second)


def test_options_of_a_command_line_are_hidden() -> None:
    words = ["ls", "x", "-o", f"secret={WORD}", "-o", f'client_kwargs={{"token": "{WORD}"}}']
    parsed = build_parser().parse_args(words)
    assert WORD not in repr(parsed) and dict(parsed.storage_options)["secret"] == WORD


def test_the_token_of_those_who_serve_is_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDPOINT_TOKEN", WORD)
    policy = partial(RetryPolicy, deadline_seconds=0.2)  # the only parent is asked for two minutes
    monkeypatch.setattr("storage.peers.relay.RetryPolicy", policy)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StorageError, match="already in use") as caught:
            ckpt.follow(["x"], str(tmp_path), serve=place)
        assert_hidden(caught.value)
    with pytest.raises(StorageError, match="peer") as caught:
        ckpt.follow(["x"], "peer://127.0.0.1")
    assert_hidden(caught.value)
    follower = ckpt.follow(["x"], f"peer://{place}")
    with pytest.raises(StorageError, match="refused") as caught:
        follower.poll()
    assert_hidden(caught.value)
    assert WORD not in " ".join(shown_by(follower, set()))
