"""A vision-language-action model in small: the guide's base and action groups, and boundaries of the user's."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dmuon
from tests.support.harness import assert_same, full_weights, weights_of
from tests.support.meshes import mesh_of
from tests.support.oracle import OracleMuon
from tests.support.pool import distributed

DIM, VOCAB, ACTIONS = 16, 29, 7


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(DIM, 24), nn.Linear(24, DIM, bias=False)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.up_proj(x)))


class Mixer(nn.Module):
    """Attention over everything before, without queries and keys."""

    def __init__(self):
        super().__init__()
        self.v_proj, self.o_proj = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        counts = torch.arange(1, x.shape[1] + 1)[:, None]
        return self.o_proj(self.v_proj(x).cumsum(1) / counts)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer, self.mlp = nn.LayerNorm(DIM), Mixer(), MLP()

    def forward(self, x):
        x = x + self.mixer(self.norm(x))
        return x + self.mlp(x)


class Tower(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class ToyVLA(nn.Module):
    """Pictures [batch, patches, 12] and tokens [batch, length] -> actions [batch, 7]. The layers of the action expert
    are called part by part, as experts that share their attention with the language model are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.patches, self.embed = nn.Linear(12, DIM), nn.Embedding(VOCAB, DIM)
        self.vision_tower, self.language_model, self.action_transformer = Tower(1), Tower(2), Tower(2)
        self.action_head = nn.Linear(DIM, ACTIONS)

    def forward(self, pictures, tokens):
        x = torch.cat([self.vision_tower(self.patches(pictures)), self.embed(tokens)], dim=1)
        x = self.language_model(x)
        for layer in self.action_transformer.layers:
            x = x + layer.mixer(layer.norm(x))
            x = x + layer.mlp(x)
        return self.action_head(x[:, -1])


def is_matrix(name, param):
    return "proj" in name and param.ndim == 2


def boundary(name, module):
    return isinstance(module, (Mixer, MLP) if "action_transformer" in name else Layer)


def loss_of(model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    pictures, wanted = torch.randn(3, 4, 12, generator=generator), torch.randn(3, ACTIONS, generator=generator)
    tokens = torch.randint(VOCAB, (3, 5), generator=generator)
    return nn.functional.mse_loss(model(pictures, tokens), wanted)


@pytest.mark.parametrize("reshard", [False, True])
@distributed(world=2)
def test_groups_and_boundaries_equal_one_process(rank, world, reshard):
    model, oracle = ToyVLA(), ToyVLA()
    mesh = mesh_of(dp=world)
    dmuon.dedicate_params(
        model, mesh, predicate=is_matrix, hook_boundary_predicate=boundary, reshard_after_forward=reshard
    )
    for layer in (*model.vision_tower.layers, *model.language_model.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    rows = dmuon.ownership_table(model)
    assert {row.unit for row in rows if row.owners} == {
        *("vision_tower.layers.0", "language_model.layers.0", "language_model.layers.1"),
        *(f"action_transformer.layers.{i}.{part}" for i in range(2) for part in ("mixer", "mlp")),
    }

    base_params, action_params = [], []
    for name, param in model.named_parameters():
        (action_params if "action_transformer" in name else base_params).append(param)
    optimizer = dmuon.Muon(
        model,
        lr=1e-2,
        adamw_lr=1e-2,
        param_groups=[
            {"params": base_params, "lr": 1e-2, "group_name": "base"},
            {"params": action_params, "lr": 3e-2, "group_name": "action"},
        ],
    )
    names = [group["group_name"] for group in optimizer.param_groups]
    assert names == ["base/muon", "base/adamw", "action/muon", "action/adamw"]

    action = nn.ModuleDict({"action_transformer": oracle.action_transformer})
    base = nn.ModuleDict({n: m for n, m in oracle.named_children() if n != "action_transformer"})
    oracles = [OracleMuon(part, is_matrix, lr=lr, adamw_lr=lr) for part, lr in ((base, 1e-2), (action, 3e-2))]
    start = weights_of(oracle)
    for step in range(5):
        loss_of(model, step, rank).backward()
        optimizer.step()
        for other in range(world):
            (loss_of(oracle, step, other) / world).backward()
        for each in oracles:
            each.step()
    assert_same(full_weights(model), weights_of(oracle))
    assert all(not torch.allclose(weight, start[name], atol=1e-4) for name, weight in weights_of(oracle).items())
