"""Real ranks for tests: processes joined by gloo, without ports and without leftovers.

`run_ranks(n, fn, *args)` runs `fn(*args)` in `n` fresh processes that form one process group. They
are forked from one server that has already imported torch, so that a start takes a fraction of a
second. Nothing is shared between two calls: killing a rank, or leaving a group broken, harms no
later test.

`fn` must be importable (a function at the top level of a test module) and return something that
pickles.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Everything that a rank would otherwise import by itself, some of it lazily in torch: for our own
# packages that was more work than most tests. Names that cannot be imported are skipped by the fork
# server.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "pytest",
    "sharding",
    "ckpt.api",
    "ckpt.service.checkpointer",
    "tests.ranks",
)
# Set by conftest.py: this run was asked for tests without processes.
ARE_LEFT_OUT = False
# How long the other ranks may go on after one of them has failed: long enough to fail by themselves
# and say so, short enough that a collective left waiting does not cost the test its deadline.
GRACE_SECONDS = 5.0


class RanksFailed(AssertionError):
    """Ranks of a test raised, died or did not answer; the text has the traceback of each.

    `errors` has the exception of every rank that raised. `silent` names the ranks that neither
    returned nor raised: dead, or still running at the deadline.
    """

    def __init__(
        self, message: str, *, errors: dict[int, BaseException], silent: tuple[int, ...]
    ) -> None:
        super().__init__(message)
        self.errors = errors
        self.silent = silent


class _Skipped(Exception):
    """A rank skips the test; pytest's own error does not pickle."""


class _Answer(NamedTuple):
    value: Any
    error: BaseException | None
    traceback_text: str


def stop_here() -> None:
    """Stop this process. Returns when it is continued: of a signal to the process, another thread
    may be the one that takes it, and this one goes some way on until then.
    """
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def share_all() -> None:
    """Let this rank pass on what others need too, however small the states of a test are."""
    from ckpt.loading import exchange

    exchange.AGAIN_NBYTES_MAX = 0


def run_ranks(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_seconds: float = 60.0,
    group: bool = True,
    allow_dead: Sequence[int] = (),
) -> list[Any]:
    """Run `fn(*args)` on ranks 0 to n-1 of a fresh gloo group; return their results in rank order.

    `torch.distributed.get_rank()` gives a rank its number. Raises `RanksFailed` when a rank raises
    or dies, or at the deadline; then no process is left. A test that ranks skip is skipped, if no
    other rank fails.
    `group=False` starts no process group (RANK and WORLD_SIZE are set in the environment). Ranks in
    `allow_dead` may die; their result is None.
    """
    if ARE_LEFT_OUT:
        raise RuntimeError("this run leaves out ranks; mark the test with pytest.mark.ranks")
    context = _fork_server()
    scratch = Path(tempfile.mkdtemp(prefix="ranks-"))
    # By value: torch's own way of sending tensors shares memory with a process that soon ends.
    job = pickle.dumps((fn, args))
    ranks: list[tuple[BaseProcess, Connection]] = []
    try:
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            spec = _Spec(
                rank=rank,
                size=n,
                rendezvous=str(scratch / "rendezvous"),
                timeout_seconds=timeout_seconds,
                group=group,
                together=not allow_dead,
                sys_path=list(sys.path),
            )
            process = context.Process(target=_rank_main, args=(spec, job, theirs), daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        answers = _collect(ranks, time.monotonic() + timeout_seconds, set(allow_dead))
    finally:
        _end(ranks)
        shutil.rmtree(scratch, ignore_errors=True)
    return _results(n, answers, set(allow_dead), timeout_seconds)


def fork_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> None:
    """In a process of `run_ranks(1, ..., group=False)`: run `fn(*args)` on ranks that are forks of
    it, with all that it has imported: for libraries whose import takes longer than a test.

    Raises when a rank does, whose traceback is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        ranks = {}
        for rank in range(n):
            pid = os.fork()
            if pid == 0:
                spec = _Spec(
                    rank, n, f"{scratch}/rendezvous", timeout_seconds, True, True, list(sys.path)
                )
                _fork_main(spec, pickle.dumps((fn, args)))
            ranks[pid] = rank
        ended = {ranks[pid]: os.waitpid(pid, 0)[1] for pid in ranks}
    assert not any(ended.values()), f"ranks failed: {ended}"


def _fork_main(spec: _Spec, job: bytes) -> None:
    os.environ.update(RANK=str(spec.rank), LOCAL_RANK=str(spec.rank), WORLD_SIZE=str(spec.size))
    try:
        _run_job(spec, job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class _Spec(NamedTuple):
    rank: int
    size: int
    rendezvous: str
    timeout_seconds: float
    group: bool
    together: bool
    sys_path: list[str]


def _fork_server() -> ForkServerContext:
    """The server is one per test session: the first call starts it, which takes some seconds."""
    # Read by OpenMP, BLAS and gloo when they start; inherited by the server and all ranks.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _rank_main(spec: _Spec, job: bytes, answers: Connection) -> None:
    gc.freeze()  # each full collection would look through all of torch
    faulthandler.register(signal.SIGTERM, file=2, chain=True)  # it shows where it was
    sys.path[:] = spec.sys_path
    os.environ.update(RANK=str(spec.rank), LOCAL_RANK=str(spec.rank), WORLD_SIZE=str(spec.size))
    try:
        answer = _Answer(_run_job(spec, job), None, "")
    except pytest.skip.Exception as skipped:
        answer = _Answer(None, _Skipped(str(skipped)), "")
    except BaseException as error:
        answer = _Answer(None, error, traceback.format_exc())
    try:
        payload = pickle.dumps(answer)
        if answer.error is not None:
            pickle.loads(payload)  # some exceptions pickle, but cannot be built again
    except Exception:
        text = answer.traceback_text or f"the result does not pickle:\n{traceback.format_exc()}"
        payload = pickle.dumps(_Answer(None, RuntimeError(text), text))
    answers.send_bytes(payload)
    answers.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's exit: after a failure torch waits there for peers that are gone.
    os._exit(0)


def _run_job(spec: _Spec, job: bytes) -> Any:
    import torch
    import torch.distributed as dist

    from tests.versions import skip_what_torch_cannot

    skip_what_torch_cannot()
    torch.set_num_threads(1)
    fn, args = pickle.loads(job)
    if not spec.group:
        return fn(*args)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{spec.rendezvous}",
        rank=spec.rank,
        world_size=spec.size,
        timeout=timedelta(seconds=spec.timeout_seconds),
    )
    _wait_until_all_are_connected(spec)
    result = fn(*args)
    if dist.is_initialized():
        if spec.together:
            # A rank that leaves first would break collectives that the others have not finished.
            dist.barrier()
        dist.destroy_process_group()
    return result


def _wait_until_all_are_connected(spec: _Spec) -> None:
    """A rank whose own connections stand could end while others still build theirs."""
    import torch.distributed as dist

    store_class: Any = dist.FileStore  # type: ignore[attr-defined]  # torch hides it from checkers
    connected = store_class(f"{spec.rendezvous}.connected", spec.size)
    connected.set_timeout(timedelta(seconds=spec.timeout_seconds))
    connected.set(str(spec.rank), "")
    connected.wait([str(rank) for rank in range(spec.size)])


def _collect(
    ranks: list[tuple[BaseProcess, Connection]], deadline: float, allow_dead: set[int]
) -> dict[int, _Answer]:
    """Answers until all ranks gave one, or the deadline, or the end of the grace."""
    answers: dict[int, _Answer] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for ready in connection.wait(list(waiting), timeout=left):
            assert isinstance(ready, connection.Connection)
            rank = waiting.pop(ready)
            try:
                answers[rank] = pickle.loads(ready.recv_bytes())
            except EOFError:
                failed = rank not in allow_dead
            else:
                failed = answers[rank].error is not None
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    return answers


def _end(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    for process, pipe in ranks:
        pipe.close()
        process.join(timeout=1.0)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def _results(
    n: int, answers: dict[int, _Answer], allow_dead: set[int], timeout_seconds: float
) -> list[Any]:
    silent = tuple(rank for rank in range(n) if rank not in answers and rank not in allow_dead)
    errors = {rank: a.error for rank, a in sorted(answers.items()) if a.error is not None}
    if not silent and not errors:
        return [answers[rank].value if rank in answers else None for rank in range(n)]
    if not silent and all(isinstance(error, _Skipped) for error in errors.values()):
        pytest.skip(str(next(iter(errors.values()))))
    lines = [f"rank {rank} raised:\n{answers[rank].traceback_text}" for rank in errors]
    if silent:
        named = ", ".join(map(str, silent))
        lines.append(
            f"no answer from rank {named} (died, or still running after {timeout_seconds} s)"
        )
    raise RanksFailed("\n".join(lines), errors=errors, silent=silent)
