"""One sharded parameter in all its forms: shards, states, memory, extensions, what users put there.

Method: small units whose parameters are looked at in every phase of a step, against the arithmetic
of `torch.chunk`, and against torch's own engine where it says the same. Rows F1 to F15.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map

import sharding
from ckpt.layout.tensor import memory_of
from sharding.dtensor.store import DTensorStore
from sharding.engine.store import State
from tests.sharding.fully_scenarios import (
    assert_close,
    claims,
    loss_of,
    ones,
    reference,
    sharded,
    train,
    values,
    whole_mesh,
)
from tests.sharding.models import WIDTH, batches, build, uneven

pytestmark = pytest.mark.ranks


class Plain(nn.Module):
    """One parameter, which is added up."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, math.prod(shape) + 1).view(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.sum()


def store_of(module: Any) -> DTensorStore:
    store: DTensorStore = module.fsdp_group.store
    return store


# F1, F2, F3 --------------------------------------------------------------------------------------


def rows_are_cut_as_chunk_cuts_and_padded_once() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for rows in (7, 3, 8, 1, size):
        whole = Plain(rows, 2).weight.detach().clone()
        module: Any = sharding.fully_shard(Plain(rows, 2), mesh=whole_mesh())
        param = store_of(module).params[0]
        chunks = [*whole.chunk(size), *[whole[:0]] * size]
        assert torch.equal(module.weight.to_local(), chunks[rank])
        assert module.weight.to_local().shape == (len(chunks[rank]), 2)
        assert module.weight.shape == whole.shape and module.weight.placements == (Shard(0),)
        assert param.buffer.numel() == len(chunks[0]) * 2
        assert param.buffer.sum() == chunks[rank].sum()  # zeros behind
        ours, theirs = param.buffer, module.weight.to_local()
        assert ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()
        assert torch.equal(module.weight.full_tensor(), whole)
        torch_module: Any = sharded_by_torch(Plain(rows, 2))
        assert torch.equal(torch_module.weight.to_local(), module.weight.to_local())
        assert torch_module.weight.placements == module.weight.placements


def sharded_by_torch(module: nn.Module, **kwargs: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=whole_mesh(), **kwargs)


def other_dims_are_cut_exactly() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    for dim in (1, 2, -1):
        whole = Plain(3, size, 2 * size).weight.detach().clone()
        module: Any = sharding.fully_shard(
            Plain(3, size, 2 * size), shard_placement_fn=lambda p, dim=dim: Shard(dim)
        )
        assert module.weight.placements == (Shard(dim % 3),)
        assert torch.equal(module.weight.to_local(), whole.chunk(size, dim)[rank])
        module.unshard()
        assert torch.equal(module.weight, whole)
        module.reshard()
        weights = torch.randn(3, size, 2 * size, generator=torch.Generator().manual_seed(0))
        module(torch.ones(()))
        module.unshard()
        (module.weight * weights * (rank + 1)).sum().backward()
        mean = sum(range(1, size + 1)) / size
        torch.testing.assert_close(module.weight.grad.full_tensor(), weights * mean)


def what_cannot_be_cut_is_refused_by_name() -> None:
    size = dist.get_world_size()
    cases: list[tuple[nn.Module, Any, type[Exception], str]] = [
        (Plain(4, 4), lambda p: Shard(2), AssertionError, "weight: .*2 dims"),
        (Plain(4, size + 1), lambda p: Shard(1), NotImplementedError, "weight: dim 1 .* divide"),
        (Plain(4, 4), lambda p: Replicate(), ValueError, "weight: .*Shard"),
        (Plain(4, 4), lambda p: 1, ValueError, "weight: .*Shard"),
    ]
    scalar, strided = Plain(1), Plain(4, 4)
    scalar.weight = nn.Parameter(torch.ones(()))
    strided.weight = nn.Parameter(torch.ones(4, 6).t())
    cases.append((scalar, None, ValueError, "weight: scalar"))
    cases.append((strided, None, NotImplementedError, "weight: is not contiguous"))
    for module, placing, error, text in cases:
        with pytest.raises(error, match=text):
            sharding.fully_shard(module, shard_placement_fn=placing)


def modules_and_arguments_that_cannot_be_are_refused() -> None:
    fully_shard: Any = sharding.fully_shard
    size = dist.get_world_size()
    with pytest.raises(ValueError, match="no forward"):
        fully_shard(nn.ModuleList([Plain(2)]))
    with pytest.raises(ValueError, match="takes modules, got int"):
        fully_shard(3)
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    module = fully_shard(Plain(2))
    with pytest.raises(ValueError, match="called on it before"):
        fully_shard(module)
    for wrong in (size + 1, 0):
        with pytest.raises(ValueError, match=f"reshard_after_forward={wrong}"):
            fully_shard(Plain(2), reshard_after_forward=wrong)
    with pytest.raises(AssertionError, match="cannot be copied"):
        copy.deepcopy(module)
    cube = init_device_mesh("cpu", (size, 1, 1), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(ValueError, match=r"one axis .* or two"):
        fully_shard(Plain(2), mesh=cube)
    with pytest.raises(AssertionError, match="names"):
        fully_shard(Plain(2), mesh=init_device_mesh("cpu", (size, 1)))


# F4, F5 ------------------------------------------------------------------------------------------


def states_follow_forward_and_backward() -> None:
    model = sharded("ours", build("uneven"))
    root, inner = store_of(model), store_of(model[1])
    log: list[tuple[str, State, State]] = []

    def note(what: str) -> None:
        log.append((what, root.state, inner.state))

    model[0].register_forward_hook(lambda m, a, o: note("0"))
    model[1][0].register_forward_hook(lambda m, a, o: note("1"))
    model[2].register_forward_hook(lambda m, a, o: note("2"))
    out = model(ones())
    note("forward")
    out.register_hook(lambda g: note("backward"))
    out.sum().backward()
    note("end")
    sharded_, whole = State.SHARDED, State.UNSHARDED
    assert log == [
        ("0", whole, sharded_),
        ("1", whole, whole),
        ("2", whole, sharded_),
        ("forward", whole, sharded_),
        ("backward", whole, State.GATHERING),  # early, for the next
        ("end", sharded_, sharded_),
    ]
    assert isinstance(model[1][0].weight, DTensor)
    with torch.no_grad():
        model(ones())
    assert root.state is sharded_  # torch keeps it, and does not see what is written meanwhile
    model[1].unshard()
    assert not isinstance(model[1][0].weight, DTensor)
    model[1].reshard()
    model[1].reshard()
    assert isinstance(model[1][0].weight, DTensor)


def what_is_frozen_stays_frozen() -> None:
    for frees in (True, False):
        model = sharded("ours", build("even"), reshard_after_forward=frees)
        model[1][0].weight.requires_grad_(False)
        seen: list[bool] = []
        model[1][0].register_forward_hook(
            lambda m, a, o, seen=seen: seen.append(m.weight.requires_grad)
        )
        model(ones()).sum().backward()
        assert model[1][0].weight.grad is None and model[1][0].bias.grad is not None
        model[1][0].weight.requires_grad_(True)
        model(ones()).sum().backward()
        assert seen == [False, True] and model[1][0].weight.grad is not None
    model = sharded("ours", build("even"))
    model.requires_grad_(False)
    assert not model(ones()).requires_grad


def gathered_parameters_are_the_same_objects_for_ever() -> None:
    class Big(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # 7 rows: padding on the last rank; large enough for memory that moves by pages.
            self.weight = nn.Parameter(torch.randn(7, 300_000))
            self.bias = nn.Parameter(torch.randn(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight[:, :3]).sum() + self.bias.sum()

    for make in (Big, lambda: Plain(5, 2)):
        torch.manual_seed(0)
        module: Any = nn.Sequential(make())
        wanted = [p.detach().clone() for p in module.parameters()]
        sharding.fully_shard(module[0])
        sharding.fully_shard(module)
        store = store_of(module[0])
        seen: list[tuple[int, ...]] = []
        shapes: list[bool] = []

        def look(
            m: nn.Module, args: Any, wanted: Any = wanted, seen: Any = seen, shapes: Any = shapes
        ) -> None:
            params = list(m.parameters(recurse=False))
            assert all(isinstance(p, nn.Parameter) for p in params)
            assert not any(isinstance(p, DTensor) for p in params)
            seen.append(tuple(id(p) for p in params))
            shapes.append(all(torch.equal(p, w) for p, w in zip(params, wanted, strict=True)))

        module[0].register_forward_pre_hook(look)
        for _ in range(3):
            module(torch.ones(3 if make is Big else 1)).sum().backward()
            assert store.gathered_nbytes == 0
            if make is not Big:
                assert store.memory.tensors[0].untyped_storage().nbytes() == 0
        assert len(set(seen)) == 1 and all(shapes)


# F9 ----------------------------------------------------------------------------------------------


def precision_is_that_of_the_policy() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded("ours", build("even"), mp_policy=policy)
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda m, a, o: seen.extend([m.weight.dtype, a[0].dtype]))
    model.set_requires_gradient_sync(False)
    model(ones()).float().sum().backward()
    assert seen == [torch.bfloat16] * 2
    store = store_of(model)
    assert {kept.grad.dtype for kept in store._kept.values()} == {torch.float32}
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    model(ones()).float().sum().backward()
    assert not store._kept
    assert all(p.grad.dtype is torch.float32 for p in model.parameters())
    # One that is not floating is left as it is.
    module: Any = Plain(4)
    module.index = nn.Parameter(torch.arange(4), requires_grad=False)
    sharding.fully_shard(module, mp_policy=policy)
    module.unshard()
    assert module.weight.dtype is torch.bfloat16 and module.index.dtype is torch.int64


def dtypes_are_read_when_they_are_needed() -> None:
    model = sharded("ours", build("even")).double()
    model(ones().double()).sum().backward()
    assert all(p.dtype is p.grad.dtype is torch.float64 for p in model.parameters())


def trainable_parameters_of_two_dtypes_need_a_dtype_for_reductions() -> None:
    for reduce_dtype in (None, torch.float32):
        module: Any = nn.Sequential(Plain(4), Plain(4).double())
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        sharding.fully_shard(module, mp_policy=policy)
        if reduce_dtype is None:
            with pytest.raises(AssertionError, match=r"0.weight has .*1.weight has"):
                module(torch.ones(2))
        else:
            module(torch.ones(2)).sum().backward()
            assert module[1].weight.grad.dtype is torch.float64


def gradients_of_all_steps_share_what_describes_them() -> None:
    model = sharded("ours", build("uneven"))
    seen: dict[str, list[Any]] = {}
    for _, mine in batches(3):
        loss_of(model, mine).backward()
        for name, param in model.named_parameters():
            seen.setdefault(name, []).append(param.grad._spec)
            assert param.grad.placements == param.placements and param.grad.shape == param.shape
            param.grad = None
    assert all(spec is specs[0] for specs in seen.values() for spec in specs)


# F10 ---------------------------------------------------------------------------------------------


def offloaded_shards_lie_in_the_hosts_memory() -> None:
    for pin in (False, True):
        model = sharded("ours", build("uneven"), offload_policy=CPUOffloadPolicy(pin_memory=pin))
        for _, mine in batches(2):
            loss_of(model, mine).backward()  # twice: the second is added to the first
        for param in model.parameters():
            assert param.to_local().device.type == param.grad.to_local().device.type == "cpu"
        train(sharded("ours", build("uneven"), offload_policy=CPUOffloadPolicy(pin_memory=pin)))


# F11 ---------------------------------------------------------------------------------------------


class Boxed(torch.Tensor):
    """A tensor of a class of its own, which operations on shards keep."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, requires_grad=data.requires_grad
        )

    def __init__(self, data: torch.Tensor) -> None:
        self.data_ = data

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.data_})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map(lambda a: a.data_ if isinstance(a, Boxed) else a, (args, kwargs or {}))
        out = func(*bare[0], **bare[1])
        kind = next(type(a) for a in args if isinstance(a, Boxed))
        keeps = ("detach", "new_zeros", "slice", "view", "as_strided", "clone", "split", "chunk")
        if any(name in str(func) for name in keeps):
            return tree_map(lambda a: kind(a) if isinstance(a, torch.Tensor) else a, out)
        return args[0] if "copy_" in str(func) else out


class Halved(Boxed):
    """Float32 values whose shards are sent in half precision."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        calls.append(f"pre {mesh.size()}")
        return (self.data_.half(),), ("told", self.data_.shape)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        calls.append(f"post {metadata[0]} {out is not None}")
        (half,) = outputs
        if out is not None:
            out.copy_(half)
            return None
        full = half.to(param_dtype)
        return full, (full,)


class HalvedWithContext(Halved):
    """The same, which asks for everything there is."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        calls.append(f"{tuple(outer_size)} {type(module).__name__} {mp_policy.param_dtype}")
        return (self.data_.half(),), ("told", self.data_.shape)


class Released(Halved):
    """The same, which has no need of what was gathered once it has made a tensor of it."""

    answer: Any = True

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> Any:
        return self.answer


calls: list[str] = []


def extensions_may_release_what_was_gathered() -> None:
    class Seeing(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            taken.append(store_of(self).gathered_nbytes)
            return super().forward(x)

    size, taken = dist.get_world_size(), []
    results = []
    for kind in (Released, Halved):
        module: Any = Seeing(2 * size, 3)
        module.weight = nn.Parameter(kind(module.weight.detach()), requires_grad=True)
        sharding.fully_shard(module, reshard_after_forward=False)
        for _ in range(2):
            out = module(torch.ones(()))
            out.backward()
        results.append((float(out), module.weight.grad.to_local().tolist()))
    assert results[0] == results[1]
    assert taken == [0, 0, 12 * size, 12 * size], taken  # two bytes each of what is sent

    class Sharing(Released):
        def fsdp_post_all_gather(self, outputs: Any, *args: Any, out: Any = None) -> Any:
            return outputs[0], outputs

    module = Plain(2 * size, 3)
    module.weight = nn.Parameter(Sharing(module.weight.detach()))
    sharding.fully_shard(module)
    with pytest.raises(AssertionError, match=r"weight: .*shares their memory; return False"):
        module(torch.ones(()))
    Wrong = type("Wrong", (Released,), {"answer": 1})
    module = Plain(2 * size, 3)
    module.weight = nn.Parameter(Wrong(module.weight.detach()))
    with pytest.raises(AssertionError, match=r"weight: fsdp_should_release.* returned 1, expected"):
        sharding.fully_shard(module)


def placements_of_a_newer_torch_are_refused_by_name() -> None:
    class BlockShard(Shard):
        def __repr__(self) -> str:
            return "BlockShard((4,))"

    module = nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"weight: shard_placement_fn returned BlockShard"):
        sharding.fully_shard(module, shard_placement_fn=lambda param: BlockShard(0))
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))
    spread: Any = DTensor.from_local(torch.ones(2, 4), mesh["ep"], [BlockShard(0)], run_check=False)
    module.weight = nn.Parameter(spread)
    with pytest.raises(NotImplementedError, match=r"weight: has the placement BlockShard"):
        sharding.fully_shard(module, mesh=mesh["dp"])


def extensions_say_what_is_gathered_and_what_comes_of_it() -> None:
    size = dist.get_world_size()
    for kind in (Halved, HalvedWithContext):
        calls.clear()
        module: Any = Plain(2 * size, 3)
        module.weight = nn.Parameter(kind(module.weight.detach()), requires_grad=True)
        sharding.fully_shard(module)
        model: Any = sharding.fully_shard(nn.Sequential(module))
        for _ in range(2):
            model(torch.ones(())).backward()
        out = model(torch.ones(()))
        assert float(out) == sum(range(1, 6 * size + 1))
        assert calls[1] == "post told False" and calls[3::2] == ["post told True"] * len(
            calls[3::2]
        )
        assert calls[0] == (f"pre {size}" if kind is Halved else f"({2 * size}, 3) FSDPPlain None")
        grad = module.weight.grad.to_local()
        assert grad.tolist() == [[2.0] * 3] * 2 and store_of(module).gathered_nbytes == 0
        (made,) = store_of(module)._gatherings[0]._made
        assert made.untyped_storage().nbytes() == 0  # the extension's own memory too


class Scaled(torch.Tensor):
    """Values times a scale, which is an attribute; operations see the product."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: float) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), dtype=torch.float32
        )

    def __init__(self, values: torch.Tensor, scale: float) -> None:
        self.values_, self.scale = values, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner: Any, scale: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["values_"], scale)

    def __repr__(self) -> str:
        return f"Scaled({self.values_}, {self.scale})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.as_strided.default):
            return Scaled(func(args[0].values_, *args[1:], **kwargs or {}), args[0].scale)
        plain = tree_map(lambda a: a.values_ * a.scale if isinstance(a, Scaled) else a, args)
        return func(*plain, **kwargs or {})


class Rescaled(Boxed):
    """Shards whose values are sent times another scale at each gather."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        scales.append(2.0 ** len(scales))
        rows = -(-outer_size[0] // mesh.size())
        sent = self.data_.new_zeros((rows, *outer_size[1:]))
        sent[: len(self.data_)] = self.data_ / scales[-1]
        return (sent,), scales[-1]

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        if out is None:
            return Scaled(outputs[0], metadata), outputs
        # As float8 weights do it: the memory is that of the gather, and the scale comes with it.
        assert isinstance(out, Scaled)
        assert out.values_.data_ptr() == outputs[0].data_ptr()
        out.scale = metadata
        return None


scales: list[float] = []


def what_an_extension_has_beside_memory_is_that_of_the_last_gather() -> None:
    size = dist.get_world_size()
    for rows in (2 * size, 2 * size - 1):
        trained = {}
        for which in ("ours", "torch", "plain"):
            scales.clear()
            module: Any = Plain(rows, 3)
            if which != "plain":
                module.weight = nn.Parameter(Rescaled(module.weight.detach()))
                shard = sharding.fully_shard if which == "ours" else torch_fsdp.fully_shard
                shard(module)
            outputs = []
            for _ in range(3):
                out = module(torch.ones(()))
                out.backward()
                outputs.append(float(out))
            grad = module.weight.grad
            trained[which] = (outputs, (grad if which == "plain" else grad.full_tensor()).tolist())
            assert which == "plain" or scales[:3] == [1.0, 2.0, 4.0]
        assert trained["ours"] == trained["torch"] == trained["plain"], (rows, trained)


def halves_of_extensions_and_wrong_sizes_are_refused() -> None:
    class OnlyPre(Boxed):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            raise AssertionError("never called")

    module: Any = Plain(4)
    module.weight = nn.Parameter(OnlyPre(module.weight.detach()), requires_grad=True)
    with pytest.raises(AssertionError, match=r"weight: .*OnlyPre has fsdp_pre_all_gather but not"):
        sharding.fully_shard(module)
    size = dist.get_world_size()
    module = Plain(2 * size - 1, 3)
    module.weight = nn.Parameter(Halved(module.weight.detach()), requires_grad=True)
    sharding.fully_shard(module)
    if dist.get_rank() == size - 1:  # the others would wait for it
        with pytest.raises(AssertionError, match="weight: is cut unevenly"):
            module.unshard()


def extensions_may_be_put_on_shards_later() -> None:
    import types

    size = dist.get_world_size()
    module: Any = sharding.fully_shard(Plain(size, 2))
    local = memory_of(module.weight)

    def pre(self: Any, mesh: Any) -> Any:
        return (self * 2,), None

    def post(self: Any, outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)

    local.fsdp_pre_all_gather = types.MethodType(pre, local)  # type: ignore[attr-defined]
    local.fsdp_post_all_gather = types.MethodType(post, local)  # type: ignore[attr-defined]
    for _ in range(2):
        assert float(module(torch.ones(()))) == sum(range(1, 2 * size + 1)) * 2
        module.reshard()


# F12 ---------------------------------------------------------------------------------------------


def aliases(module: Any) -> bool:
    """Whether every DTensor lies in its padded buffer."""
    return all(
        p.local.untyped_storage().data_ptr() == p.buffer.untyped_storage().data_ptr()
        for p in store_of(module).params
    )


def loads_and_conversions_are_followed() -> None:
    model, other = sharded("ours", build("uneven", 1)), sharded("ours", build("uneven", 2))
    before = model.state_dict()
    model.load_state_dict(other.state_dict())
    # Nothing moved: dicts that were taken before stay live.
    for name, param in model.named_parameters():
        assert memory_of(before[name]).data_ptr() == param.to_local().data_ptr()
    wanted = values(other)
    dicts = {name: value.clone() for name, value in other.state_dict().items()}
    model.load_state_dict(dicts, assign=True)
    assert aliases(model) and aliases(model[1])
    assert_close(values(model), wanted, "assigned")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        torch.testing.assert_close(model(ones()), other(ones()))
    model(ones()).sum().backward()
    optimizer.step()
    assert any(not torch.equal(value, wanted[name]) for name, value in values(model).items())
    model.double()
    assert aliases(model) and aliases(model[1])
    assert all(p.dtype is torch.float64 for p in model.parameters())
    # Through a module in the middle, which no hook sees.
    model[1][0].float()
    model[1][2].float()
    model[1].unshard()
    assert model[1][0].weight.dtype is torch.float32 and aliases(model[1])


def state_dicts_show_shards_in_every_state() -> None:
    model = sharded("ours", build("uneven"))
    wanted = values(model)
    for moment in ("new", "after eval", "between", "unsharded"):
        if moment == "after eval":
            with torch.no_grad():
                model(ones())
        elif moment == "between":
            out = model(ones())
        elif moment == "unsharded":
            model.unshard()
        state_dict = model.state_dict()
        assert all(isinstance(value, DTensor) for value in state_dict.values()), moment
        assert_close({k: v.full_tensor() for k, v in state_dict.items()}, wanted, moment)
        if moment == "between":
            out.sum().backward()


def what_does_not_fit_is_refused_by_name() -> None:
    model = sharded("ours", build("uneven"))
    model(ones())
    model.reshard()
    model[0].weight = nn.Parameter(torch.ones(7, WIDTH))
    with pytest.raises(RuntimeError, match=r"0\.weight: was replaced by a Parameter"):
        model(ones())


def models_on_meta_are_filled_after_sharding() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = uneven()
    sharded("ours", model)
    with pytest.raises(RuntimeError, match=r"meta device .*0\.weight, 0\.bias"):
        model(ones())
    model.to_empty(device="cpu")
    assert aliases(model) and aliases(model[1])
    wanted = build("uneven")
    for (name, param), plain in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert not param.is_meta, name
        with torch.no_grad():
            param.copy_(distribute_tensor(plain.detach(), param.device_mesh, param.placements))
    train(model)
    assert_close(values(model), reference("uneven"), "from meta")


# F13, F14, F15 -----------------------------------------------------------------------------------


def shared_owners_and_own_setters_are_respected() -> None:
    class Counts(nn.Module):
        sets = 0

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def __setattr__(self, name: str, value: Any) -> None:
            if name == "weight":
                Counts.sets += 1
            super().__setattr__(name, value)

    first, second = Counts(), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model: Any = nn.Sequential(second)
    model.first = first
    sharding.fully_shard(model)
    sets = Counts.sets
    assert len(list(model.parameters())) == 1
    model.unshard()
    assert first.weight is second.weight and not isinstance(second.weight, DTensor)
    assert Counts.sets == sets + 1
    model.reshard()
    assert first.weight is second.weight and isinstance(second.weight, DTensor)
    assert Counts.sets == sets + 2
    rnn: Any = sharding.fully_shard(nn.GRU(4, 4, batch_first=True))
    for _ in range(2):
        rnn(torch.ones(2, 3, 4))[0].sum().backward()
    assert all(p.grad is not None for p in rnn.parameters())


def user_marks_on_parameters_stay() -> None:
    module: Any = Plain(4)
    module.weight.is_special = True
    sharding.fully_shard(module)
    assert module.weight.is_special


test_on_two_ranks = claims(
    2,
    [
        rows_are_cut_as_chunk_cuts_and_padded_once,
        other_dims_are_cut_exactly,
        what_cannot_be_cut_is_refused_by_name,
        modules_and_arguments_that_cannot_be_are_refused,
        states_follow_forward_and_backward,
        what_is_frozen_stays_frozen,
        gathered_parameters_are_the_same_objects_for_ever,
        precision_is_that_of_the_policy,
        gradients_of_all_steps_share_what_describes_them,
        dtypes_are_read_when_they_are_needed,
        trainable_parameters_of_two_dtypes_need_a_dtype_for_reductions,
        offloaded_shards_lie_in_the_hosts_memory,
        extensions_say_what_is_gathered_and_what_comes_of_it,
        extensions_may_release_what_was_gathered,
        placements_of_a_newer_torch_are_refused_by_name,
        what_an_extension_has_beside_memory_is_that_of_the_last_gather,
        halves_of_extensions_and_wrong_sizes_are_refused,
        extensions_may_be_put_on_shards_later,
        loads_and_conversions_are_followed,
        state_dicts_show_shards_in_every_state,
        what_does_not_fit_is_refused_by_name,
        models_on_meta_are_filled_after_sharding,
        shared_owners_and_own_setters_are_respected,
        user_marks_on_parameters_stay,
    ],
)


# Four ranks --------------------------------------------------------------------------------------


def a_smaller_shard_is_kept_between_forward_and_backward() -> None:
    for rows in (8, 7, 5, 3):
        whole = Plain(rows, 2).weight.detach().clone()
        inner: Any = Plain(rows, 2)
        inner.weight.requires_grad_(True)
        sharding.fully_shard(inner, reshard_after_forward=2)
        model: Any = sharding.fully_shard(nn.Sequential(inner))
        x = torch.ones((), requires_grad=True)
        out = model(x)
        kept = inner.weight
        assert store_of(inner).state is State.SHARDED_POST_FORWARD
        assert kept.placements == (Replicate(), Shard(0)) and kept.device_mesh.shape == (2, 2)
        assert kept.requires_grad and torch.equal(kept.full_tensor(), whole)
        assert store_of(inner).gathered_nbytes == 0
        out.backward()
        assert torch.equal(inner.weight.grad.full_tensor(), torch.ones(rows, 2))
        assert float(x.grad) == float(whole.sum())
        model(torch.ones(()))
        inner.reshard()
        assert inner.weight.placements == (Shard(0),)
        inner.set_reshard_after_forward(True)
        model(torch.ones(()))
        assert store_of(inner).state is State.SHARDED
    frozen: Any = Plain(8)
    frozen.weight.requires_grad_(False)
    sharding.fully_shard(frozen, reshard_after_forward=2)
    model = sharding.fully_shard(nn.Sequential(frozen))
    model(torch.ones((), requires_grad=True))
    assert store_of(frozen).state is State.SHARDED_POST_FORWARD and not frozen.weight.requires_grad


def hybrid_placements_repeat_and_shard() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module: Any = sharding.fully_shard(Plain(3, 2), mesh=mesh)
    assert module.weight.placements == (Replicate(), Shard(0))
    rank = mesh.get_local_rank("shard")
    assert torch.equal(module.weight.to_local(), Plain(3, 2).weight.chunk(2)[rank])


def tensor_parallel_parameters_are_cut_as_their_local_tensors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(96.0).view(8, 12)
    for placement, dim, text in (
        (Shard(0), 0, "StridedShard"),
        (Shard(1), 0, "Shard(dim=0)"),
        (Replicate(), 0, "Shard(dim=0)"),
        (Shard(0), 1, "Shard(dim=1)"),
    ):
        module: Any = Plain(8, 12)
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [placement]))
        sharding.fully_shard(
            module, mesh=mesh["dp"], shard_placement_fn=lambda p, dim=dim: Shard(dim)
        )
        assert module.weight.device_mesh.mesh_dim_names == ("dp", "tp")
        assert text in repr(module.weight.placements[0]) or text in str(module.weight.placements)
        assert module.weight.placements[1] == placement
        torch.testing.assert_close(module.weight.full_tensor(), whole)
        module.unshard()
        assert module.weight.placements == (placement,) and module.weight.device_mesh.ndim == 1
        torch.testing.assert_close(module.weight.full_tensor(), whole)


def tensor_parallel_meshes_must_be_named_parts_of_one() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.ones(8, 4)
    apart = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    del apart
    module: Any = Plain(8, 4)
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    unnamed = init_device_mesh("cpu", (4,))
    with pytest.raises(AssertionError, match=r"weight: .*named axes"):
        sharding.fully_shard(module, mesh=unnamed)
    module.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0), Shard(1)]))
    with pytest.raises(AssertionError, match=r"weight: .*other than those"):
        sharding.fully_shard(module, mesh=mesh["dp"])
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    with pytest.raises(ValueError, match="must divide"):
        sharding.fully_shard(module, mesh=mesh["dp"], reshard_after_forward=3)


def gradients_of_other_placements_are_brought_to_the_parameters() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.ones(4, 4)
    module: Any = Plain(4, 4)
    module.weight = nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(0)]))
    sharding.fully_shard(module, mesh=mesh["dp"])
    param = store_of(module).params[0]
    given = DTensor.from_local(torch.ones(4, 4), mesh["tp"], [Partial()], run_check=False)
    assert param.local_gradient(given).tolist() == [[2.0] * 4] * 2
    with pytest.raises(AssertionError, match="weight: expected its gradient to be a DTensor"):
        param.local_gradient(torch.ones(4, 4))


test_on_four_ranks = claims(
    4,
    [
        rows_are_cut_as_chunk_cuts_and_padded_once,
        other_dims_are_cut_exactly,
        a_smaller_shard_is_kept_between_forward_and_backward,
        hybrid_placements_repeat_and_shard,
        tensor_parallel_parameters_are_cut_as_their_local_tensors,
        tensor_parallel_meshes_must_be_named_parts_of_one,
        gradients_of_other_placements_are_brought_to_the_parameters,
    ],
)
