"""The only file that touches private PyTorch names, each behind a check that says what is missing.

Supported: torch 2.11 to 2.14. ``tests/dmuon/transport/test_torch_private.py`` exercises every name used here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

# Set on every dedicated parameter (the guide documents it); what the patched ``fully_shard`` looks for.
OWNER_MARKER = "_dedicated_owner_rank"

_COLLECT = "_get_managed_states"


def is_dedicated(param: torch.Tensor) -> bool:
    """Whether ``dedicate_params`` has taken this parameter."""
    return OWNER_MARKER in vars(param)


def teach_fully_shard_to_skip_dedicated() -> None:
    """Make a plain ``fully_shard(module, mesh=mesh)`` ignore dedicated parameters. Idempotent.

    ``fully_shard`` collects the parameters it manages through one private function, which takes the public
    ``ignored_params``; the patch adds the dedicated ones to that set, so both roads end in the same place.

    Raises:
        RuntimeError: this torch collects parameters in another way; pass ``ignored_params`` yourself.
    """
    holders = [module for module in (_fsdp_init, _fully_shard) if _COLLECT in vars(module)]
    if not holders:
        raise RuntimeError(
            f"torch {torch.__version__} has no fully_shard hook {_COLLECT!r}; call "
            "fully_shard(module, ignored_params=set(dmuon.ignored_params(model))) instead"
        )
    for holder in holders:
        original = vars(holder)[_COLLECT]
        if "skips_dedicated" in vars(original):
            continue
        setattr(holder, _COLLECT, _skipping_dedicated(original))


def _skipping_dedicated(original: Callable) -> Callable:
    @functools.wraps(original)
    def collect(modules: list[nn.Module], ignored_params: set[nn.Parameter] | None = None, **kwargs):
        own = {param for module in modules for param in module.parameters(recurse=False) if is_dedicated(param)}
        return original(modules, (ignored_params or set()) | own, **kwargs)

    collect.skips_dedicated = True
    return collect


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` once at the end of the backward pass that is running now."""
    Variable._execution_engine.queue_callback(callback)


def backward_id() -> int:
    """Which backward pass autograd is running on this thread; -1 for none."""
    return torch._C._current_graph_task_id()


def backward_keeps_graph() -> bool:
    """Whether the backward pass that is running was asked to ``retain_graph``."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def group_like(reference: dist.ProcessGroup, device: torch.device, description: str) -> dist.ProcessGroup:
    """A new group with the ranks, backend, timeout and backend options of ``reference``. Collective among its
    members only, so groups of other pipeline stages need not take part."""
    backend = reference._get_backend(device)
    options = None
    timeout: timedelta = backend.options._timeout
    if backend.name() == "nccl":
        options = dist.ProcessGroupNCCL.Options(backend.options.is_high_priority_stream)
        options._timeout = timeout
    return dist.new_group(
        dist.get_process_group_ranks(reference),
        timeout=timeout,
        backend=backend.name(),
        pg_options=options,
        use_local_synchronization=True,
        group_desc=description,
    )


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Of the backend that carries tensors on ``device``, also where the group has one for each kind of device."""
    return group._get_backend(device).name()


def set_group_timeout(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Change the timeout of collectives launched on ``group`` from now on."""
    group._get_backend(device)._set_default_timeout(timeout)


def guard_apply(model: nn.Module) -> None:
    """Make ``.to()``, ``.cuda()``, ``.half()`` and ``to_empty()`` raise on modules that hold dedicated parameters. They
    all go through ``nn.Module._apply``, which would replace placeholders by full-size tensors of NaN."""
    for module in model.modules():
        vars(module)["_apply"] = functools.partial(_guarded_apply, module)


def _guarded_apply(module: nn.Module, fn: Callable, recurse: bool = True) -> nn.Module:
    if any(is_dedicated(param) for param in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} holds parameters dedicated to owner ranks: .to(), .cuda(), .half() and "
            "to_empty() cannot move them. Choose device and dtype before dedicate_params (param_policy for dtypes), "
            "or use dmuon.materialize for a model built on meta"
        )
    return type(module)._apply(module, fn, recurse)


@contextlib.contextmanager
def stand_in(model: nn.Module, stand_ins: Mapping[torch.Tensor, nn.Parameter | None]) -> Iterator[None]:
    """Inside, the modules of ``model`` hold the values of ``stand_ins`` in place of its keys."""
    held = [(m, key, param) for m in model.modules() for key, param in m._parameters.items() if param in stand_ins]
    for module, key, param in held:
        module._parameters[key] = stand_ins[param]
    try:
        yield
    finally:
        for module, key, param in held:
            module._parameters[key] = param


def apply_to_undedicated(model: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """``model._apply(fn)`` with the dedicated parameters taken out meanwhile: ``_apply`` would swap a DTensor for a new
    object, without our hooks, even where ``fn`` returns its argument."""
    with stand_in(model, dict.fromkeys(filter(is_dedicated, model.parameters()))):
        model._apply(fn)


def places_of(model: nn.Module, names: Mapping[torch.Tensor, str]) -> dict[tuple[nn.Module, str], str]:
    """(module, attribute) -> name, of every place of the named parameters in the model."""
    places = ((m, key, param) for m in model.modules() for key, param in m._parameters.items())
    return {(module, key): names[param] for module, key, param in places if param in names}


def way_to(model: nn.Module, wanted: Container[torch.Tensor]) -> list[tuple[dict[str, Any], str, object]]:
    """(dictionary, key, object) of every module and parameter on the way from the model to the ``wanted`` ones."""
    leads = {module for module in model.modules() if any(param in wanted for param in module.parameters())}
    way: list[tuple[dict[str, Any], str, object]] = []
    for module in leads:
        way += [(module._parameters, key, param) for key, param in module._parameters.items() if param in wanted]
        way += [(module._modules, key, child) for key, child in module._modules.items() if child in leads]
    return way


def versions_of(params: Iterable[torch.Tensor]) -> list[int]:
    """How often in-place operations have changed each parameter. Assigning ``.data`` does not count."""
    return [param._version for param in params]


def is_last_hook(param: torch.Tensor, hook: Callable) -> bool:
    """Whether ``hook`` runs behind all other post-accumulate-grad hooks of the parameter."""
    return next(reversed(param._post_accumulate_grad_hooks.values())) is hook


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """The tensor that holds this rank's data: of a DTensor the local tensor itself (``to_local`` gives a view)."""
    return param._local_tensor if isinstance(param, DTensor) else param


class _Arrived(torch.autograd.Function):
    """The tensor itself, once the collective that makes it has finished."""

    @staticmethod
    def forward(ctx, tensor: AsyncCollectiveTensor) -> torch.Tensor:
        return tensor.trigger_wait()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, and where tensor parallelism has left the wait for it to its first use, a plain one: into a compiled
    region the other kind goes without a gradient coming out (torch 2.13, 2.14)."""
    return _Arrived.apply(tensor) if isinstance(tensor, AsyncCollectiveTensor) else tensor


def local_shard(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The part of ``full`` that this rank holds of a DTensor placed as ``like``, without communication.

    FSDP2 over tensor parallelism marks the data dimension as strided: tensor parallelism splits first, and FSDP2 splits
    what it left.
    """
    order = sorted(enumerate(like.placements), key=lambda entry: isinstance(entry[1], _StridedShard))
    for mesh_dim, placement in order:
        if placement.is_shard() or isinstance(placement, _StridedShard):
            ranks, mine = like.device_mesh.size(mesh_dim), like.device_mesh.get_local_rank(mesh_dim)
            parts = full.chunk(ranks, placement.dim)
            full = parts[mine] if mine < len(parts) else full.narrow(placement.dim, 0, 0)
        elif not placement.is_replicate():
            raise ValueError(f"cannot fill a tensor placed as {placement}")
    return full


def sharded_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """``named_parameters`` as the optimizer knows them. FSDP2 leaves its root unsharded after a forward without
    backward, and then shows temporary full parameters under the same names."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    yield from model.named_parameters()


def set_fsdp_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """``set_requires_gradient_sync`` on every FSDP2 module in ``model``."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(enabled, recurse=False)


def set_fsdp_requires_all_reduce(model: nn.Module, required: bool) -> None:
    """``set_requires_all_reduce`` on every FSDP2 module in ``model``."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_all_reduce(required, recurse=False)


def set_fsdp_divide_factor(model: nn.Module, factor: float) -> None:
    """``set_gradient_divide_factor`` on every FSDP2 module in ``model``, by plain sums, which gloo has, too."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)


def drop_fsdp_gradients(modules: Iterable[FSDPModule]) -> None:
    """Forget what FSDP2 holds back for a later backward: unsharded gradients (``no_sync``) and sums over one replica
    (``set_requires_all_reduce(False)``). They are not in ``param.grad``, and FSDP2 has no public way to drop them."""
    for module in modules:
        state = vars(module._get_fsdp_state())
        # torch 2.11 has one group a module, later versions a list of them.
        groups = state["_fsdp_param_groups"] if "_fsdp_param_groups" in state else [state["_fsdp_param_group"]]
        for group in groups:
            if group is None:
                continue
            group._partial_reduce_output = None
            for param in group.fsdp_params:
                param.unsharded_accumulated_grad = None
                if "_unsharded_param" in vars(param):  # made by the first forward
                    vars(param)["_unsharded_param"].grad = None


def own_persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, buffer) of the module's own buffers that its ``state_dict`` holds."""
    buffers = module.named_buffers(recurse=False, remove_duplicate=False)
    return [(name, buffer) for name, buffer in buffers if name not in module._non_persistent_buffers_set]


def state_dict_hooks(optimizer: torch.optim.Optimizer, event: str) -> list[Callable]:
    """What users have given to the optimizer's ``register_<event>_hook``: ``event`` is ``state_dict_pre``,
    ``state_dict_post``, ``load_state_dict_pre`` or ``load_state_dict_post``."""
    return list(vars(optimizer)[f"_optimizer_{event}_hooks"].values())
