"""Plans against runs on small process groups: owners, memory by kind, and what a step communicates."""

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from models.llama3 import Llama3, Llama3Args
from models.llama3 import spec as llama3
from tests.support.pool import distributed
from tests.support.private import own_part, runtime_of
from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import load_config
from torchtitan_dmuon.loss import cross_entropy_sum, whole
from torchtitan_dmuon.optimizer import build_optimizer
from torchtitan_dmuon.parallel import ParallelDims, parallelize
from torchtitan_dmuon.parallel.parallelize import uses_loss_parallel
from torchtitan_dmuon.plan.activations import Activations
from torchtitan_dmuon.plan.communication import plan_communication
from torchtitan_dmuon.plan.layout import build_layout, summarize_owners
from torchtitan_dmuon.plan.memory import plan_memory

ARGS = Llama3Args(
    dim=128, n_layers=3, n_heads=4, n_kv_heads=2, ffn_hidden_dim=320, vocab_size=67, max_seq_len=16,
    tie_embeddings=True,
)  # fmt: skip
NONE = Activations(0, 0, 0, 0)


def configured(mesh, others, precision="bfloat16", z3=True):
    replicate, _, tp = mesh
    return load_config(
        ["--parallelism.tensor_parallel_degree", str(tp), "--dmuon.others", others, "--dmuon.min_matrix_dim", "64",
         "--parallelism.data_parallel_replicate_degree", str(replicate),
         "--dmuon.reshard_after_forward", str(z3).lower(),
         "--training.mixed_precision_param", precision, "--training.seq_len", "16", "--training.local_batch_size", "2",
         "--activation_checkpoint.mode", "none"]
    )  # fmt: skip


def size(tensors):
    """Bytes on this rank."""
    parts = (t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None)
    return sum(part.numel() * part.element_size() for part in parts)


def held(model, optimizer):
    """Bytes of what this rank keeps from step to step, under the plan's names."""
    runtime = runtime_of(model)
    muon = [piece for piece in runtime.owned if piece.spec.route == "muon"]
    adamw = [piece for piece in runtime.owned if piece.spec.route != "muon"]
    dedicated = {dp.param for dp in runtime.params}
    sharded = [param for param in model.parameters() if param not in dedicated]
    moments = ("exp_avg", "exp_avg_sq")
    sources = {own_part(unit).untyped_storage().data_ptr() for unit in runtime.units}
    sent = [piece.master for piece in runtime.owned if piece.master.untyped_storage().data_ptr() in sources]
    return {
        "masters": size(piece.master for piece in runtime.owned),
        "momentum": size(optimizer.state_of(piece)["momentum_buffer"] for piece in muon),
        "AdamW moments": size(optimizer.state_of(piece)[name] for piece in adamw for name in moments),
        "compute weights": sum(own_part(unit).nbytes for unit in runtime.units) - size(sent),
        "FSDP2 weights": size(sharded),
        "FSDP2 AdamW moments": size(optimizer.state[param][name] for param in sharded for name in moments),
    }


@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)], ids=["shard4", "2x2", "dp2tp2", "2x1x2"])
@distributed(world=4, timeout=120, new_processes=True)
def test_a_rank_holds_and_sends_what_was_planned(rank, world, mesh):
    for others, precision, z3 in (("fsdp2", "bfloat16", True), ("dedicated", "float32", False)):
        config = configured(mesh, others, precision, z3)
        dims = ParallelDims.from_config(config.parallelism, world)
        with torch.device("meta"):
            model = Llama3(ARGS)
        meshes = dims.build(torch.device("cpu"))
        parallelize(model, meshes, llama3, config)
        dmuon.materialize(model, lambda fqn, tensor: tensor.fill_(0.01), torch.device("cpu"))
        model.init_buffers("cpu")
        optimizer = build_optimizer(model, config)

        layout = build_layout(config, ARGS, dims)
        assert plan_communication(layout, config, 1, rank) == dmuon.summarize_comm_plan(model)["lanes"]
        owners = {row.name: row.owners for row in dmuon.ownership_table(model) if row.owners}
        assert {p.spec.fqn: tuple(sorted({run[2] for run in p.runs})) for p in layout.params} == owners
        assert summarize_owners(layout)["newton_schulz_flops"] == list(runtime_of(model).assignment.flops)

        tokens = torch.arange(32).view(2, 16) % ARGS.vocab_size
        with loss_parallel() if uses_loss_parallel(config) else contextlib.nullcontext():
            whole(cross_entropy_sum(model(tokens), tokens)).backward()
        runtime_of(model).wait_gradients()
        gradients = size(piece.grad for piece in runtime_of(model).owned)
        optimizer.step()
        memory = plan_memory(layout, config, NONE, 1, slot=rank)
        planned = {name: moments[3] for name, moments in memory.kinds.items()}
        measured = held(model, optimizer)
        # FSDP2's shards are those of the rank with the most rows.
        assert {name: planned.get(name, 0) for name in measured} == pytest.approx(measured, rel=0.01, abs=2048)
        assert planned.get("gradients", 0) == gradients
