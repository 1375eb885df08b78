"""The check that a family describes every parameter of its model."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from models import ModelSpec


def undescribed(spec: ModelSpec, model: nn.Module, args: Any) -> Iterator[str]:
    """What `spec` leaves out about `model`, which is plain and may be on meta; one sentence each.

    Every parameter needs an initialiser, a HuggingFace name that leads back to it, and a module in the tensor-parallel
    plan. A plan names modules whose parameters stay whole on every rank, too.
    """
    placed = _placed(spec, model, args)
    for module_name, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            fqn = f"{module_name}.{leaf}" if module_name else leaf
            try:
                model.init_parameter(fqn, torch.empty([1] * param.ndim), torch.Generator())
                if (back := spec.hf.from_hf(spec.hf.to_hf(fqn))) != fqn:
                    yield f"the HuggingFace name of {fqn} leads back to {back}"
            except ValueError as error:
                yield str(error)
            if module not in placed:
                yield f"{fqn} has no place in the tensor-parallel plan of {spec.name}"


def _placed(spec: ModelSpec, model: nn.Module, args: Any) -> set[nn.Module]:
    """The modules that the tensor-parallel plan names."""
    outside, in_blocks = spec.tensor_parallel_plan(args, True)
    roots = [(model, outside), *zip(spec.parts(model).blocks, in_blocks, strict=True)]
    return {root.get_submodule(name) for root, plan in roots for name in plan}
