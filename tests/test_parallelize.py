"""``parallelize`` on several ranks against one process."""

import contextlib

import pytest
import torch
from torch.distributed.tensor.parallel import loss_parallel

from models import get_model_spec
from models.llama3 import Llama3Args
from models.qwen3 import Qwen3Args
from tests.support.harness import assert_same, full_weights, weights_of
from tests.support.oracle import OracleMuon
from tests.support.pool import distributed
from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import load_config
from torchtitan_dmuon.loss import cross_entropy_sum, whole
from torchtitan_dmuon.optimizer import build_optimizer
from torchtitan_dmuon.parallel import ParallelDims, parallelize
from torchtitan_dmuon.parallel.parallelize import reshards_matrices, uses_loss_parallel


@pytest.mark.parametrize(
    ("fsdp", "dmuon_own", "expected"),
    [("default", None, True), ("always", None, True), ("never", None, False), ("never", "true", True),
     ("default", "false", False)],
)  # fmt: skip
def test_one_key_governs_all_weights_unless_dmuon_has_its_own(fsdp, dmuon_own, expected):
    own = [] if dmuon_own is None else ["--dmuon.reshard_after_forward", dmuon_own]
    config = load_config(["--parallelism.fsdp_reshard_after_forward", fsdp, *own])
    assert reshards_matrices(config) is expected


_SHAPE = {
    "dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "ffn_hidden_dim": 160, "vocab_size": 67,
    "max_seq_len": 16, "tie_embeddings": True, "init_std": 0.1,
}  # fmt: skip
ARGS = {"llama3": Llama3Args(**_SHAPE), "qwen3": Qwen3Args(**_SHAPE, head_dim=48)}
LR, STEPS = 5e-3, 3


def made_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(67, (3, 17), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def one_process(config):
    """(losses, weights) after ``STEPS`` steps."""
    model = get_model_spec(config.model.name).build(ARGS[config.model.name])
    assert model.output.weight is model.tok_embeddings.weight
    opt = config.optimizer
    optimizer = OracleMuon(
        model, lambda name, p: p.ndim == 2 and name.startswith("layers."), lr=LR, weight_decay=opt.weight_decay,
        adamw_lr=LR, adamw_betas=(opt.beta1, opt.beta2), adamw_weight_decay=opt.weight_decay, adamw_eps=opt.eps,
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        tokens, labels = made_batch(step)
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(model)


@pytest.mark.parametrize("family", ARGS)
@pytest.mark.parametrize(("others", "split_loss"), [("fsdp2", True), ("dedicated", False)])
@distributed(world=2, timeout=120, new_processes=True)
def test_a_tied_model_under_tensor_parallelism(rank, world, family, others, split_loss):
    """Head and embedding are one DTensor, whose gradients of both uses add up. Two does not divide the vocabulary."""
    config = load_config(
        ["--model.name", family, "--parallelism.tensor_parallel_degree", "2", "--dmuon.others", others,
         "--optimizer.lr", str(LR),
         "--parallelism.disable_loss_parallel", str(not split_loss).lower(),
         "--training.mixed_precision_param", "float32", "--optimizer.eps", "1e-4",
         "--activation_checkpoint.mode", "none"]
    )  # fmt: skip
    meshes = ParallelDims.from_config(config.parallelism, world).build(torch.device("cpu"))
    spec, args = get_model_spec(family), ARGS[family]
    with torch.device("meta"):
        model = spec.build(args)
    parallelize(model, meshes, spec, config)
    initial = weights_of(spec.build(args))
    dmuon.materialize(model, lambda fqn, tensor: tensor.copy_(initial[fqn]), torch.device("cpu"))
    model.init_buffers("cpu")
    optimizer = build_optimizer(model, config)
    losses = []
    for step in range(STEPS):
        tokens, labels = made_batch(step)
        with loss_parallel() if uses_loss_parallel(config) else contextlib.nullcontext():
            loss = whole(cross_entropy_sum(model(tokens), labels)) / labels.numel()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert model.output.weight is model.tok_embeddings.weight
    expected_losses, expected = one_process(config)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert_same(full_weights(model), expected, atol=2e-5)
