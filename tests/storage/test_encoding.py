"""Encoded objects: the contract of stores in every combination of codecs, what is read for a part
of an object, and that nothing that was changed is ever taken for what was written.

Method: EncodedStore over memory, a disk and S3; what lies beneath is read, changed and counted in
the store under it.
"""

from __future__ import annotations

import os
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import crc32c
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage import (
    AccessDeniedError,
    ByteRange,
    InvalidUrlError,
    KeyExistsError,
    KeyNotFoundError,
    Store,
    TooLargeError,
    open_store,
)
from storage.encoding.encryption_keys import EncryptionKey
from storage.encoding.store import EncodedStore, EncodingOptions
from storage.errors import CorruptObjectError
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.testing import StoreContract, write_object
from tests.servers import S3Server
from tests.stores import CountingStore

pytest.importorskip("cryptography", reason="the extra 'encode' is not installed")
pytest.importorskip("zstandard", reason="the extra 'encode' is not installed")

MIB = 1 << 20
SECRET = bytes(range(32))
OTHER = bytes(range(1, 33))
FORMAT = b"shardpoint 1 00112233445566778899aabbccddeeff 00000000\n"
CODECS: dict[str, dict[str, Any]] = {
    "aes": {"encryption_key": SECRET},
    "zstd": {"compression": "zstd"},
    "both": {"encryption_key": SECRET, "compression": "zstd:3"},
}


def encoded(inner: Store, name: str = "both", **options: Any) -> EncodedStore:
    return EncodedStore(inner, EncodingOptions.taken_from({**CODECS[name], **options}))


class Encoded(StoreContract):
    lists_nbytes = False


class TestPlainMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return EncodedStore(MemoryStore())


@pytest.mark.parametrize("codec", CODECS)
class TestEncodedMemory(Encoded):
    @pytest.fixture
    def store(self, codec: str) -> Store:
        return encoded(MemoryStore(), codec)


@pytest.mark.parametrize("codec", CODECS)
class TestEncodedDisk(Encoded):
    @pytest.fixture
    def store(self, codec: str, tmp_path: Path) -> Store:
        return encoded(LocalStore(str(tmp_path)), codec)


@pytest.mark.server
class TestEncodedS3(Encoded):
    part_nbytes = 5 * MIB

    @pytest.fixture
    def store(self, moto: S3Server) -> Iterator[Store]:
        with closing(open_store(f"s3://{moto.make_bucket()}/run", **moto.options)) as inner:
            yield encoded(inner, "both")


def numbers(nbytes: int, seed: int = 0) -> bytes:
    """Bytes of which half compress and half do not."""
    rng = random.Random(seed)
    return bytes(rng.randrange(256) if index % 2 else 7 for index in range(nbytes))


def made(inner: Store, name: str, data: bytes, key: str = "steps/a/x") -> EncodedStore:
    store = encoded(inner, name)
    store.put_if_absent("FORMAT", FORMAT)
    write_object(store, key, data, part_nbytes=5000)
    return store


@pytest.mark.parametrize("codec", CODECS)
def test_a_root_says_how_it_is_encoded_and_needs_no_more_than_its_key(codec: str) -> None:
    inner = MemoryStore()
    made(inner, codec, numbers(12_345))
    line = inner.get("FORMAT").split(b"\n")[0].decode()
    assert line.startswith("shardpoint 2 encoded "), "what readers before this refuse as newer"
    assert ("aes-256-gcm" in line, EncryptionKey(SECRET).id in line) == (codec != "zstd",) * 2
    assert ("zstd" in line) == (codec != "aes")
    reader = EncodedStore(inner, EncodingOptions(CODECS[codec].get("encryption_key")))
    assert reader.get("FORMAT") == FORMAT
    assert reader.get("steps/a/x") == numbers(12_345)
    reader.put_if_absent("log/1", b"by a writer that said nothing of compression")
    assert b"nothing of compression" not in inner.get("log/1") or codec == "zstd"
    assert encoded(inner, codec).get("log/1").startswith(b"by a writer")


def test_a_plain_root_is_what_it_was() -> None:
    data, plain, through = numbers(20_000), MemoryStore(), MemoryStore()
    for store in (plain, EncodedStore(through)):
        store.put_if_absent("FORMAT", FORMAT)
        write_object(store, "steps/a/x", data, part_nbytes=5000)
        store.put_if_absent("log/0", data)
    keys = [info.key for info in plain.list("")]
    assert keys == [info.key for info in through.list("")]
    assert [plain.get(key) for key in keys] == [through.get(key) for key in keys]
    reader = EncodedStore(counting := CountingStore(through))
    for _ in range(3):
        assert reader.get("steps/a/x", ByteRange(5, 50)) == data[5:50]
    assert counting.stats.requests["get"] == 1 + 3, "one look at FORMAT, for good"


@settings(max_examples=120, deadline=None)
@given(
    codec=st.sampled_from(sorted(CODECS)),
    data=st.one_of(st.binary(max_size=3000), st.integers(0, 3000).map(lambda n: numbers(n, n))),
    part_nbytes=st.integers(1, 1500),
    block_nbytes=st.integers(1, 600),
    rng=st.randoms(use_true_random=False),
)
def test_any_range_of_objects_of_any_size_and_cut(
    codec: str, data: bytes, part_nbytes: int, block_nbytes: int, rng: random.Random
) -> None:
    """Parts come in any order; blocks are longer than they are, or do not divide them."""
    nbytes, store = len(data), encoded(MemoryStore(), codec)
    parts = [data[start : start + part_nbytes] for start in range(0, nbytes, part_nbytes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("storage.encoding.store.BLOCK_NBYTES", block_nbytes)
        with store.create("steps/a/x", nbytes, part_nbytes=part_nbytes) as writer:
            for index in rng.sample(range(len(parts)), len(parts)):
                writer.write_part(index, [memoryview(parts[index])])
    assert store.get("steps/a/x") == data and store.info("steps/a/x").nbytes == nbytes
    for _ in range(5):
        start, end = sorted((rng.randrange(nbytes + 1), rng.randrange(nbytes + 1)))
        assert store.get("steps/a/x", ByteRange(start, end)) == data[start:end]
        middle = rng.randrange(start, end + 1)
        buffers = [memoryview(bytearray(size)) for size in (middle - start, end - middle)]
        store.get_into("steps/a/x", start, buffers)
        assert b"".join(buffers) == data[start:end]


@pytest.mark.parametrize("codec", CODECS)
def test_a_large_object_has_many_blocks_and_parts(codec: str) -> None:
    mixed = bytearray(random.Random(0).randbytes(5 * MIB + 3))
    mixed[::2] = bytes(len(mixed[::2]))
    data = bytes(mixed)
    store = encoded(counting := CountingStore(MemoryStore()), codec)
    write_object(store, "steps/a/x", data, part_nbytes=2 * MIB)
    assert store.get("steps/a/x") == data
    rng = random.Random(codec)
    for _ in range(10):
        start, end = sorted((rng.randrange(len(data)), rng.randrange(len(data))))
        assert store.get("steps/a/x", ByteRange(start, end)) == data[start:end]
    assert counting.stats.requests["write_part"] == (3 if codec == "aes" else 2)


def test_weights_take_less_and_what_does_not_compress_takes_hardly_more() -> None:
    inner = MemoryStore()
    store = encoded(inner, "zstd")
    for key, data in (("a", numbers(MIB)), ("b", os.urandom(MIB))):
        write_object(store, key, data, part_nbytes=MIB)
    sizes = {info.key: info.nbytes for info in inner.list("")}
    assert sizes["a"] < 0.52 * MIB, "half of it is one value"
    assert MIB < sizes["b"] < MIB + 200


def test_a_range_reads_its_blocks_and_the_index_once() -> None:
    data = os.urandom(8 * MIB)
    store = made(counting := CountingStore(MemoryStore()), "aes", b"")
    write_object(store, "steps/a/y", data, part_nbytes=2 * MIB)
    reader = encoded(counting, "aes")
    assert reader.get("FORMAT") == FORMAT
    before = counting.stats
    assert reader.get("steps/a/y", ByteRange(3 * MIB + 1, 3 * MIB + 2)) == data[3 * MIB + 1 :][:1]
    first = counting.stats
    assert first.requests_total - before.requests_total == 3, "size, index, block"
    assert first.bytes_read - before.bytes_read < MIB + (33 << 10)
    assert reader.get("steps/a/y", ByteRange(MIB - 1, 3 * MIB + 1)) == data[MIB - 1 : 3 * MIB + 1]
    second = counting.stats
    assert second.requests_total - first.requests_total == 1, "neighbours by one request"
    assert second.bytes_read - first.bytes_read == 4 * (MIB + 16)


def changed(inner: MemoryStore, key: str, data: bytes) -> None:
    inner.delete(key)
    inner.put_if_absent(key, data)


@pytest.mark.parametrize("codec", CODECS)
def test_no_flipped_bit_is_ever_read(codec: str) -> None:
    """Every byte of a small object, read whole and in ranges by a store that has seen nothing."""
    data = numbers(2000)
    made(inner := MemoryStore(), codec, b"")
    store = encoded(inner, codec)
    write_object(store, "steps/a/y", data, part_nbytes=1000)
    good = inner.get("steps/a/y")
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        changed(inner, "steps/a/y", bytes(bad))
        with pytest.raises(CorruptObjectError, match="steps/a/y"):
            encoded(inner, codec).get("steps/a/y")
        ranges = (ByteRange(0, 1000), ByteRange(1000, 2000))
        read: list[bytes] = []
        for byte_range in ranges:
            try:
                read.append(encoded(inner, codec).get("steps/a/y", byte_range))
            except CorruptObjectError:
                continue
            assert read[-1] == data[byte_range.start : byte_range.end]
        assert len(read) < 2 or position < 8, "the magic in front is not read for ranges"


@pytest.mark.parametrize("codec", CODECS)
def test_no_flipped_bit_of_format_is_ever_read(codec: str) -> None:
    made(inner := MemoryStore(), codec, b"")
    good = inner.get("FORMAT")
    for position in range(len(b"shardpoint 2 encoded "), len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << position % 8
        changed(inner, "FORMAT", bytes(bad))
        with pytest.raises(CorruptObjectError, match="FORMAT"):
            encoded(inner, codec).get("FORMAT")


def test_format_is_authenticated() -> None:
    """Another root's identity, with a checksum that fits, by somebody who has no key."""
    made(inner := MemoryStore(), "both", b"x")
    line, other = inner.get("FORMAT").split(b"\n")[0], FORMAT.replace(b"0011", b"1100")
    said = line.rpartition(b" ")[0]
    changed(inner, "FORMAT", said + b" %08x\n" % crc32c.crc32c(said + b"\n" + other) + other)
    with pytest.raises(CorruptObjectError, match="not made with this key"):
        encoded(inner).get("FORMAT")
    with pytest.raises(CorruptObjectError, match="not made with this key"):
        encoded(inner).put_if_absent("steps/a/y", b"")


def test_an_object_made_anew_is_not_read_by_the_old_index() -> None:
    store = made(inner := MemoryStore(), "both", numbers(9000))
    assert store.get("steps/a/x", ByteRange(0, 9)) == numbers(9000)[:9]
    inner.delete("steps/a/x")  # by another process
    store.put_if_absent("steps/a/x", b"another")
    assert store.get("steps/a/x", ByteRange(0, 7)) == b"another"
    store.delete("steps/a/x")
    encoded(inner).put_if_absent("steps/a/x", b"a third one")  # by another process
    assert store.get("steps/a/x", ByteRange(0, 7)) == b"a third"


def refused_within(nbytes_max: int, use: Callable[[], object]) -> None:
    """`use` is refused, and takes no more memory than that."""
    tracemalloc.start()
    try:
        with pytest.raises((CorruptObjectError, TooLargeError)):
            use()
        assert tracemalloc.get_traced_memory()[1] < nbytes_max
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_cut_exchanged_or_put_there_plain_is_found(codec: str) -> None:
    made(inner := MemoryStore(), codec, numbers(9000))
    store = encoded(inner, codec)
    write_object(store, "steps/b/x", numbers(9000, 1), part_nbytes=5000)
    good, other = inner.get("steps/a/x"), inner.get("steps/b/x")
    replacements = {
        "exchanged": other,
        "plain": numbers(9000),
        "empty": b"",
        "no end": good[:-1],
        "no index": good[: len(good) // 2],
        "no start": good[1:],
        "longer": good + b"\0",
        "two": good + other,
    }
    for what, data in replacements.items():
        changed(inner, "steps/a/x", data)
        for byte_range in (None, ByteRange(0, 9000)):
            with pytest.raises(CorruptObjectError, match="steps/a/x"):
                print(what, encoded(inner, codec).get("steps/a/x", byte_range)[:5])


def test_exchanged_blocks_are_found() -> None:
    """Two blocks of the same size change places: with a cipher or without."""
    for codec in ("aes", "zstd"):
        made(inner := MemoryStore(), codec, os.urandom(10_000))
        good = inner.get("steps/a/x")
        tag = 16 if codec == "aes" else 4
        first, second = good[8 : 8 + 5000 + tag], good[8 + 5000 + tag :][: 5000 + tag]
        changed(inner, "steps/a/x", good[:8] + second + first + good[8 + len(first + second) :])
        with pytest.raises(CorruptObjectError, match="block 0"):
            encoded(inner, codec).get("steps/a/x")


def test_a_wrong_or_missing_key_is_one_clear_error() -> None:
    made(inner := MemoryStore(), "both", numbers(100))
    reads: list[Callable[[Store], object]] = [
        lambda store: store.get("FORMAT"),
        lambda store: store.get("steps/a/x"),
        lambda store: store.get("steps/a/x", ByteRange(0, 5)),
        lambda store: store.info("steps/a/x"),
        lambda store: store.put_if_absent("steps/a/y", b"x"),
    ]
    for read in reads:
        with pytest.raises(
            AccessDeniedError, match=f"key {EncryptionKey(SECRET).id}: pass it as"
        ) as missing:
            read(EncodedStore(inner))
        assert "--key-file" in str(missing.value)
        with pytest.raises(AccessDeniedError, match=EncryptionKey(SECRET).id) as wrong:
            read(encoded(inner, encryption_key=OTHER))
        assert EncryptionKey(OTHER).id in str(wrong.value)
    assert [info.key for info in inner.list("")] == ["FORMAT", "steps/a/x"]


def test_options_that_do_not_fit_the_root_are_refused() -> None:
    """Nothing is written plainly by somebody who wanted it encrypted."""
    roots = {name: MemoryStore() for name in CODECS}
    for name, inner in roots.items():
        made(inner, name, b"x")
    plain = MemoryStore()
    plain.put_if_absent("FORMAT", FORMAT)
    plain.put_if_absent("steps/a/x", b"x")
    uses: list[Callable[[Store], object]] = [
        lambda store: store.put_if_absent("steps/a/z", b"secret"),
        lambda store: store.get("steps/a/x"),
    ]
    for inner, options in (
        (plain, CODECS["aes"]),
        (plain, CODECS["zstd"]),
        (roots["zstd"], CODECS["aes"]),
        (roots["aes"], CODECS["both"]),
    ):
        for use in uses:
            with pytest.raises(InvalidUrlError, match="begin a new root"):
                use(EncodedStore(inner, EncodingOptions.taken_from(dict(options))))
    for compression in ("gzip", "zstd:", "zstd:99", 3):
        with pytest.raises(InvalidUrlError, match="compression"):
            open_store("memory://x", compression=compression)


def test_keys_come_from_bytes_files_and_functions(tmp_path: Path) -> None:
    raw, digits = tmp_path / "raw", tmp_path / "hex"
    raw.write_bytes(SECRET)
    digits.write_text(SECRET.hex().upper() + "\n")
    for file in (raw, digits):
        file.chmod(0o600)
    asked: list[str] = []

    def function(key_id: str) -> bytes:
        asked.append(key_id)
        return SECRET

    made(inner := MemoryStore(), "both", numbers(100))
    for source in (SECRET, raw, str(digits), function):
        store = encoded(inner, encryption_key=source)
        assert store.get("steps/a/x") == numbers(100)
        assert store.get("steps/a/x", ByteRange(3, 5)) == numbers(100)[3:5]
    assert asked == [EncryptionKey(SECRET).id], "once for an open store, by its id"
    made(MemoryStore(), "both", b"")
    encoded(MemoryStore(), encryption_key=function).put_if_absent("a", b"x")
    assert asked[1:] == [""], "for a new root"


def test_no_message_repr_or_pickle_has_the_key(tmp_path: Path) -> None:
    secret = b"not-so-secret-31-bytes-of-a-key"
    file = tmp_path / "key"
    file.write_bytes(secret)
    file.chmod(0o600)
    sources: list[Any] = [secret, file, lambda key_id: secret, secret.decode(), 5, secret.hex()]
    for source in sources:
        with pytest.raises(InvalidUrlError) as failed:
            encoded(MemoryStore(), encryption_key=source).put_if_absent("a", b"x")
        if source not in sources[3:]:  # a path is named
            assert "31 bytes" in str(failed.value)
            assert "not-so-secret" not in str(failed.value) + repr(failed.value.__cause__)
    with pytest.raises(InvalidUrlError, match="may be the key itself") as failed:
        encoded(MemoryStore(), encryption_key=SECRET.hex()).put_if_absent("a", b"x")
    assert SECRET.hex() not in str(failed.value)
    key = EncryptionKey(SECRET)
    assert repr(key) == f"<key {key.id}>" and SECRET.hex()[:16] != key.id
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)


@pytest.mark.parametrize(("module", "codec"), [("cryptography", "aes"), ("zstandard", "zstd")])
def test_a_missing_package_is_named_with_its_extra(
    module: str, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(inner := MemoryStore(), codec, b"x")

    def missing(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    uses: list[Callable[[], object]] = [
        lambda: encoded(inner, codec).get("steps/a/x"),
        lambda: encoded(MemoryStore(), codec).put_if_absent("a", b"x"),
    ]
    for use in uses:
        with pytest.raises(InvalidUrlError, match=rf"{module}: pip install 'shardpoint\[encode\]'"):
            use()


def test_a_directory_opened_by_itself_says_through_its_manifest() -> None:
    """Its objects were written under longer keys; those of another directory fit as well, as they
    do where a directory was renamed: what belongs together is said by the manifest.
    """
    for codec in CODECS:
        inner = MemoryStore()
        store = made(inner, codec, numbers(5000), "steps/a/x.safetensors")
        store.put_if_absent("steps/a/MANIFEST", b"manifest")
        copied = MemoryStore()
        for name in ("x.safetensors", "MANIFEST"):
            copied.put_if_absent(name, inner.get(f"steps/a/{name}"))
        key = EncodingOptions(CODECS[codec].get("encryption_key"))
        for _ in range(2):
            ranged = EncodedStore(copied, key)
            assert ranged.get("x.safetensors", ByteRange(7, 99)) == numbers(5000)[7:99]
            whole = EncodedStore(copied, key)
            with pytest.raises(KeyNotFoundError):
                whole.get("FORMAT")
            assert whole.get("MANIFEST") == b"manifest"
        changed(copied, "MANIFEST", copied.get("x.safetensors"))
        with pytest.raises(CorruptObjectError, match="exchanged"):
            EncodedStore(copied, key).get("MANIFEST")


def test_a_store_above_an_encoded_one_sees_a_plain_root() -> None:
    inner = MemoryStore()
    made(inner, "both", numbers(100))
    below = encoded(inner)
    above = open_store(below)
    assert above.get("FORMAT") == FORMAT and above.get("steps/a/x") == numbers(100)
    parent = EncodedStore(MemoryStore())
    from storage import PrefixStore

    root = made(PrefixStore(parent, "runs/1"), "both", numbers(100))
    again = encoded(PrefixStore(parent, "runs/1"))
    for store in (root, again):
        assert store.get("steps/a/x") == numbers(100)


def test_bounds_are_of_what_an_object_holds() -> None:
    for codec in CODECS:
        store = encoded(inner := MemoryStore(), codec)
        store.put_if_absent("zeros", bytes(10 * MIB))
        assert store.get_bounded("zeros", 10 * MIB) == bytes(10 * MIB)
        for nbytes_max in (10 * MIB - 1, 100):
            with pytest.raises(TooLargeError):
                store.get_bounded("zeros", nbytes_max)
        refused_within(MIB, lambda store=store: store.get_bounded("zeros", 100))  # type: ignore[misc]
        assert codec == "aes" or len(inner.get("zeros")) < 5000


def test_a_frame_that_declares_more_than_a_block_is_not_unpacked() -> None:
    """Sealed as a block of ours would be: without a key anybody can."""
    import zstandard

    from storage.encoding.blocks import Zstd
    from storage.encoding.layout import Codec, Grid, encode_object

    class Bomb(Zstd):
        frame = b""

        def encode(self, data: memoryview, planes: int = 0) -> tuple[int, bytes | memoryview]:
            return 1, self.frame

    for frame in (
        zstandard.ZstdCompressor().compress(bytes(100 * MIB)),
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100 * MIB)),
        b"",
        b"no frame",
        zstandard.ZstdCompressor().compress(bytes(5)) + b"more",
    ):
        inner, bomb = MemoryStore(), Bomb()
        bomb.frame = frame
        inner.put_if_absent("a", encode_object(Codec(None, bomb), "a", bytes(5)))
        for byte_range in (None, ByteRange(0, 5)):
            with pytest.raises(CorruptObjectError, match="block 0"):
                encoded(inner, "zstd").get("a", byte_range)
        refused_within(2 * MIB, lambda inner=inner: encoded(inner, "zstd").get("a"))  # type: ignore[misc]
    assert Grid(5, 5, MIB).blocks_count == 1


def test_the_same_object_is_never_encrypted_alike() -> None:
    stored = []
    for _ in range(2):
        store = encoded(inner := MemoryStore(), "aes")
        store.put_if_absent("a", bytes(100))
        write_object(store, "b", bytes(100), part_nbytes=10)
        stored += [inner.get("a"), inner.get("b")]
        with pytest.raises(KeyExistsError):
            store.put_if_absent("a", b"")
    assert len({data[8:108] for data in stored}) == 4


def example(name: str) -> str:
    """A listing of FORMAT.md."""
    text = (Path(__file__).parent.parent.parent / "FORMAT.md").read_text()
    listing = text.split(f"<!-- example:{name} -->\n```\n")[1].split("```")[0]
    return listing


def test_the_examples_of_the_format_are_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    salts: list[int] = []

    def salt(count: int) -> bytes:
        salts.append(count)
        return b"\x55" * count

    monkeypatch.setattr("os.urandom", salt)
    for codec, name in (("zstd", "encoded"), ("aes", "encrypted")):
        store = encoded(inner := MemoryStore(), codec)
        store.begin_root("00112233445566778899aabbccddeeff")
        store.put_if_absent("log/7", b"hello")
        lines = example(name).splitlines()
        assert inner.get("log/7") == bytes.fromhex(" ".join(line[8:] for line in lines))
        assert store.get("log/7") == b"hello"
    assert salts == [32]
    both = encoded(inner := MemoryStore(), "both")
    first, second = example("encoded-format").splitlines(keepends=True)
    both.put_if_absent("FORMAT", second.encode())
    assert inner.get("FORMAT") == (first + second).encode()


def test_keys_that_are_none_or_anyones_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.key"
    file.write_bytes(SECRET)
    for mode in (0o604, 0o644, 0o602):
        file.chmod(mode)
        with pytest.raises(InvalidUrlError, match=f"mode {mode:o}.*chmod 600"):
            encoded(MemoryStore(), encryption_key=str(file)).put_if_absent("a", b"x")
    file.chmod(0o600)
    encoded(MemoryStore(), encryption_key=str(file)).put_if_absent("a", b"x")
    with pytest.raises(InvalidUrlError, match="32 zeros"):
        encoded(MemoryStore(), encryption_key=bytes(32)).put_if_absent("a", b"x")


def test_no_attribute_of_a_store_shows_its_key() -> None:
    store = encoded(MemoryStore(), encryption_key=SECRET)
    store.put_if_absent("a", b"x")
    seen: set[int] = set()

    def shown(thing: object, depth: int) -> Iterator[str]:
        yield repr(thing)
        own = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ())]
        for value in [*own, *getattr(thing, "__dict__", {}).values()]:
            if depth and id(value) not in seen:
                seen.add(id(value))
                yield from shown(value, depth - 1)

    text = " ".join(shown(store, 6))
    assert repr(SECRET)[2:-1] not in text and SECRET.hex() not in text


def test_no_variable_of_a_traceback_shows_a_key(tmp_path: Path) -> None:
    """Pages of errors show the variables of every frame."""
    nearly = b"thirty-one-bytes-that-are-a-key"
    short, open_to_all = tmp_path / "short", tmp_path / "open"
    short.write_bytes(nearly)
    open_to_all.write_bytes(nearly + b"s")
    short.chmod(0o600)
    open_to_all.chmod(0o644)
    wrong = tmp_path / "wrong"
    wrong.write_bytes(nearly + b"s")
    wrong.chmod(0o600)
    made(inner := MemoryStore(), "aes", b"x")
    for source in (short, open_to_all, wrong, nearly):
        with pytest.raises((InvalidUrlError, AccessDeniedError)) as failed:
            encoded(inner, "aes", encryption_key=source).get("FORMAT")
        assert "31 bytes" in str(failed.value) or source not in (short, nearly)
        own = [entry for entry in failed.traceback if "storage/encoding" in str(entry.path)]
        shown = repr([entry.locals for entry in own])
        assert own and "thirty-one" not in shown, source
