"""The ownership table: every parameter once, with owner and reason."""

import dataclasses
import json
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dmuon
from dmuon import OwnershipRow, format_ownership_table, ownership_table
from tests.support.harness import build, train
from tests.support.oracle import ToyModel
from tests.support.pool import distributed
from tests.support.private import runtime_of


@pytest.mark.parametrize("shard", [False, True])
@distributed(world=2)
def test_rows(rank, world, shard):
    toy = ToyModel(layers=2)
    toy.layers[1].q_proj.weight.requires_grad_(False)  # dedicated and frozen
    toy.norm.bias.requires_grad_(False)
    expected = {name: (tuple(param.shape), param.requires_grad) for name, param in toy.named_parameters()}
    model, optimizer = build(world, toy, shard=shard)
    rows = ownership_table(model)
    assert [row.name for row in rows] == list(expected)
    owner = {dp.fqn: dp.owner_rank for dp in dmuon.get_dedicated_params(model)}
    assert owner.keys() == {name for name, (shape, _) in expected.items() if "proj" in name and len(shape) == 2}
    assert set(owner.values()) == {0, 1}
    for row in rows:
        shape, trainable = expected[row.name]
        assert row.shape == shape, row
        if row.name in owner:
            unit = ".".join(row.name.split(".")[:2])
            route = "muon" if trainable else "frozen"
            assert row == OwnershipRow(row.name, shape, route, (owner[row.name],), unit, "predicate")
        else:
            route = "adamw (FSDP2)" if trainable else "frozen"
            assert row == OwnershipRow(row.name, shape, route, (), None, "not in the predicate")
    assert [row.name for row in rows if row.route == "frozen"] == ["layers.1.q_proj.weight", "norm.bias"]

    everywhere = [None] * world
    dist.all_gather_object(everywhere, [row.as_dict() for row in rows])
    assert everywhere[0] == everywhere[1]
    train(model, optimizer, 1, rank)
    assert ownership_table(model) == rows  # nothing of it depends on what is unsharded


@distributed(world=2)
def test_reasons_of_the_default_predicate_and_a_root_unit(rank, world):
    class Wide(ToyModel):
        def __init__(self):
            super().__init__(layers=1, dim=128, hidden=160)
            self.layers[0].thin_proj = nn.Linear(128, 8)

    model, _ = build(
        world, Wide(), predicate=None, hook_boundary_predicate=lambda name, module: name == "", shard=False
    )
    rows = {row.name: row for row in ownership_table(model)}
    assert {name for name, row in rows.items() if row.route == "muon"} == {
        "layers.0.q_proj.weight",
        "layers.0.up_proj.weight",
        "layers.0.down_proj.weight",
    }
    assert {row.unit for row in rows.values() if row.owners} == {"<root>"}
    assert rows["layers.0.q_proj.weight"].reason == "Linear in a block"
    assert rows["layers.0.thin_proj.weight"].reason == "thin: smaller side 8 < 128"
    assert rows["layers.0.down_proj.bias"].reason == "1-D"
    assert rows["embed.weight"].reason == "embedding or head"
    assert rows["lm_head.weight"].reason == "outside the repeated blocks"


@distributed(world=2)
def test_tied_parameters_have_one_row(rank, world):
    model, _ = build(world, ToyModel(layers=1, tie=True))
    names = [row.name for row in ownership_table(model)]
    assert names == [name for name, _ in ToyModel(layers=1, tie=True).named_parameters()]
    assert "embed.weight" in names and "lm_head.weight" not in names


class Stacked(ToyModel):
    """With a stack of experts per layer: fewer than ranks, and more."""

    def __init__(self):
        super().__init__(layers=2)
        for layer, experts in zip(self.layers, (1, 5), strict=True):
            layer.experts = nn.Parameter(torch.randn(experts, 4, 6))


@pytest.mark.parametrize("mesh", [(1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2)])
@distributed(world=4)
def test_owners_on_every_route(rank, world, mesh):
    policy = {
        "defaults": {"route": "adamw"},
        "overrides": [
            {"name": ["re:proj.weight$", "experts"], "set": {"route": "muon", "stack": True}},
            {"name": ["embed", "lm_head"], "set": {"route": "sharded_adamw"}},
        ],
    }
    toy = Stacked()
    toy.embed.weight.requires_grad_(False)
    shapes = {name: tuple(param.shape) for name, param in toy.named_parameters()}
    model, _ = build(world, toy, lambda name, param: True, shard=False, mesh=mesh, param_policy=policy)
    table = ownership_table(model)
    everywhere = [None] * world
    dist.all_gather_object(everywhere, table)
    assert all(other == table for other in everywhere)
    rows = {row.name: row for row in table}
    assert {name: row.shape for name, row in rows.items()} == shapes  # global also under tensor parallelism
    pieces = {dp.fqn: dp.pieces for dp in dmuon.get_dedicated_params(model)}
    for name, row in rows.items():
        if name in ("embed.weight", "lm_head.weight"):
            assert row.route == ("frozen" if name == "embed.weight" else "sharded_adamw")
            assert row.owners == (0, 1, 2, 3)
            continue
        assert row.route == ("muon" if "experts" in name or name.endswith("proj.weight") else "adamw")
        assert row.owners == tuple(sorted({piece.owner_rank for piece in pieces[name]}))
        assert len(row.owners) == 1 or name == "layers.1.experts"
    assert len(pieces["layers.1.experts"]) == 4 and len(rows["layers.1.experts"].owners) > 1
    assert {row.unit for row in table} == {"<root>", "layers.0", "layers.1"}
    told = {line.split()[0]: line for line in format_ownership_table(table).splitlines()}
    assert told["lm_head.weight"].split()[2:5] == ["sharded_adamw", "4", "ranks"]
    assert told["layers.0.experts"].split()[1:4] == ["1x4x6", "muon", str(rows["layers.0.experts"].owners[0])]


@distributed(world=2)
def test_owners(rank, world):
    """What each rank owns, counted from its own pieces: each expert and each block is a matrix."""
    policy = {
        "defaults": {"route": "adamw"},
        "overrides": [
            {"name": ["re:proj.weight$", "experts"], "set": {"route": "muon", "stack": True}},
            {"name": "up_proj.weight", "set": {"blocks": dmuon.split_sizes((30, 6))}},
            {"name": ["embed", "lm_head"], "set": {"route": "sharded_adamw"}},
        ],
    }
    toy = Stacked()
    toy.layers[0].q_proj.weight.requires_grad_(False)  # owned, not orthogonalised
    model, _ = build(world, toy, lambda name, param: True, shard=False, param_policy=policy)
    lines = [line.split() for line in dmuon.format_owners(model).splitlines()]
    assert lines[0] == ["rank", "matrices", "elements", "MiB", "Newton-Schulz"]
    muon = [p for p in dmuon.get_owned_params(model) if p.spec.route == "muon" and p.param.requires_grad]
    matrices = sum(math.prod(p.shape[:-2]) * (2 if "up_proj" in p.fqn else 1) for p in muon)
    elements = sum(piece.numel for piece in dmuon.get_owned_params(model))
    told = [str(rank), str(matrices), f"{elements:,}", f"{4 * elements / 2**20:.1f}"]
    everywhere = [None] * world
    dist.all_gather_object(everywhere, told)
    loads = runtime_of(model).assignment.loads
    assert lines[1:] == [[*told, f"{load:.1%}"] for told, load in zip(everywhere, loads, strict=True)]


def test_an_undedicated_model_has_no_table():
    with pytest.raises(RuntimeError, match=r"call dmuon.dedicate_params first"):
        ownership_table(ToyModel())


# ------------------------------------------------------------------ text


ROWS = [
    OwnershipRow(f"layers.{i}.q_proj.weight", (20, 36), "muon", (i % 4,), f"layers.{i}", "predicate") for i in range(9)
]
ROWS += [OwnershipRow("norm.weight", (20,), "adamw (FSDP2)", (), None, "not in the predicate")]


def test_as_dict_is_plain_data():
    assert ROWS[0].as_dict() == dataclasses.asdict(ROWS[0])
    assert json.loads(json.dumps(ROWS[-1].as_dict())) == {
        "name": "norm.weight",
        "shape": [20],
        "route": "adamw (FSDP2)",
        "owners": [],
        "unit": None,
        "reason": "not in the predicate",
    }


def test_format():
    assert format_ownership_table(ROWS[-2:]) == (
        "parameter               shape  route          owner  why\n"
        "layers.8.q_proj.weight  20x36  muon           0      predicate\n"
        "norm.weight             20     adamw (FSDP2)  -      not in the predicate"
    )
    assert len(format_ownership_table(ROWS).splitlines()) == 11


def test_format_of_several_owners():
    rows = [
        OwnershipRow("experts", (5, 4, 6), "muon", (0, 3), "<root>", "stack"),
        OwnershipRow("scale", (), "adamw", (12,), "<root>", "scalar"),
        OwnershipRow("embed", (29, 20), "sharded_adamw", tuple(range(16)), "<root>", "rows"),
        OwnershipRow("head", (29, 20), "adamw (FSDP2)", (), None, "not in the predicate"),
    ]
    assert format_ownership_table(rows) == (
        "parameter  shape  route          owner     why\n"
        "experts    5x4x6  muon           2 ranks   stack\n"
        "scale             adamw          12        scalar\n"
        "embed      29x20  sharded_adamw  16 ranks  rows\n"
        "head       29x20  adamw (FSDP2)  -         not in the predicate"
    )
    assert json.loads(json.dumps(rows[0].as_dict()))["owners"] == [0, 3]


@pytest.mark.parametrize("limit", [10, 11, 100])
def test_a_limit_that_is_not_reached_changes_nothing(limit):
    assert format_ownership_table(ROWS, limit) == format_ownership_table(ROWS)


@pytest.mark.parametrize("limit", [3, 4, 9])
def test_a_limit_leaves_out_the_middle_and_counts_it(limit):
    lines = format_ownership_table(ROWS, limit).splitlines()
    assert lines[0].split() == ["parameter", "shape", "route", "owner", "why"]
    position = lines.index(f"... {10 - limit} more")
    names = [line.split()[0] for line in lines[1:position] + lines[position + 1 :]]
    assert names == [row.name for row in [*ROWS[: limit - 2], *ROWS[-2:]]]
    assert position == 1 + limit - 2


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_a_limit_without_room_for_the_end_shows_the_first_rows(limit):
    lines = format_ownership_table(ROWS, limit).splitlines()
    assert lines[0].split() == ["parameter", "shape", "route", "owner", "why"]
    assert [line.split()[0] for line in lines[1:-1]] == [row.name for row in ROWS[:limit]]
    assert lines[-1] == f"... {10 - limit} more"


def test_an_empty_table():
    assert format_ownership_table([]).splitlines() == ["parameter  shape  route  owner  why"]


@distributed(world=2)
def test_blocks_and_orientation_are_told(rank, world):
    """What Newton-Schulz sees must be in the table, or a wrong cut would go unnoticed."""
    rules = [
        {"name": "q_proj", "set": {"blocks": dmuon.split_heads(5)}},
        {"name": "up_proj", "set": {"blocks": dmuon.split_sizes((30, 6)), "transposed": True}},
    ]
    model, _ = build(world, optimizer=False, param_policy={"overrides": rules})
    why = {row.name: row.reason for row in dmuon.ownership_table(model)}
    assert why["layers.0.q_proj.weight"] == "predicate; 4 blocks of 5 rows"
    assert why["layers.1.up_proj.weight"] == "predicate; 2 blocks 30+6 rows; stored [in, out]"
    assert why["layers.2.down_proj.weight"] == "predicate"
