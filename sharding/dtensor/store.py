"""The parameters of one unit, each sharded by itself, gathered and reduced together.

    start_gather          this rank's parts of all members to the others, theirs into the unit's
                          memory
    outgoing_gradients    gradients as the ranks' parts, where they lie if they can be sent as they
                          are, or packed
    free_after_forward    all freed; or a larger shard kept, over fewer ranks

Which collectives serve that, and whether members have to be packed for them, is up to
`sharding.engine.collectives`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from sharding.dtensor.gathering import (
    ByExtension,
    Gathering,
    PackedGather,
    gathering_for,
    pack_gradients,
)
from sharding.dtensor.meshes import MeshPart
from sharding.dtensor.param import Keeping, ShardedParam
from sharding.dtensor.seam import ShownParam, as_parameter, replaced, versions_of
from sharding.engine.collectives import Comm, PendingCollective, RankParts
from sharding.engine.memory import TensorSize
from sharding.engine.store import (
    Gradients,
    ModuleParam,
    Outgoing,
    OutgoingForm,
    ParameterStore,
    State,
    call_accumulate_hooks,
)
from sharding.engine.torch_seam import foreach_copy, grad_dtype_of, put_all


@dataclass(frozen=True)
class SmallerMesh:
    """Where parameters are sharded between forward and backward."""

    mesh: DeviceMesh
    """Two axes: repeated over the first, sharded over the second."""
    comm: Comm
    """Of the second axis."""


class _OwnParts(NamedTuple):
    """What one gather sends of this rank, 1-D each, and what memory all ranks' parts need."""

    own: list[torch.Tensor]
    sizes: list[TensorSize]
    apart: list[int]
    """Those that are gathered as they are, by number."""
    packed: list[int]
    """Those that are packed into one first."""


@dataclass(frozen=True)
class _UnreducedGradient:
    """An unsharded gradient that waits for the next reduction. `is_own`: no other object has it."""

    grad: torch.Tensor
    is_own: bool


class DTensorStore(ParameterStore):
    """See the head of this file. Members are in the order of `module_params`."""

    def __init__(self, part: MeshPart, keeping: Keeping) -> None:
        data, module_params, placements = part
        super().__init__(module_params, keeping.device)
        self.data = data
        self.keeping = keeping
        self.params = tuple(
            ShardedParam(item, data, _keeping_of(item, keeping), placement)
            for item, placement in zip(module_params, placements, strict=True)
        )
        self.module_params = tuple(param.module_param for param in self.params)
        self._gatherings = tuple(map(gathering_for, self.params))
        self._counts = [1] * len(self.params)  # tensors in the unit's memory, by parameter
        self._known: tuple[ShownParam, ...] = ()
        """What modules show; empty when that has to be looked up."""
        self._fixed: _OwnParts | None = None
        """What to gather where it is the same each time."""
        self._landing: tuple[int, list[list[RankParts]]] = (0, [])
        """Where that lands, and the generation of the memory."""
        self.chooses_grad_dtypes = keeping.follows_grad_dtype
        self._smaller_mesh: SmallerMesh | None = None
        self._smaller: tuple[torch.Tensor, ...] = ()
        """This rank's parts between forward and backward, 1-D, as long as the largest rank's."""
        self._smaller_mark: object = None
        """Behind the copies in `_smaller`, which compute has made and gathers read."""
        self._kept: dict[int, _UnreducedGradient] = {}
        self._versions: list[int] = []

    def set_smaller_mesh(self, mesh: SmallerMesh | None) -> None:
        """Where to keep shards after the forward; None: everything is freed.

        Raises NotImplementedError for parameters that cannot be kept so.
        """
        for param, gathering in zip(self.params, self._gatherings, strict=True):
            reason = "is tensor parallel" if param.tensor_parallel else "has an extension"
            if mesh and (param.tensor_parallel or isinstance(gathering, ByExtension)):
                raise NotImplementedError(
                    f"{param.fqn}: {reason}, and cannot be resharded over fewer ranks; pass True "
                    "or False for reshard_after_forward"
                )
        self._smaller_mesh = mesh

    # --- dtypes ---------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Of the shards of trainable parameters, which must have one.

        Raises AssertionError, naming parameters, where they do not and no dtype was configured for
        reductions.
        """
        wanted = [p for p in self.params if p.param.requires_grad] or list(self.params)
        if not wanted:
            return torch.get_default_dtype()
        first, policy = wanted[0], self.keeping.policy
        for other in wanted[1:]:
            if other.dtype != first.dtype and not (policy.reduce_dtype or policy.param_dtype):
                raise AssertionError(
                    f"trainable parameters of one fully_shard() need one dtype: {first.fqn} has "
                    f"{first.dtype}, {other.fqn} has {other.dtype}; shard them apart, or set "
                    "reduce_dtype of MixedPrecisionPolicy"
                )
        return first.dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of gathered parameters."""
        return self.keeping.policy.param_dtype or self.dtype

    def reduces_in(self, grads: Gradients | None, *, fills: bool) -> torch.dtype:
        """What holds all gradients, as their parameters have it; `grads` None: of all parameters.

        Raises ValueError, naming a parameter, where ranks could not agree on the dtype of zeros.
        """
        if not self.keeping.follows_grad_dtype:
            return self.dtype
        trained = [number for number, param in enumerate(self.params) if param.param.requires_grad]
        # A rank without a gradient sends zeros, and cannot know which dtype the others' have.
        for param in (self.params[number] for number in trained if fills):
            if param.summed_dtype is None:
                raise ValueError(
                    f"{param.fqn}: gradients of any dtype (grad_dtype=None) cannot be reduced as "
                    "zeros where there are none; set reduce_dtype of MixedPrecisionPolicy"
                )
        dtypes = []
        for number in trained:
            kept, grad = self._kept.get(number), None if grads is None else grads[number]
            there = [one for one in (grad, None if kept is None else kept.grad) if one is not None]
            if there or fills or grads is None:
                param = self.params[number]
                own = [one.dtype for one in there] or [param.compute_dtype]
                dtypes += own if param.summed_dtype is None else [param.summed_dtype]
        return functools.reduce(torch.promote_types, dtypes or [self.dtype])

    def choose_grad_dtypes(self, *, reduces: bool) -> None:
        """As the parameters' `grad_dtype` has it, and as torch does it, to the bit: of several
        gradients of one parameter, only those that begin to add up are cast one by one.
        """
        self.view_grad_dtypes = tuple(
            param.view_grad_dtype if reduces or number in self._kept else param.summed_dtype
            for number, param in enumerate(self.params)
        )

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Which members want gradients, as the user has it now."""
        return tuple([p.param.requires_grad for p in self.params])

    # --- gathering ------------------------------------------------------------------------------

    def start_gather(self) -> PendingCollective:
        """Put the own parts into place and start; they come from the shards, or the larger ones."""
        if self.state is State.SHARDED_POST_FORWARD:
            return self._start_smaller()
        self.adopt_values()
        parts = self._fixed or self._parts()
        # Noted at the start: what is written while the gather runs makes it out of date.
        self._versions = versions_of(self._known)
        return self._gather(self.data.shard, parts, self._targets, self._finish)

    def _parts(self) -> _OwnParts:
        self._check_not_meta()
        prepared = [gathering.prepare() for gathering in self._gatherings]
        self._counts = [len(sizes) for sizes in prepared]
        own = [part for gathering in self._gatherings for part in gathering.own()]
        sizes = [size for of_one in prepared for size in of_one]
        parts = _parts_of(self.data.shard, own, sizes, self.device)
        self._landing = (0, [])
        # Others land in buffers of the pool, or ask an extension: anew at each gather.
        if all(type(gathering) is Gathering for gathering in self._gatherings):
            self._fixed = parts
        return parts

    def _targets(self) -> list[RankParts]:
        # Memory stays where it is from step to step, so views of it are made once.
        if self._fixed is None or self._landing[0] != self.memory.generation:
            landing = [g.targets(wholes, self.pool) for g, wholes in self._with_memory()]
            self._landing = (self.memory.generation, landing)
        return [parts for of_one in self._landing[1] for parts in of_one]

    def _finish(self) -> None:
        if self._fixed is None:
            for (gathering, wholes), parts in zip(
                self._with_memory(), self._landing[1], strict=True
            ):
                gathering.finish(wholes, parts, self.pool)
                if gathering.releases:  # the next gather waits for what has read it: see `_wait`
                    for memory in map(self.memory.alone, wholes):
                        memory.release()

    def _gather(
        self,
        comm: Comm,
        parts: _OwnParts,
        targets: Callable[[], list[RankParts]],
        finish: Callable[[], None],
    ) -> PendingCollective:
        """Gather all parts into `targets`, for which there is memory when it is called, and then
        `finish`.
        """
        pool, tag = self.pool, 2 * self.tag
        own, sizes, apart, packed = parts
        members: list[RankParts] = []
        if apart:
            self.fetch(sizes)
            members = targets()
        if not packed:
            pending = comm.all_gather(members, own, tag=tag)
            pending.then = finish
            return pending
        dtypes = [sizes[number].dtype for number in packed]
        pack = PackedGather(comm, [*map(own.__getitem__, packed)], dtypes, self.device, pool)
        pending = comm.all_gather(
            [*map(members.__getitem__, apart), pack.whole],
            [*map(own.__getitem__, apart), pack.own],
            tag=tag,
        )

        def copy_out() -> None:
            there = members
            if not apart:
                # Not before: until the parts are there, compute can use the memory for the unit
                # ahead.
                self.fetch(sizes)
                there = targets()
            pack.copy_out([*map(there.__getitem__, packed)])
            finish()

        pending.then = copy_out
        return pending

    def _with_memory(self) -> Iterator[tuple[Gathering, Sequence[torch.Tensor]]]:
        """Each parameter's gathering with its tensors in the unit's memory."""
        offset = 0
        for gathering, count in zip(self._gatherings, self._counts, strict=True):
            yield gathering, self.memory.tensors[offset : offset + count]
            offset += count

    def _start_smaller(self) -> PendingCollective:
        assert self._smaller_mesh is not None
        self.streams.gathers_wait_for(self._smaller_mark)
        comm = self._smaller_mesh.comm

        def targets() -> list[RankParts]:
            return [
                param.smaller_parts(whole, comm)
                for param, whole in zip(self.params, self.memory.tensors, strict=True)
            ]

        def finish() -> None:
            self._smaller = ()

        # The same sizes as ever, so that what autograd remembers of the memory stays valid.
        sizes = [size for gathering in self._gatherings for size in gathering.prepare()]
        parts = _parts_of(comm, list(self._smaller), sizes, self.device)
        return self._gather(comm, parts, targets, finish)

    def make_views(self) -> tuple[torch.Tensor, ...]:
        """New tensors over the gathered memory, one for each parameter."""
        return tuple(gathering.view(wholes) for gathering, wholes in self._with_memory())

    def wrap_views(self, views: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Views that are parameters, too."""
        for view in views:
            as_parameter(view)
        return views

    def hide_views(self) -> None:
        """Let the modules show what is sharded."""
        if self.shows_views or self._smaller:
            put_all(self.places, [param.param for param in self.params])
        self.shows_views = False
        self._smaller = ()

    def release(self) -> None:
        """Give the gathered memory away, unless it is kept."""
        super().release()
        if self._fixed is not None or self.keeps_memory:
            return  # all of it is the unit's
        for gathering in self._gatherings:
            for tensor in gathering.own_memory:
                self.streams.will_free(tensor)
                tensor.untyped_storage().resize_(0)

    def free_after_forward(self) -> None:
        """Free all, or keep a larger shard for the backward."""
        mesh = self._smaller_mesh
        if mesh is None or self.state is not State.UNSHARDED:
            self.reshard()
            return
        # Copies: the gathered memory itself is about to be freed.
        self._smaller = tuple(
            param.smaller_parts(whole, mesh.comm).of(mesh.comm.rank).clone()
            for param, whole in zip(self.params, self.memory.tensors, strict=True)
        )
        self._smaller_mark = self.streams.mark()
        shown = [
            param.smaller_dtensor(part, mesh.comm, mesh.mesh)
            for param, part in zip(self.params, self._smaller, strict=True)
        ]
        put_all(self.places, shown)
        self.shows_views = False
        self.release()
        self.state = State.SHARDED_POST_FORWARD

    def is_current(self) -> bool:
        """Whether the shards are as they were when they were gathered.

        `torch._foreach` functions leave no trace: call `reshard()` after writing by them.
        """
        known = self._known
        is_there = self.state is State.UNSHARDED and self._versions == versions_of(known)
        pairs = zip(self.params, known, strict=True)
        return is_there and all(param.local is one.local for param, one in pairs)

    def adopt_values(self) -> None:
        """Follow what the user put in place of the sharded parameters; see `ShardedParam.adopt`."""
        if self.state is not State.SHARDED:
            return
        others = replaced(self._known) if self._known else range(len(self.params))
        for index in others:
            self._fixed = None
            param, before = self.params[index], self._gatherings[index]
            is_other, local = param.adopt(), param.local
            # An extension may have been put on the sharded tensor since.
            is_plain = type(local) is torch.Tensor and not vars(local)
            if not is_other and (is_plain or isinstance(before, ByExtension)):
                continue
            made = gathering_for(param)
            # An extension keeps what it made of the former tensor: another one is asked anew.
            if isinstance(made, ByExtension) or type(made) is not type(before):
                self._gatherings = (*self._gatherings[:index], made, *self._gatherings[index + 1 :])
                self.drop_views()
        if others:
            self._known = tuple(param.known for param in self.params)

    def _check_not_meta(self) -> None:
        meta = [param.fqn for param in self.params if param.buffer.is_meta]
        if meta:
            raise RuntimeError(
                f"parameters on the meta device have no values to gather: {', '.join(meta)}; call "
                "model.to_empty(device=...) and initialise or load them first"
            )

    # --- gradients ------------------------------------------------------------------------------

    def outgoing_gradients(self, grads: Gradients | None, form: OutgoingForm) -> Outgoing:
        """The gradients cut into the ranks' parts, from where they lie if nothing has to be done.

        Parameters without any are left out, unless `form.fills`.
        """
        leaving: dict[int, torch.Tensor] = {}
        for number, param in enumerate(self.params):
            grad = None if grads is None else grads[number]
            if grad is not None:
                grad = param.local_gradient(grad)
            if self._kept and (kept := self._kept.pop(number, None)) is not None:
                grad = kept.grad if grad is None else _sum(kept, grad)
            if grad is None and form.fills and param.param.requires_grad:
                grad = torch.zeros(param.shape, dtype=form.dtype, device=self.device)
            if grad is not None:
                leaving[number] = grad
        apart, packed = list(leaving), list[int]()
        if form.comm is not None and leaving:
            apart, packed = self._divided(apart, form.dtype, form.comm)
        rank = self.data.shard.rank
        members: list[RankParts] = []
        numels: list[int] = []
        scratch: list[torch.Tensor] = []
        for number in apart:
            parts, buffer = self.params[number].gradient_parts(leaving[number], form)
            members.append(parts)
            numels.append(parts.of(rank).numel())
            if buffer is not None:
                scratch.append(buffer)
        if packed:
            assert form.comm is not None
            members.append(self._packed([(n, leaving[n]) for n in packed], form, form.comm))
            numels += [self.params[number].part_numel for number in packed]
            scratch.append(members[-1].whole)
        return Outgoing(tuple(members), (*apart, *packed), tuple(numels), tuple(scratch))

    def _divided(
        self, numbers: list[int], dtype: torch.dtype, comm: Comm
    ) -> tuple[list[int], list[int]]:
        """Members whose gradients are reduced as they are, and those that are packed into one."""
        even, nbytes = True, []
        for number in numbers:
            param = self.params[number]
            even = even and param.is_even
            nbytes.append(param.part_numel * dtype.itemsize)
        if comm.size == 1 and even:
            # One rank by itself sends nothing, and what its gradients are packed into is the sum.
            return [], numbers
        apart = [numbers[index] for index in comm.apart(nbytes, even=even, device=self.device)]
        return apart, [number for number in numbers if number not in apart]

    def _packed(
        self, grads: Sequence[tuple[int, torch.Tensor]], form: OutgoingForm, comm: Comm
    ) -> RankParts:
        """The gradients, by number of the member, in one buffer."""
        width = 0
        cut = []  # gradients' elements in shapes whose dim 0 is cut as `torch.chunk` does
        for number, grad in grads:
            param = self.params[number]
            width += param.part_numel
            is_other = param.dim != 0
            cut.append(param.by_rank(grad.contiguous()).contiguous() if is_other else grad)
        buffer = comm.buffer(comm.size * width, form.dtype, self.device, form.pool)
        pack_gradients(cut, buffer.view(comm.size, width))
        if form.scale != 1.0:
            buffer.mul_(form.scale)
        return RankParts(buffer, width)

    def keep_unsharded_gradients(self, grads: Gradients) -> None:
        """Add gradients up on this rank, in the dtype of reductions."""
        follows = self.keeping.follows_grad_dtype
        for number, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            if grad is None:
                continue
            wanted = param.summed_dtype if follows else self.keeping.policy.reduce_dtype
            local = param.local_gradient(grad)
            kept = self._kept.get(number)
            if kept is not None:
                self._kept[number] = _UnreducedGradient(_sum(kept, local), True)
            elif wanted is not None and local.dtype != wanted:
                self._kept[number] = _UnreducedGradient(local.to(wanted), True)
            else:
                self._kept[number] = _UnreducedGradient(local, False)

    @property
    def has_unsharded_gradients(self) -> bool:
        """Whether gradients wait for the next reduction."""
        return bool(self._kept)

    def drop_unsharded_gradients(self) -> None:
        """Forget what was added up without reducing."""
        self._kept.clear()

    def add_gradients(
        self, outgoing: Outgoing, new: Sequence[torch.Tensor], *, keep_dtype: bool
    ) -> None:
        """Add reduced gradients, this rank's parts, to those of the sharded parameters."""
        params = [self.params[number] for number in outgoing.member_indices]
        wanted = []
        for one, param in zip(new, params, strict=True):
            own = param.grad_dtype if self.keeping.follows_grad_dtype else param.param.dtype
            wanted.append(own or one.dtype)
        if [one.dtype for one in new] != wanted:
            # One kernel for all members of a unit, rather than a cast each.
            cast = [
                torch.empty_like(one, dtype=dtype) for one, dtype in zip(new, wanted, strict=True)
            ]
            foreach_copy(cast, new)
            new = cast
        for param, one in zip(params, new, strict=True):
            param.add_gradient(one, self.streams)
        shown = [param.param for param in params]
        call_accumulate_hooks(shown, self.streams if self.keeping.offload else None)

    def take_own_gradients(self) -> list[tuple[ShardedParam, torch.Tensor]]:
        """Take away the gradients that have a dtype of their own, which a cast of the module does
        not change.
        """
        taken = []
        for param in self.params:
            grad = param.param.grad
            if grad is not None and grad_dtype_of(param.param) is not None:
                taken.append((param, grad))
                param.param.grad = None
        return taken


def _keeping_of(item: ModuleParam, keeping: Keeping) -> Keeping:
    """The same with the dtype that its policy's `param_dtype_override_fn` has for a parameter.

    Raises ValueError, naming the parameter, for what is no dtype, or another than that of the
    policy or the parameter.
    """
    policy = keeping.policy
    override: Any = getattr(policy, "param_dtype_override_fn", None)
    if override is None:
        return keeping
    dtype = override(item.param)
    given, own = policy.param_dtype, item.param.dtype
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{item.fqn}: param_dtype_override_fn must return a torch.dtype or None, got {dtype!r}"
        )
    if dtype not in (None, given, own):
        raise ValueError(
            f"{item.fqn}: param_dtype_override_fn must return None, param_dtype ({given}), or the "
            f"parameter's original dtype ({own}), got {dtype}"
        )
    options: Any = {"param_dtype": dtype or given, "param_dtype_override_fn": None}
    return replace(keeping, policy=replace(policy, **options))


def _parts_of(
    comm: Comm, own: list[torch.Tensor], sizes: list[TensorSize], device: torch.device
) -> _OwnParts:
    nbytes = [part.numel() * size.dtype.itemsize for part, size in zip(own, sizes, strict=True)]
    apart = comm.apart(nbytes, even=True, device=device)
    return _OwnParts(own, sizes, apart, [n for n in range(len(own)) if n not in apart])


def _sum(kept: _UnreducedGradient, grad: torch.Tensor) -> torch.Tensor:
    # A gradient that autograd gave may be the gradient of other parameters too.
    return kept.grad.add_(grad) if kept.is_own else torch.add(kept.grad, grad)
