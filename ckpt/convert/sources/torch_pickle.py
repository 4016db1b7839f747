"""What torch.save puts into pickles: tensors as views of storages that lie next to the pickle.

Both ways: `read_tree` gives the tree with a `TensorRef` for each tensor, `write_tree` is a pickle
that `torch.load(weights_only=True)` reads. No tensor's bytes pass through here.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from ckpt.convert.sources.budget import Account
from ckpt.convert.sources.pickles import Maker, Opaque, PickledObject, read_pickle
from ckpt.errors import Corrupt
from ckpt.format.datafile import NDIM_MAX
from ckpt.layout.dtypes import DTYPES, torch_dtype
from ckpt.layout.region import Shape, chunk_of, row_major_strides
from ckpt.state.typed_values import tagged

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}
SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")  # of files of torch.save
SCALARS = ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar")
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
NUMEL_MAX = 1 << 58
NAME_SHOWN_MAX = 60  # of an unknown name in each tensor that has it


class StorageRef(NamedTuple):
    """A storage next to the pickle, by its key; `dtype` is "" for one of bytes."""

    key: str
    dtype: str
    nbytes: int


class TensorRef(NamedTuple):
    """A tensor as a view of a storage; `offset` and `stride` count elements."""

    storage: StorageRef
    dtype: str
    shape: Shape
    stride: Shape
    offset: int

    @property
    def is_row_major(self) -> bool:
        """Whether its elements follow each other without gaps."""
        strides = row_major_strides(self.shape)
        return 0 in self.shape or all(
            size == 1 or have == want
            for size, have, want in zip(self.shape, self.stride, strides, strict=True)
        )


class ShardRef(NamedTuple):
    """A rank's part of a tensor of `shape`: the box of the local tensor's shape at `offset`."""

    local: TensorRef
    shape: Shape
    offset: Shape


@dataclass(frozen=True, slots=True)
class UnreadableTensor:
    """Stands for a tensor of a kind that cannot be converted, and says why."""

    reason: str


def read_tree(data: bytes | bytearray, account: Account | None = None) -> Any:
    """The tree of a pickle of torch.save: values, `TensorRef`, `UnreadableTensor` and `Opaque`.

    Charges `account` and raises like `read_pickle`.
    """
    return read_pickle(data, KNOWN, _storage_ref, account)


def _storage_ref(key: Any) -> StorageRef:
    # As torch.save writes it: "storage", a class, the key, a device, the number of elements.
    kind, storage, name, _, numel = key[:5]
    if kind != "storage" or not isinstance(storage, Opaque) or not isinstance(name, str):
        raise Corrupt("a reference to a storage that is none")
    class_name = storage.name.rpartition(".")[2]
    dtype = _STORAGES.get(class_name, "")
    if not dtype and class_name != "UntypedStorage":
        # The question mark keeps an unknown class from being taken for one of DTYPES.
        dtype = f"?{storage.name[:NAME_SHOWN_MAX]}"
    itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else 1
    return StorageRef(name, dtype, _count(numel) * itemsize)


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number < NUMEL_MAX:
        # Not the thing itself: its text may have no end.
        shown = number if type(number) is int else f"a {type(number).__name__}"
        raise Corrupt(f"{shown!s:.50} is no number of elements")
    return number


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
    # Behind requires_grad and hooks comes the metadata, if any.
    return _view(storage, getattr(storage, "dtype", ""), offset, size, stride, rest[2:])


def _tensor_of_dtype(storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
    dtype = rest[2] if len(rest) > 2 else None
    name = dtype.name[:NAME_SHOWN_MAX].removeprefix("torch.") if isinstance(dtype, Opaque) else "?"
    return _view(storage, name, offset, size, stride, rest[3:])


def _view(
    storage: Any, dtype: str, offset: Any, size: Any, stride: Any, rest: Sequence[Any]
) -> TensorRef | UnreadableTensor:
    if not isinstance(storage, StorageRef):
        raise Corrupt("a tensor without a storage")
    if dtype not in DTYPES:
        return UnreadableTensor(
            f"its dtype {dtype.removeprefix('?')} has no fixed layout in whole bytes"
        )
    # Conjugation and negation are bits of the tensor: its bytes are not yet its numbers.
    if rest and isinstance(rest[0], dict) and any(rest[0].values()):
        return UnreadableTensor("it is a lazy conjugate or negative; save tensor.resolve_conj()")
    # Before anything is built of them: a hostile shape may be long.
    if max(len(size), len(stride)) > NDIM_MAX:
        raise Corrupt(f"a tensor of {len(size)} dimensions; at most {NDIM_MAX}")
    shape = tuple(_count(extent) for extent in size)
    strides = tuple(_count(step) for step in stride)
    if len(shape) != len(strides) or len(shape) > NDIM_MAX or math.prod(shape) >= NUMEL_MAX:
        raise Corrupt(f"a shape of {len(shape)} and strides of {len(strides)} make no tensor")
    last = sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    numel = storage.nbytes // DTYPES[dtype].itemsize
    if 0 not in shape and _count(offset) + last >= numel:
        raise Corrupt(f"a tensor of shape {shape} lies outside of its storage of {numel} elements")
    return TensorRef(storage, dtype, shape, strides, _count(offset))


def _size(items: Any = ()) -> tuple[int, ...]:
    return tuple(_count(item) for item in items)


def _dict(items: Any = ()) -> dict[Any, Any]:
    """The content of an OrderedDict or Counter."""
    result = {}
    for key, value in items.items() if isinstance(items, dict) else items:
        if not isinstance(key, (str, int, float, type(None))):
            raise Corrupt(f"a key of type {type(key).__name__} in a mapping")
        result[key] = value
    return result


def _encoded(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise Corrupt("bytes in an unknown encoding")
    return text.encode("latin1")


def _refused(kind: str) -> Maker:
    return lambda *_: UnreadableTensor(f"it is {kind}")


def _shard(arguments: Any, state: Any) -> Any:
    """A DTensor, by its arguments and its attributes: a mesh of any version of torch says how many
    parts there are along each of its dims, and which of them this is.
    """
    try:
        fields = state[1] if isinstance(state, tuple) else state
        local, spec, shape = fields["_local_tensor"], fields["_spec"], _size(arguments[2])
        mesh = spec.field("mesh")
        layout, sizes = mesh.field("_layout"), getattr(mesh.field("mesh"), "shape", ())
        if layout is not None:
            axes = layout.field("axes") or [layout]
            sizes = [size for axis in axes for size in axis.field("shape")]
        offset, left = [0] * len(shape), list(shape)
        where = zip(spec.field("placements"), sizes, mesh.field("_coordinate_on_dim"), strict=True)
        for placement, parts, part in where:
            name = placement.name.rpartition(".")[2]
            dim = placement.field("dim")
            # Twice along one dim, the order of the cuts is nothing that all versions say.
            if name not in ("Shard", "Replicate") or (dim is not None and left[dim] != shape[dim]):
                return UnreadableTensor(f"it is a DTensor that is cut by {name} along dim {dim}")
            if name == "Shard":
                box = chunk_of((shape[dim],), _count(parts), _count(part))
                offset[dim], left[dim] = box.offset[0], box.shape[0]
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return UnreadableTensor("it is a DTensor that does not say how it lies")
    if not isinstance(local, TensorRef) or local.shape != tuple(left):
        return UnreadableTensor("it is a DTensor whose local tensor is another than its mesh says")
    return ShardRef(local, shape, tuple(offset))


def _part(arguments: Any, state: Any) -> Any:
    """What a rank has of a ShardedTensor, by its arguments and its state: one part, or none."""
    try:
        dtype, shape, parts = arguments[1].name[len("torch.") :], _size(arguments[2]), state[0]
        if len(parts) > 1 or len(shape) > NDIM_MAX or dtype not in DTYPES:
            return UnreadableTensor("it is a ShardedTensor of another kind than FSDP's")
        if not parts:
            none = (0,) * len(shape)
            return ShardRef(TensorRef(StorageRef("", "", 0), dtype, none, none, 0), shape, none)
        local, place = parts[0].field("tensor"), parts[0].field("metadata")
        offset, sizes = _size(place.field("shard_offsets")), _size(place.field("shard_sizes"))
    except (AttributeError, LookupError, TypeError):
        return UnreadableTensor("it is a ShardedTensor that does not say how it lies")
    if not isinstance(local, TensorRef) or local.shape != sizes:
        return UnreadableTensor("it is a ShardedTensor whose part is another than it says")
    return ShardRef(local, shape, offset)


_PARTS = {
    "torch.distributed.tensor.DTensor": _shard,
    "torch.distributed._shard.sharded_tensor.api.ShardedTensor": _part,
}


def _of_type(function: Any, kind: Any, arguments: Any, state: Any = None, *_: Any) -> Any:
    """A tensor that has attributes, such as those by which FSDP1 marks what it has gathered: they
    are nothing of a checkpoint. Those of a rank's part say where it belongs.
    """
    if isinstance(kind, Opaque) and (of_part := _PARTS.get(kind.name)) is not None:
        return of_part(arguments, state)
    make = _MAKERS.get(function.name) if isinstance(function, Opaque) else None
    is_plain = isinstance(kind, Opaque) and kind.name in _PLAIN
    if make is None or not is_plain or not isinstance(arguments, tuple) or len(arguments) > 10:
        return UnreadableTensor("it is of a subclass of torch.Tensor")
    return make(*arguments)


def _layout(name: Any) -> Opaque:
    if not isinstance(name, str):  # not the text of the thing itself: it may have no end
        raise Corrupt(f"a layout's name is a {type(name).__name__}")
    return Opaque(name)


_PLAIN = ("torch.Tensor", "torch.nn.parameter.Parameter")
_MAKERS: dict[str, Maker] = {
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_dtype,
}
_OF_PARTS = """
    device_mesh.DeviceMesh _mesh_layout._MeshLayout _mesh_layout._FlatLayout
    tensor._dtensor_spec.DTensorSpec tensor.placement_types.Shard tensor.placement_types.Replicate
    _shard.sharded_tensor.shard.Shard _shard.metadata.ShardMetadata
"""
KNOWN: dict[str, Maker | str] = {
    **_MAKERS,
    **{name: name for name in map("torch.distributed.".__add__, _OF_PARTS.split())},
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *_: data,
    "torch._utils._rebuild_qtensor": _refused("quantized"),
    "torch._utils._rebuild_sparse_tensor": _refused("sparse"),
    "torch._utils._rebuild_nested_tensor": _refused("a nested tensor"),
    "torch._utils._rebuild_wrapper_subclass": _refused("of a subclass of torch.Tensor"),
    "torch._tensor._rebuild_from_type_v2": _of_type,
    "torch._utils._rebuild_meta_tensor_no_storage": _refused("on the meta device"),
    "torch.Size": _size,
    **{name: name for name in (*SCALARS, *NAMESPACES, "torch.device", "numpy.dtype")},
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": _dict,
    "collections.Counter": _dict,
    # Its factory is code. The items follow, as those of any dict.
    "collections.defaultdict": lambda *_: {},
    "_codecs.encode": _encoded,
    # Protocol 2 writes b"" as a call of `bytes`. With a number, that would make as many zeros.
    "__builtin__.bytes": lambda *args: Opaque("builtins.bytes") if args else b"",
    "builtins.bytes": lambda *args: Opaque("builtins.bytes") if args else b"",
}


def value_of(thing: Any) -> Any:
    """What stands for a dtype, a device or a scalar of numpy; None for anything else."""
    if isinstance(thing, Opaque) and thing.name.removeprefix("torch.") in DTYPES:
        return tagged("dtype", thing.name.removeprefix("torch."))
    if not isinstance(thing, PickledObject) or not thing.args:
        return None
    first = thing.args[0]
    if thing.name == "torch.device" and isinstance(first, str):
        return tagged("device", first.partition(":")[0][:60])
    if thing.name in SCALARS and len(thing.args) == 2 and isinstance(first, PickledObject):
        kind, data = first.args[:1], thing.args[1]
        is_little = isinstance(first.state, tuple) and first.state[1:2] in (("<",), ("|",))
        if is_little and kind and re.fullmatch("b1|[iuf][1248]", str(kind[0])[:4]):
            dtype = np.dtype(kind[0])
            if isinstance(data, bytes) and len(data) == dtype.itemsize:
                return np.frombuffer(data, dtype)[0].item()
    return None


# Writing ------------------------------------------------------------------------------------


class TensorOut(NamedTuple):
    """A tensor to be written: row-major, all of the storage `key`."""

    key: str
    dtype: str
    shape: Shape


class CallOut(NamedTuple):
    """What the function of that name makes of `arguments`."""

    function: str
    arguments: tuple[Any, ...]


class StorageOut(NamedTuple):
    """The storage `key` of so many elements; `kind` is the class of it, such as
    torch.FloatStorage.
    """

    kind: str
    key: str
    numel: int


def write_tree(tree: Any) -> bytes:
    """A pickle of protocol 2 of `tree`: values, `TensorOut` where tensors are, and calls.

    `torch.load(weights_only=True)` makes the tree of it, once the storages lie next to it.
    """
    out = io.BytesIO()
    pickler = _TreePickler(out, 2)
    pickler.fast = True  # without a memo, so that the same tree makes the same bytes
    pickler.dump(_readable(tree))
    return out.getvalue()


def _readable(tree: Any) -> Any:
    """`tree` without b"", for which protocol 2 calls `bytes`; torch's reader refuses that name."""
    if type(tree) is bytes and not tree:
        return CallOut("_codecs.encode", ("", "latin1"))
    if type(tree) is dict:
        return {key: _readable(value) for key, value in tree.items()}
    return type(tree)(map(_readable, tree)) if type(tree) in (list, tuple) else tree


class _TreePickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, StorageOut):
            return "storage", named_object(thing.kind), thing.key, "cpu", thing.numel
        return None

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, TensorOut):
            thing = _call_of(thing)
        if isinstance(thing, CallOut):
            return named_object(thing.function), thing.arguments
        if callable(thing) or isinstance(thing, (torch.dtype, torch.qscheme)):
            return NotImplemented  # by its name
        raise TypeError(f"a {type(thing).__name__} is no value")


def named_object(name: str) -> Any:
    """A function or an object of a module, such as torch.Size."""
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def _call_of(tensor: TensorOut) -> CallOut:
    numel, storage = math.prod(tensor.shape), _STORAGE_OF.get(tensor.dtype)
    hooks = CallOut("collections.OrderedDict", ())
    view = (0, tensor.shape, row_major_strides(tensor.shape), False, hooks)
    # Newer dtypes, such as float8, have no storage class: they go by `_rebuild_tensor_v3`.
    if storage:
        held = StorageOut(f"torch.{storage}", tensor.key, numel)
        return CallOut("torch._utils._rebuild_tensor_v2", (held, *view))
    nbytes = numel * DTYPES[tensor.dtype].itemsize
    held = StorageOut("torch.storage.UntypedStorage", tensor.key, nbytes)
    dtype = torch_dtype(tensor.dtype)
    return CallOut("torch._utils._rebuild_tensor_v3", (held, *view, dtype))
