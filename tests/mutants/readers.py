"""Wrong changes of readers of foreign bytes, each found by the fuzzing of that reader."""

from __future__ import annotations

from tests.mutants.edit import Mutant

_JOINT = "ckpt/format/joint_codec.py"
_TIER = "ckpt/near/tier.py"
_BLOCKS = "storage/encoding/blocks.py"
_PEER_STORE = "storage/peers/store.py"
_KEPT = "tests/fuzz/test_fuzz.py::test_kept_inputs_are_read_or_refused"


def _fuzzed(reader: str) -> str:
    return f"tests/fuzz/test_fuzz.py::test_mutated_inputs_are_read_or_refused[{reader}]"


ALL = (
    Mutant(
        "a damaged name of a host counts",
        _TIER,
        'return name if _HOST.fullmatch(name) else ""',
        "return name",
        test=_fuzzed("near.host"),
    ),
    Mutant(
        "a damaged near record hides all others",
        _TIER,
        "        except CheckpointError as error:\n            if is_outage",
        "        except KeyError as error:\n            if is_outage",
        test=_fuzzed("near.folder"),
    ),
    Mutant(
        "a peer may answer without an end",
        _PEER_STORE,
        '        raise ValueError("an answer without a length")\n',
        "        return 0\n",
        test=_fuzzed("peers.answer"),
    ),
    Mutant(
        "memory is taken for what a peer says that it sends",
        _PEER_STORE,
        "    if _length_of(answer) <= PIECE_NBYTES:\n",
        "    if True:\n",
        test=_fuzzed("peers.answer"),
    ),
    Mutant(
        "a listing of a peer may turn in a circle",
        _PEER_STORE,
        "    if any(a >= b or not b.startswith(prefix) for a, b in pairwise(keys)):\n",
        "    if False:\n",
        test=_fuzzed("peers.answer"),
    ),
    Mutant(
        "a block that does not unpack is an error of another library",
        _BLOCKS,
        "        except self._zstd.ZstdError:\n",
        "        except KeyError:\n",
        test=_KEPT,
    ),
    Mutant(
        "a wrong tag of an encrypted block is an error of another library",
        _BLOCKS,
        "        except self._invalid:\n",
        "        except KeyError:\n",
        test=_fuzzed("encoded.encrypted"),
    ),
    Mutant(
        "FORMAT of an encrypted root needs no key",
        "storage/encoding/layout.py",
        "not hmac.compare_digest(match[5], _check(secret, match[1], data))",
        "False",
        test=_fuzzed("encoded.format"),
    ),
    Mutant(
        "a joint structure that is none is an error of Python",
        _JOINT,
        "        except (*_UNREADABLE, zlib.error) as error:\n",
        "        except (KeyError, zlib.error) as error:\n",
        test=_fuzzed("joint.structure"),
    ),
    Mutant(
        "the rest of a joint part that is none is an error of Python",
        _JOINT,
        "    except _UNREADABLE as error:\n",
        "    except KeyError as error:\n",
        test=_KEPT,
    ),
    Mutant(
        "a part may name tensors that it has not",
        _JOINT,
        '        checked_indexes(of_list, "replica_tensor", len(tensors))\n',
        "        pass\n",
        test="tests/format/test_manifest.py::"
        "test_digests_that_do_not_belong_to_the_replicas_are_refused",
    ),
    Mutant(
        "a greeting with another card than ours is an error of Python",
        "ckpt/world/liveness.py",
        "        except (TypeError, RecursionError) as error:\n",
        "        except RecursionError as error:\n",
        test="tests/protocol/test_world_counts.py::test_a_stranger_is_shown_the_door",
    ),
)
