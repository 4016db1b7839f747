"""What the local store promises beyond the contract: crashes, full disks, short writes, links."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from storage import (
    AccessDeniedError,
    ByteRange,
    KeyExistsError,
    KeyNotFoundError,
    NoSpaceError,
    OutcomeUnknownError,
    ShortReadError,
    StorageError,
)
from storage import file_io as file_io_module
from storage import local as local_module
from storage.file_io import DirectFile, OpenFiles
from storage.local import LocalStore
from storage.store import ExclusiveCreate
from storage.testing import write_object

pytestmark = pytest.mark.syncs
KiB, MiB = 1024, 1024 * 1024


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LocalStore]:
    store = LocalStore(str(tmp_path / "root"), open_files_max=4)
    yield store
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 1 MiB of its own."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield mounted
    subprocess.run(["umount", "-l", str(mounted)], check=True)


def all_files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("root", ["/", "//"])
def test_the_top_of_the_tree_ends_every_way_up(root: str) -> None:
    """A store there once looked for its root above the root, for ever."""
    store = LocalStore(root)
    assert [*store._lineage(os.path.dirname(store._path("log/0")))] == ["/log", "/"]


def test_a_file_in_the_way_is_reported(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "root").write_bytes(b"")
    with pytest.raises(StorageError, match="a part of this path is a file; use another place"):
        store.put_if_absent("a/b", b"x")


def test_a_killed_writer_leaves_no_visible_object(tmp_path: Path) -> None:
    """SIGKILL a process in the middle of an object and of a put; list, then clean up."""
    code = (
        "import os, signal, sys\n"
        "from storage import local\n"
        "store = local.LocalStore(sys.argv[1])\n"
        "store.put_if_absent('steps/1/done', b'x')\n"
        "writer = store.create('steps/1/data', 8, part_nbytes=4).__enter__()\n"
        "writer.write_part(0, [memoryview(b'1234')])\n"
        "local.os.link = lambda *a: os.kill(os.getpid(), signal.SIGKILL)\n"
        "store.put_if_absent('steps/1/MANIFEST', b'x')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert len(all_files(tmp_path)) == 3
    store = LocalStore(str(tmp_path))
    assert [entry.key for entry in store.list("")] == ["steps/1/done"]
    assert store.abort_unfinished("steps/1/MAN") == 1
    assert store.abort_unfinished("steps/") == 1
    assert all_files(tmp_path) == ["steps/1/done"]


@pytest.mark.parametrize("direct", [False, True])
def test_a_full_disk_is_no_space_and_leaves_nothing(small_disk: Path, direct: bool) -> None:
    """Write 2 MiB to a disk of 1 MiB, by every way; it is empty afterwards and still usable."""
    store = LocalStore(str(small_disk))
    with pytest.raises(NoSpaceError):
        write_object(store, "a/b", bytes(2 * MiB), part_nbytes=512 * KiB, direct=direct)
    with pytest.raises(NoSpaceError):
        store.put_if_absent("a/c", bytes(2 * MiB))
    assert all_files(small_disk) == []
    store.put_if_absent("a/c", b"fits")


def test_a_file_size_limit_is_no_space(store: LocalStore, tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel say EFBIG, as quotas of some filesystems do."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KiB, before[1]))
    try:
        with pytest.raises(NoSpaceError, match="ulimit"):
            write_object(store, "a", bytes(MiB), part_nbytes=256 * KiB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert all_files(tmp_path) == []


def test_a_read_only_disk_denies_access(small_disk: Path) -> None:
    """Remount read-only; writing is denied with the next move, reading still works."""
    store = LocalStore(str(small_disk))
    store.put_if_absent("a", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    writes: tuple[Callable[[], object], ...] = (
        lambda: store.put_if_absent("b", b"x"),
        lambda: write_object(store, "d/b", b"x", part_nbytes=4096),
        lambda: store.delete("a"),
    )
    for write in writes:
        with pytest.raises(AccessDeniedError, match="give this user the right"):
            write()
    assert store.get("a") == b"x"


def aligned(nbytes: int) -> memoryview:
    view = memoryview(mmap.mmap(-1, nbytes))
    pattern = bytes(range(251)) * 97
    for start in range(0, nbytes, len(pattern)):
        stop = min(nbytes, start + len(pattern))
        view[start:stop] = pattern[: stop - start]
    return view


@pytest.mark.parametrize("refused_by", ["nobody", "fcntl", "pwrite", "fallocate"])
def test_direct_writes_are_right_with_any_filesystem_and_any_buffers(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, refused_by: str
) -> None:
    """Let each system call refuse as some filesystem does; aligned, odd and split buffers."""
    nbytes = 3 * MiB + 12345
    data = aligned(nbytes)
    _refuse(monkeypatch, refused_by)
    with store.create("a", nbytes, part_nbytes=MiB, direct=True) as writer:
        writer.write_part(3, [data[3 * MiB :]])  # aligned, with a tail
        writer.write_part(0, [data[:MiB]])  # aligned
        writer.write_part(1, [data[MiB : MiB + 1], data[MiB + 1 : 2 * MiB]])
        odd = memoryview(bytearray(MiB + 1))[1:]
        odd[:] = data[2 * MiB : 3 * MiB]
        writer.write_part(2, [odd])
    assert store.get("a") == data
    with store.create("b", nbytes, part_nbytes=nbytes, direct=True) as writer:
        writer.write_part(0, [data[:99], data[99:]])
    assert store.get("b") == data


def _refuse(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def direct_is_on(fd: int) -> bool:
        return bool(real_fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def without_direct(fd: int, command: int, argument: int = 0) -> int:
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return int(real_fcntl(fd, command, argument))

    def pwrite(fd: int, data: memoryview, start: int) -> int:
        if direct_is_on(fd):
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_pwrite(fd, data, start)

    def allocate(fd: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "no fallocate here")

    real_fcntl, real_pwrite = fcntl.fcntl, os.pwrite
    if call == "fcntl":
        monkeypatch.setattr(fcntl, "fcntl", without_direct)
    elif call == "pwrite":
        monkeypatch.setattr(os, "pwrite", pwrite)
    elif call == "fallocate":
        monkeypatch.setattr(file_io_module, "allocate", allocate)


def test_short_direct_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may take part of a write, of an odd length; the rest must start aligned again."""
    real_pwrite = os.pwrite
    monkeypatch.setattr(
        os,
        "pwrite",
        lambda fd, data, offset: (
            real_pwrite(fd, data[:8192], offset) - (100 if len(data) > 8192 else 0)
        ),
    )
    data = aligned(64 * KiB)
    file = DirectFile(os.open(tmp_path / "a", os.O_CREAT | os.O_RDWR), data.nbytes)
    direct_before = file._direct
    file.write([data[: 60 * KiB]], 0)
    assert file._direct == direct_before
    monkeypatch.undo()
    file.write([data[60 * KiB :]], 60 * KiB)
    file.finish(data.nbytes, durable=True)
    assert (tmp_path / "a").read_bytes() == data


def test_short_writes_and_reads_are_continued(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """System calls that move 1000 bytes at most, across the borders of buffers."""
    real_pwritev, real_preadv = os.pwritev, os.preadv
    patched = os
    monkeypatch.setattr(
        patched, "pwritev", lambda fd, v, offset: real_pwritev(fd, [v[0][:1000]], offset)
    )
    monkeypatch.setattr(
        patched, "preadv", lambda fd, v, offset: real_preadv(fd, [v[0][:1000]], offset)
    )
    data = bytes(range(256)) * 20
    view = memoryview(data)
    with store.create("a", len(data), part_nbytes=len(data)) as writer:
        writer.write_part(0, [view[:1700], view[1700:1701], view[1701:]])
    target = bytearray(len(data))
    halves = memoryview(target)
    store.get_into("a", 0, [halves[:2500], halves[2500:]])
    assert target == data


def test_the_page_cache_is_written_in_small_calls(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones would be put into fresh memory, three times as slow on a virtual machine."""
    real, sizes = os.pwritev, list[int]()

    def noted(fd: int, views: Sequence[memoryview], offset: int) -> int:
        sizes.append(sum(view.nbytes for view in views))
        return real(fd, views, offset)

    monkeypatch.setattr(os, "pwritev", noted)
    data = os.urandom(1200 * KiB)
    view, cuts = memoryview(data), [0, 1, 700 * KiB, 700 * KiB, 701 * KiB, 1200 * KiB]
    with store.create("a", len(data), part_nbytes=len(data)) as writer:
        writer.write_part(0, [view[low:high] for low, high in pairwise(cuts)])
    assert sizes == [256 * KiB] * 4 + [176 * KiB]
    assert store.get("a") == data


def test_without_link_a_rename_that_does_not_replace_is_used(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAT and some network filesystems have no hard links: EPERM."""

    def no_link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_link)
    store.put_if_absent("a/b", b"first")
    with pytest.raises(KeyExistsError):
        store.put_if_absent("a/b", b"second")
    assert store.get("a/b") == b"first"
    assert store.exclusive_create is ExclusiveCreate.ATOMIC


def test_with_neither_link_nor_rename_writing_is_refused(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both system calls refuse; the store says so, leaves nothing, and is no longer trusted."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(os, "link", unsupported)
    monkeypatch.setattr(local_module, "rename_without_replacing", unsupported)
    with pytest.raises(StorageError, match="could overwrite each other"):
        store.put_if_absent("a", b"x")
    assert all_files(tmp_path) == []
    assert store.exclusive_create is ExclusiveCreate.NONE


def test_a_repeated_link_of_nfs_counts_as_ours(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link happens, its reply is lost, the client repeats it and gets EEXIST."""
    real_link = os.link

    def link(source: str, target: str) -> None:
        real_link(source, target)
        raise FileExistsError(errno.EEXIST, "repeated", target)

    monkeypatch.setattr(os, "link", link)
    store.put_if_absent("a", b"x")
    assert all_files(tmp_path) == ["root/a"]


def test_hard_links_of_others_do_not_make_two_writers_win(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a backup by `cp -al` makes them: between the writing of the file and its publishing."""
    store.put_if_absent("a", b"first")
    real_link, others = os.link, tmp_path / "backup"
    others.mkdir()

    def link(source: str, target: str) -> None:
        real_link(source, others / os.path.basename(source))
        real_link(source, target)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(KeyExistsError):
        store.put_if_absent("a", b"second")
    with pytest.raises(KeyExistsError):
        write_object(store, "a", b"third", part_nbytes=1)
    assert store.get("a") == b"first"
    store.put_if_absent("b", b"fourth")


def test_one_of_two_writers_wins_while_a_third_process_links_what_it_sees(tmp_path: Path) -> None:
    root, others = tmp_path / "root", tmp_path / "backup"
    others.mkdir()
    stores = [LocalStore(str(root)) for _ in range(2)]
    stores[0].put_if_absent("log/first", b"")
    is_over = threading.Event()

    def link_all() -> None:
        number = 0
        while not is_over.is_set():
            for name in os.listdir(root / "log"):
                number += 1
                with contextlib.suppress(OSError):
                    os.link(root / "log" / name, others / f"{number}")

    def create(store: LocalStore, slot: int) -> bool:
        try:
            store.put_if_absent(f"log/{slot}", b"%d" % id(store))
        except KeyExistsError:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        linking = pool.submit(link_all)
        wins = []
        for slot in range(100):
            both = [pool.submit(create, store, slot) for store in stores]
            wins.append(sum(one.result() for one in both))
        is_over.set()
        linking.result()
    assert wins == [1] * 100


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("code", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
def test_a_link_without_an_answer_makes_the_outcome_unknown(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int, is_done: bool
) -> None:
    real_link = os.link

    def link(source: str, target: str) -> None:
        if is_done:
            real_link(source, target)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        with pytest.raises(OutcomeUnknownError, match="create k"):
            store.put_if_absent("k", b"v")
    if is_done:
        with pytest.raises(KeyExistsError):
            store.put_if_absent("k", b"v")
    else:
        store.put_if_absent("k", b"v")
    assert store.get("k") == b"v"


def test_an_object_whose_other_name_stays_is_there_all_the_same(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unlink(path: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        store.put_if_absent("k", b"v")
        write_object(store, "w", b"v", part_nbytes=1)
    assert [info.key for info in store.list("")] == ["k", "w"]
    assert store.abort_unfinished("") == 2
    assert all_files(tmp_path / "root") == ["k", "w"]


def test_a_directory_that_cannot_be_synced_makes_the_outcome_unknown(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object is visible when the sync of its directory fails: neither success nor failure."""

    def fail(path: str, flags: int) -> None:
        raise OSError(errno.EIO, "disk error")

    with monkeypatch.context() as patch:
        patch.setattr(local_module, "_sync_path", fail)
        for _ in range(2):  # who repeats it takes "exists" for an answer, so it must be durable
            with pytest.raises(OutcomeUnknownError):
                store.put_if_absent("a", b"x")
    with pytest.raises(KeyExistsError):
        store.put_if_absent("a", b"x")


def test_a_file_that_was_cut_is_a_short_read(store: LocalStore, tmp_path: Path) -> None:
    store.put_if_absent("a", bytes(10))
    (path,) = tmp_path.rglob("a")
    os.truncate(path, 4)
    with pytest.raises(ShortReadError, match="bytes 2 to 10 were requested, the object has 4"):
        store.get("a", ByteRange(2, 10))


@pytest.mark.parametrize("way", ["record", "file", "direct", "joint"])
def test_an_object_is_durable_before_it_has_its_name_and_its_name_afterwards(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record by inode what is synced, and when the name is given."""
    calls: list[int] = []
    fsync, link = os.fsync, os.link

    def synced(fd: int) -> None:
        calls.append(os.fstat(fd).st_ino)
        fsync(fd)

    def named(source: str, target: str) -> None:
        calls.append(0)
        link(source, target)

    store = LocalStore(str(tmp_path))
    store.put_if_absent("steps/1/first", b"x")  # its directories are known to be durable now
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "link", named)
    data = memoryview(bytes(8192))
    if way == "record":
        store.put_if_absent("steps/1/a", bytes(data))
    elif way == "joint":
        token = store.begin_joint("steps/1/a", len(data), part_nbytes=len(data))
        part = store.joint("steps/1/a", len(data), part_nbytes=len(data), token=token)
        part.write_part(0, [data])
        part.close()
        receipts = part.receipts
        store.end_joint(
            "steps/1/a", len(data), part_nbytes=len(data), token=token, receipts=receipts
        )
    else:
        with store.create(
            "steps/1/a", len(data), part_nbytes=len(data), direct=way == "direct"
        ) as writer:
            writer.write_part(0, [data])
    inodes = [os.stat(tmp_path / name).st_ino for name in ("steps/1/a", "steps/1")]
    assert calls == [inodes[0], 0, inodes[1]]


def test_sync_reaches_the_file_and_every_directory_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Record what is synced: root and all made directories once, the file's own each time."""
    store = LocalStore(str(tmp_path / "new" / "root"))
    synced: list[str] = []
    real = local_module._sync_path

    def record(path: str, flags: int) -> None:
        synced.append(os.path.relpath(path, tmp_path))
        real(path, flags)

    monkeypatch.setattr(local_module, "_sync_path", record)
    for key in ("steps/1/a", "steps/1/b"):
        with store.create(key, 1, part_nbytes=1, durable=False) as writer:
            writer.write_part(0, [memoryview(b"x")])
    assert synced == []
    store.sync(["steps/1/a", "steps/1/b"])
    assert synced == [
        "new/root/steps/1/a",
        "new/root/steps/1/b",
        ".",
        "new",
        "new/root",
        "new/root/steps",
        "new/root/steps/1",
    ]
    synced.clear()
    store.put_if_absent("steps/1/c", b"x")
    assert synced == ["new/root/steps/1"]
    with pytest.raises(KeyNotFoundError):
        store.sync(["steps/1/no-such"])


def test_many_small_reads_open_a_file_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 ranged reads over 3 files: 3 opens; over more files than are kept, no leak."""
    opened: list[str] = []
    real_open = os.open
    for i in range(8):
        store.put_if_absent(f"f{i}", bytes(range(200)))

    def count(path: str, *rest: int) -> int:
        opened.append(path)
        return real_open(path, *rest)

    monkeypatch.setattr(os, "open", count)
    target = memoryview(bytearray(4))
    for i in range(4000):
        store.get_into(f"f{i % 3}", i % 190, [target])
        assert target[0] == i % 190
    assert len(opened) == 3
    before = len(os.listdir("/proc/self/fd"))
    for i in range(400):
        store.get("f" + str(i % 8), ByteRange(1, 2))
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    store.close()
    assert len(os.listdir("/proc/self/fd")) <= before - 3


def test_a_file_deleted_by_another_process_is_noticed(store: LocalStore, tmp_path: Path) -> None:
    store.put_if_absent("a", b"x")
    store.get("a", ByteRange(0, 1))
    (tmp_path / "root" / "a").unlink()
    with pytest.raises(KeyNotFoundError):
        store.get("a", ByteRange(0, 1))


def test_a_file_in_use_outlives_its_eviction(tmp_path: Path) -> None:
    """Retire a file that a reader holds: it stays open until the reader leaves, then closes."""
    path = tmp_path / "a"
    path.write_bytes(b"hello")
    files = OpenFiles(1)
    with files.acquire(str(path)) as file:
        files.forget(str(path))
        assert os.pread(file.fd, 5, 0) == b"hello"
    assert file.fd == -1


def test_reading_a_named_pipe_or_a_directory_does_not_hang(
    store: LocalStore, tmp_path: Path
) -> None:
    """What a hostile checkpoint could contain; none of it is an object."""
    store.put_if_absent("d/a", b"x")
    os.mkfifo(tmp_path / "root" / "pipe")
    for key in ("pipe", "d", "d/a/b"):
        for read in (store.get, store.info):
            with pytest.raises(KeyNotFoundError):
                read(key)
        with pytest.raises(KeyNotFoundError):
            store.get(key, ByteRange(0, 1))
    assert [entry.key for entry in store.list("")] == ["d/a"]


def test_links_below_the_root_are_followed_and_loops_end(store: LocalStore, tmp_path: Path) -> None:
    """As caches of downloaded models have them; a link to its own parent must not list for ever."""
    (tmp_path / "blob").write_bytes(b"x")
    store.put_if_absent("d/a", b"y")
    os.symlink(tmp_path / "blob", tmp_path / "root" / "d" / "link")
    os.symlink(tmp_path / "root", tmp_path / "root" / "d" / "loop")
    assert store.get("d/link") == b"x"
    assert [entry.key for entry in store.list("")] == ["d/a", "d/link"]


def test_deleting_the_last_object_removes_its_directory(store: LocalStore, tmp_path: Path) -> None:
    """Directories at the top stay, for they are shared; a deleted one is made again."""
    for _ in range(2):
        store.put_if_absent("steps/1-a/deep/data", b"x")
        store.put_if_absent("steps/1-a/MANIFEST", b"x")
        store.delete("steps/1-a/MANIFEST")
        store.delete("steps/1-a/deep/data")
        assert os.listdir(tmp_path / "root") == ["steps"]
        assert os.listdir(tmp_path / "root" / "steps") == []


def test_nothing_is_deleted_through_a_linked_directory(store: LocalStore, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "model.safetensors").write_bytes(b"x")
    store.put_if_absent("steps/other/MANIFEST", b"y")
    os.symlink(foreign, tmp_path / "root" / "steps" / "linked")
    with pytest.raises(AccessDeniedError, match="steps/linked is a symbolic link"):
        store.delete("steps/linked/model.safetensors")
    assert (foreign / "model.safetensors").read_bytes() == b"x"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks /proc what is open")
@pytest.mark.parametrize("by", ["read", "create", "put_if_absent"])
def test_files_that_another_process_deletes_are_given_up(tmp_path: Path, by: str) -> None:
    """Else a reader holds the space of retired checkpoints, and its disk cannot be remounted."""
    store, other = LocalStore(str(tmp_path)), LocalStore(str(tmp_path))
    for name in ("a", "b"):
        store.put_if_absent(name, b"12345678")
    store.get_into("a", 0, [memoryview(bytearray(4))])
    other.delete("a")
    assert _open_and_deleted(tmp_path)
    if by == "read":
        store.get_into("b", 0, [memoryview(bytearray(4))])
    elif by == "create":
        with store.create("c", 4, part_nbytes=4) as writer:
            writer.write_part(0, [memoryview(b"1234")])
    else:
        store.put_if_absent("c", b"1234")
    assert not _open_and_deleted(tmp_path)
    store.close()
    other.close()


def _open_and_deleted(folder: Path) -> list[str]:
    links = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(path))
    return [link for link in links if link.startswith(str(folder)) and "(deleted)" in link]
