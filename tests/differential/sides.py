"""The two sides of a draw: the same calls, of torch's classes and of ours.

A side builds the model that the draw describes and has a method `do_NAME` for each of its calls.
What a method returns is compared with what the other side returns.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp import wrap as policies

import sharding
from tests.differential.draws import Draw, Part
from tests.differential.models import KINDS, WIDTH, Mlp

ENGINES: dict[str, Any] = {"torch": torch_fsdp, "ours": sharding}
BF16 = torch.bfloat16


class Groups:
    """Process groups and meshes that draws use, made once for all draws of a process."""

    def __init__(self) -> None:
        world = dist.get_world_size()
        rank = dist.get_rank()
        self._meshes: dict[str, DeviceMesh] = {"mesh": init_device_mesh("cpu", (world,))}
        self._mine: dict[str, Any] = {}
        if world == 4:
            self._meshes["mesh2"] = init_device_mesh(
                "cpu", (2, 2), mesh_dim_names=("replicate", "shard")
            )
            for name, pairs in {"rows": ((0, 1), (2, 3)), "columns": ((0, 2), (1, 3))}.items():
                groups = [dist.new_group(list(pair)) for pair in pairs]
                self._mine[name] = groups[0 if rank in pairs[0] else 1]

    def arguments(self, draw: Draw) -> dict[str, Any]:
        """Of the wrapper, for this draw."""
        if draw.group in self._meshes:
            return {"device_mesh": self._meshes[draw.group]}
        if draw.group == "pair":
            return {"process_group": (self._mine["rows"], self._mine["columns"])}
        if draw.group == "sub":
            return {"process_group": self._mine[("rows", "columns")[draw.seed % 2]]}
        return {}


# Models ------------------------------------------------------------------------------------------


def built(draw: Draw) -> nn.Module:
    """The bare model, with equal values on all ranks."""
    torch.manual_seed(draw.seed)
    return _built(draw.tree).to(getattr(torch, draw.dtype))


def _built(tree: Any) -> nn.Module:
    if not isinstance(tree, Part):
        return nn.Sequential(*(_built(child) for child in tree))
    module = KINDS[tree.kind](tree.size)
    for index, param in enumerate(module.parameters()):
        if tree.frozen == "all" or (tree.frozen == "first" and index == 0):
            param.requires_grad_(False)
    return module


def parent_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    above, _, name = path.rpartition(".")
    return model.get_submodule(above), name


# Sides -------------------------------------------------------------------------------------------


class Side:
    """What both faces have in common."""

    def __init__(self, draw: Draw, engine: str, groups: Groups) -> None:
        self.draw = draw
        self.engine = engine
        self.module = ENGINES[engine]
        self.groups = groups
        self.batches = 0
        self.dtype = getattr(torch, draw.dtype)
        self.model: Any = self.wrapped()
        self.optimizer = self.made_optimizer()

    def wrapped(self) -> nn.Module:
        raise NotImplementedError

    def made_optimizer(self) -> torch.optim.Optimizer:
        params = list(self.model.parameters())
        kinds: dict[str, Any] = {
            "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
            "adam": torch.optim.Adam,
            "adamw": functools.partial(torch.optim.AdamW, weight_decay=0.1),
            "foreach": functools.partial(torch.optim.AdamW, foreach=True),
            "adagrad": torch.optim.Adagrad,
            "rmsprop": torch.optim.RMSprop,
        }
        groups = [{"params": params[first :: self.draw.param_groups]} for first in (0, 1)]
        groups = [group for group in groups[: self.draw.param_groups] if group["params"]]
        if len(groups) > 1:
            groups[1]["lr"] = 0.001
        return kinds[self.draw.optimizer](groups, lr=0.01)

    def batch(self) -> torch.Tensor:
        self.batches += 1
        seed = (self.draw.seed * 1000 + self.batches) * 8 + dist.get_rank()
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(3, WIDTH, generator=generator).to(self.dtype)

    def forward_backward(self) -> list[Any]:
        output = self.model(self.batch())
        loss = output.float().square().mean()
        loss.backward()
        return [output.dtype, loss.detach()]

    def local(self) -> Any:
        """What this rank holds: parameters, gradients and buffers."""
        params = {
            name: (param.detach(), param.requires_grad, param.grad)
            for name, param in self.model.named_parameters()
        }
        return {"params": params, "buffers": dict(self.model.named_buffers())}

    # --- calls of both faces --------------------------------------------------------------------

    def do_train(self, steps: int) -> Any:
        seen = []
        for _ in range(steps):
            seen.append(self.forward_backward())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return seen

    def do_step(self) -> Any:
        self.optimizer.step()

    def do_zero(self, to_none: bool, of: str) -> Any:
        owner: Any = self.model if of == "model" else self.optimizer
        owner.zero_grad(set_to_none=to_none)

    def do_evaluate(self, train: bool) -> Any:
        self.model.train(train)
        with torch.no_grad():
            output = self.model(self.batch())
        self.model.train()
        return output

    def do_write_params(self) -> Any:
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(1.5)

    def do_write_grads(self) -> Any:
        for param in self.model.parameters():
            if param.grad is not None:
                param.grad.mul_(0.5)

    def do_convert(self, to: str) -> Any:
        self.dtype = getattr(torch, to)
        self.model.to(self.dtype)

    def do_optim_local(self) -> Any:
        state = self.optimizer.state_dict()
        return {"state": state["state"], "groups": state["param_groups"]}


class FlatSide(Side):
    """`FullyShardedDataParallel`."""

    @property
    def cls(self) -> Any:
        return self.module.FullyShardedDataParallel

    def wrapped(self) -> nn.Module:
        draw = self.draw
        model = built(draw)
        kwargs: dict[str, Any] = {
            **self.groups.arguments(draw),
            "sharding_strategy": ShardingStrategy[draw.strategy],
            "use_orig_params": draw.orig,
            "mixed_precision": _precision(draw.precision),
            "forward_prefetch": draw.prefetch,
            "backward_prefetch": torch_fsdp.BackwardPrefetch.BACKWARD_POST
            if draw.prefetch
            else torch_fsdp.BackwardPrefetch.BACKWARD_PRE,
            "device_id": torch.device("cpu"),
        }
        if draw.ignored is not None:
            kwargs["ignored_modules"] = [model.get_submodule(draw.ignored)]
        if draw.wrapping and draw.wrapping[0] == "policy":
            return self.cls(model, auto_wrap_policy=_policy(draw.wrapping[1]), **kwargs)
        for path in sorted(draw.wrapping, key=lambda path: -path.count(".")):
            if draw.ignored is not None and f"{path}.".startswith(f"{draw.ignored}."):
                continue
            parent, name = parent_of(model, path)
            setattr(parent, name, self.cls(getattr(parent, name), **kwargs))
        return self.cls(model, **kwargs)

    def inner(self) -> Any:
        """The last unit, or the root where there is no other."""
        return self.cls.fsdp_modules(self.model)[-1]

    def configs(self, form: str, offload: bool, rank0: bool, config: bool) -> tuple[Any, ...]:
        kind = getattr(self.module.StateDictType, f"{form}_STATE_DICT")
        if not config:
            return (kind,)
        names = {"FULL": "Full", "SHARDED": "Sharded", "LOCAL": "Local"}
        model = getattr(self.module, f"{names[form]}StateDictConfig")
        optim = getattr(self.module, f"{names[form]}OptimStateDictConfig")
        if form == "FULL":
            return kind, model(offload, rank0), optim(offload, rank0)
        return kind, model(offload), optim(offload)

    # --- training -------------------------------------------------------------------------------

    def do_backward(self, sync: bool, forwards: int) -> Any:
        with nullcontext() if sync else self.model.no_sync():
            if forwards == 1:
                return self.forward_backward()
            first, second = self.model(self.batch()), self.model(self.batch())
            loss = (first.float() * second.float()).sum()
            loss.backward()
            return loss.detach()

    def do_clip(self, max_norm: float, norm: float) -> Any:
        return self.model.clip_grad_norm_(max_norm, norm)

    # --- full parameters ------------------------------------------------------------------------

    def do_summon(self, change: bool, inner: bool, **kwargs: Any) -> Any:
        module = self.inner() if inner else self.model
        self.model.check_is_root()  # an inner unit that comes first would be a root of its own
        with self.cls.summon_full_params(module, **kwargs):
            seen = {
                name: (param.detach().clone(), param.grad)
                for name, param in self.model.named_parameters()
            }
            if change:
                with torch.no_grad():
                    for param in module.parameters():
                        param.add_(0.25)
                        if kwargs["with_grads"] and param.grad is not None:
                            param.grad.mul_(2.0)
        return list(seen.items())

    def do_full(self) -> Any:
        with self.cls.summon_full_params(self.model, writeback=False):
            return {name: param.detach().clone() for name, param in self.model.named_parameters()}

    def do_apply(self, inner: bool) -> Any:
        seen = []

        def shrink(module: nn.Module) -> None:
            with torch.no_grad():
                for param in module.parameters(recurse=False):
                    seen.append(tuple(param.shape))
                    param.mul_(0.5)

        self.model.check_is_root()
        (self.inner() if inner else self.model).apply(shrink)
        return seen

    def do_names(self, summoned: bool) -> Any:
        with self.cls.summon_full_params(self.model) if summoned else nullcontext():
            return [
                [name for name, _ in self.model.named_parameters()],
                [name for name, _ in self.model.named_buffers()],
                [name for name, _ in self.model.named_parameters(remove_duplicate=False)],
            ]

    def do_look(self) -> Any:
        units = self.cls.fsdp_modules(self.model)
        return {
            "units": len(units),
            "roots": [unit.check_is_root() for unit in units],
            "outer": len(self.cls.fsdp_modules(self.model, root_only=True)),
            "module": type(self.model.module).__name__,
            "first": type(self.model[0]).__name__,
            "training": [module.training for module in self.model.modules()],
        }

    # --- state dicts ----------------------------------------------------------------------------

    def do_set_type(self, wrong: bool, form: str, **config: bool) -> Any:
        arguments = self.configs(form, **config)
        if wrong:
            arguments = (arguments[0], self.module.StateDictConfig())
        return _settings(self.cls.set_state_dict_type(self.model, *arguments))

    def do_state(self, form: str, prefix: str, **config: bool) -> Any:
        with self.cls.state_dict_type(self.model, *self.configs(form, **config)):
            return self.model.state_dict(prefix=prefix)

    def do_load(self, change: str, strict: bool, form: str, **config: bool) -> Any:
        with self.cls.state_dict_type(self.model, *self.configs(form, **config)):
            state = changed(self.model.state_dict(), change)
            keys = self.model.load_state_dict(state, strict=strict)
        return {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}

    def do_optim_state(self, form: str, given: Any, **config: bool) -> Any:
        own = self.optimizer.state_dict() if given == "own" else None
        with self.cls.state_dict_type(self.model, *self.configs(form, **config)):
            return self.cls.optim_state_dict(self.model, self.optimizer, own)

    def do_optim_load(
        self, directly: bool, named: bool, change: str, form: str, **config: bool
    ) -> Any:
        with self.cls.state_dict_type(self.model, *self.configs(form, **config)):
            state = changed_optimizer(self.cls.optim_state_dict(self.model, self.optimizer), change)
            to_load = self.cls.optim_state_dict_to_load(
                self.model, self.optimizer, state, load_directly=directly, is_named_optimizer=named
            )
        if named:  # optimizers that are keyed by names do not go by their order
            for group in to_load["param_groups"]:
                group["params"] = sorted(group["params"])
        elif not directly:
            self.optimizer.load_state_dict(to_load)
        return {"found": to_load, "now": self.do_optim_local()}

    def do_legacy(self, kind: str) -> Any:
        model, optimizer, cls = self.model, self.optimizer, self.cls
        if kind == "sharded":
            return cls.sharded_optim_state_dict(model, optimizer)
        if kind == "flatten":
            state = cls.sharded_optim_state_dict(model, optimizer)
            return cls.flatten_sharded_optim_state_dict(state, model, optimizer)
        state = cls.full_optim_state_dict(model, optimizer, rank0_only=kind != "shard")
        if kind == "scatter":
            return cls.scatter_full_optim_state_dict(state, model, optim=optimizer)
        if kind == "shard":
            return cls.shard_full_optim_state_dict(state, model, optim=optimizer)
        return state

    def do_rekey(self, to: str, rank0: bool) -> Any:
        bare = built(self.draw)
        kinds = self.module.OptimStateKeyType
        bare_optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        state = self.cls.full_optim_state_dict(self.model, self.optimizer, rank0_only=rank0)
        if to == "id":
            return self.cls.rekey_optim_state_dict(
                state, kinds.PARAM_ID, bare, optim=bare_optimizer
            )
        ids = self.cls.rekey_optim_state_dict(state, kinds.PARAM_ID, bare, optim=bare_optimizer)
        return self.cls.rekey_optim_state_dict(ids, kinds.PARAM_NAME, bare, optim=bare_optimizer)


class FullySide(Side):
    """`fully_shard`."""

    def wrapped(self) -> nn.Module:
        draw = self.draw
        model = built(draw)
        mesh = self.groups.arguments(draw).get("device_mesh")
        kwargs: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": draw.reshard,
            "mp_policy": _policy_of_precision(draw.precision),
        }
        if draw.ignored is not None:
            kwargs["ignored_params"] = set(model.get_submodule(draw.ignored).parameters())
        for path in sorted(draw.wrapping, key=lambda path: -path.count(".")):
            self.module.fully_shard(model.get_submodule(path), **kwargs)
        self.module.fully_shard(model, **kwargs)
        return model

    def do_backward(self, sync: bool, forwards: int) -> Any:
        self.model.set_requires_gradient_sync(sync)
        if forwards == 1:
            result: Any = self.forward_backward()
        else:
            first, second = self.model(self.batch()), self.model(self.batch())
            loss = (first.float() * second.float()).sum()
            loss.backward()
            result = loss.detach()
        self.model.set_requires_gradient_sync(True)
        return result

    # Parameters are compared where both sides give the sharded ones.

    def do_write_params(self) -> Any:
        self.do_reshard()
        super().do_write_params()

    def do_write_grads(self) -> Any:
        self.do_reshard()
        super().do_write_grads()

    def do_zero(self, to_none: bool, of: str) -> Any:
        self.do_reshard()
        super().do_zero(to_none, of)

    def do_clip(self, max_norm: float, norm: float) -> Any:
        self.do_reshard()
        total_norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, float(norm))
        return total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm

    def do_module_state(self) -> Any:
        return self.model.state_dict()

    def do_module_load(self, change: str) -> Any:
        state = changed(copy.deepcopy(self.model.state_dict()), change)
        keys = self.model.load_state_dict(state, strict=change not in ("drop", "add"))
        return {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}

    def do_reduces(self, on: bool, recurse: bool) -> Any:
        self.model.set_requires_gradient_sync(on, recurse=recurse)

    def do_all_reduces(self, on: bool, recurse: bool) -> Any:
        self.model.set_requires_all_reduce(on, recurse=recurse)

    def do_reshards_after_forward(self, on: bool, recurse: bool) -> Any:
        self.model.set_reshard_after_forward(on, recurse=recurse)

    def do_reshards_after_backward(self, on: bool, recurse: bool) -> Any:
        self.model.set_reshard_after_backward(on, recurse=recurse)

    def do_unshard(self) -> Any:
        self.model.unshard()
        params = {name: param.detach().clone() for name, param in self.model.named_parameters()}
        self.model.reshard()
        return params

    def do_reshard(self) -> Any:
        for module in self.model.modules():
            if isinstance(module, self.module.FSDPModule):
                module.reshard()

    def do_names(self, summoned: bool) -> Any:
        return [
            [name for name, _ in self.model.named_parameters()],
            [name for name, _ in self.model.named_parameters(remove_duplicate=False)],
        ]

    def do_look(self) -> Any:
        return {
            "classes": [type(module).__name__ for module in self.model.modules()],
            "units": [
                isinstance(module, self.module.FSDPModule) for module in self.model.modules()
            ],
        }

    def do_full(self) -> Any:
        self.do_reshard()
        return {
            name: param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
            for name, param in self.model.named_parameters()
        }


def side(draw: Draw, engine: str, groups: Groups) -> Side:
    """The draw under this engine, "torch" or "ours"."""
    return (FlatSide if draw.face == "flat" else FullySide)(draw, engine, groups)


# Arguments ---------------------------------------------------------------------------------------


def _precision(name: str) -> MixedPrecision | None:
    return {
        "none": None,
        "bf16": MixedPrecision(param_dtype=BF16),
        "bf16/f32": MixedPrecision(param_dtype=BF16, reduce_dtype=torch.float32),
        "reduce": MixedPrecision(reduce_dtype=BF16),
        "buffers": MixedPrecision(param_dtype=BF16, buffer_dtype=BF16),
        "keep": MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True),
    }[name]


def _policy_of_precision(name: str) -> MixedPrecisionPolicy:
    return {
        "none": MixedPrecisionPolicy(),
        "bf16": MixedPrecisionPolicy(param_dtype=BF16),
        "bf16/f32": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
        "reduce": MixedPrecisionPolicy(reduce_dtype=BF16),
        "buffers": MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float32),
        "keep": MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False),
    }[name]


def _policy(name: str) -> Any:
    if name == "size":
        return functools.partial(policies.size_based_auto_wrap_policy, min_num_params=30)
    if name == "always":
        return policies.always_wrap_policy
    if name == "custom":
        return policies.CustomPolicy(
            lambda module: {"forward_prefetch": True} if isinstance(module, Mlp) else False
        )
    classes = {"linear": nn.Linear, "sequential": nn.Sequential, "mlp": Mlp}
    return policies.ModuleWrapPolicy({classes[name]})


def _settings(settings: Any) -> Any:
    configs = (settings.state_dict_config, settings.optim_state_dict_config)
    return (
        settings.state_dict_type,
        *((type(config).__name__, vars(config)) for config in configs),
    )


def changed(state: dict[str, Any], how: str) -> dict[str, Any]:
    """A state dict that lost, gained or garbled an entry."""
    state = dict(state)
    keys = list(state)
    if how == "add":
        state["not.there"] = torch.ones(2)
    elif how == "drop_all":
        state = {}
    elif keys and how == "drop":
        del state[keys[0]]
    elif keys and how == "shape":
        state[keys[-1]] = torch.ones(9, 9)
    elif how == "plus":
        state = {key: _plus(value) for key, value in state.items()}
    return state


def _plus(value: Any) -> Any:
    if hasattr(value, "local_shards"):
        value = copy.deepcopy(value)
        for shard in value.local_shards():
            shard.tensor.add_(1)
        return value
    return value + 1


def changed_optimizer(state: dict[str, Any], how: str) -> dict[str, Any]:
    """An optimizer dict that lost an entry or whose values are others."""
    if not state.get("state"):
        return state
    state = {**state, "state": dict(state["state"])}
    names = list(_sorted(state["state"]))
    if how in ("drop_first", "drop_last"):
        del state["state"][names[0 if how == "drop_first" else -1]]
    elif how == "groups":
        state["param_groups"] = [{**group, "lr": 0.5} for group in state["param_groups"]]
    elif how == "scale":
        for name in names:
            state["state"][name] = {
                key: value * 2 if type(value) is torch.Tensor and value.ndim else value
                for key, value in state["state"][name].items()
            }
    return state


def _sorted(state: dict[Any, Any]) -> Iterator[Any]:
    yield from sorted(state, key=str)
