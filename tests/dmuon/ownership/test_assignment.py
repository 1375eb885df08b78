"""Who owns what: balance, purity, spread (behaviour 21 of docs/design)."""

import random
from collections import Counter

import pytest
import torch
import torch.distributed as dist

import dmuon
from tests.support.harness import flat_mesh
from tests.support.oracle import ToyModel, is_proj
from tests.support.pool import distributed
from torchtitan_dmuon.dmuon.ownership.assignment import MatrixCost, assign


def default_flops(m, n):
    """Of Newton-Schulz with its defaults, half of each symmetric product: the Gram form, which square matrices tie."""
    s, wide = min(m, n), max(m, n)
    return 14 * s**3 + 6 * s * s * wide


def costs_of(blocks, layers, prefix="layers."):
    """One unit a layer; ``blocks`` is leaf name -> shape."""
    return [
        MatrixCost(f"{prefix}{layer}.{leaf}", f"{prefix}{layer}", default_flops(*shape), 4 * shape[0] * shape[1])
        for layer in range(layers)
        for leaf, shape in blocks.items()
    ]


LLAMA_8B = {
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 4096),
    "mlp.gate_proj.weight": (14336, 4096),
    "mlp.up_proj.weight": (14336, 4096),
    "mlp.down_proj.weight": (4096, 14336),
}
D768 = {
    "wq": (768, 768),
    "wk": (768, 768),
    "wv": (768, 768),
    "wo": (768, 768),
    "w1": (2048, 768),
    "w2": (768, 2048),
    "w3": (2048, 768),
}
GPT2 = {  # Conv1D: [in, out]
    "attn.c_attn.weight": (768, 2304),
    "attn.c_proj.weight": (768, 768),
    "mlp.c_fc.weight": (768, 3072),
    "mlp.c_proj.weight": (3072, 768),
}
MODELS = {
    "8b": costs_of(LLAMA_8B, 32, "model.layers."),
    "d768": costs_of(D768, 12),
    "gpt2": costs_of(GPT2, 12, "transformer.h."),
}


def counts_of(assignment):
    """The number of pieces of each slot."""
    found = Counter(assignment.owner.values())
    return [found[slot] for slot in range(len(assignment.flops))]


def totals(costs, owner, slots, field):
    sums = [0] * slots
    for cost in costs:
        sums[owner[cost.fqn]] += getattr(cost, field)
    return sums


@pytest.mark.parametrize("name", MODELS)
def test_work_is_balanced(name):
    costs = MODELS[name]
    assignment = assign(costs, 8)
    flops = totals(costs, assignment.owner, 8, "flops")
    assert max(flops) / (sum(flops) / 8) <= 1.10
    assert assignment.imbalance == pytest.approx(max(flops) / (sum(flops) / 8) - 1, abs=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_figures_are_those_of_the_owners(name):
    costs = MODELS[name]
    assignment = assign(costs, 8)
    assert list(assignment.owner) == [cost.fqn for cost in costs]  # exactly the selection, in its order
    assert list(assignment.flops) == totals(costs, assignment.owner, 8, "flops")
    assert list(assignment.bytes) == totals(costs, assignment.owner, 8, "bytes")
    total = sum(assignment.flops)
    assert assignment.loads == pytest.approx([flops / total for flops in assignment.flops])
    assert sum(assignment.loads) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(20))
def test_never_worse_than_list_scheduling(seed):
    """max <= mean + (1 - 1/slots) * largest holds for every greedy order, so also for the longest first."""
    rng = random.Random(seed)
    slots = rng.randint(1, 9)
    costs = [
        MatrixCost(f"p{i}", f"u{i % 5}", rng.randint(1, 1000), rng.randint(1, 99)) for i in range(rng.randint(1, 60))
    ]
    flops = assign(costs, slots).flops
    assert max(flops) <= sum(flops) / slots + (1 - 1 / slots) * max(cost.flops for cost in costs) + 1e-9


def minimum_over_all_slots(costs, slots):
    """The rule of ``assign`` word by word: for each piece in its turn the best of all slots."""
    flops, size, of_unit, owner = [0] * slots, [0] * slots, {}, {}
    for cost in sorted(costs, key=lambda cost: (-cost.flops, -cost.bytes)):
        load = flops if cost.flops else size

        def rank_of(slot, cost=cost, load=load):
            return load[slot], of_unit.get((cost.unit, slot), 0), size[slot], slot

        slot = owner[cost.fqn] = min(range(slots), key=rank_of)
        flops[slot] += cost.flops
        size[slot] += cost.bytes
        of_unit[cost.unit, slot] = of_unit.get((cost.unit, slot), 0) + cost.bytes
    return owner


@pytest.mark.parametrize("seed", range(40))
def test_every_piece_goes_to_the_best_of_all_slots(seed):
    """Few different costs, so that most choices are between equal loads; empty pieces; units that come back."""
    rng = random.Random(seed)
    slots, units = rng.randint(1, 24), rng.choice([1, 3, 20, 200])
    kinds = [(rng.choice([0, 1, 2, 3]), rng.choice([0, 1, 2, 5])) for _ in range(rng.randint(1, 6))]
    costs = [MatrixCost(f"p{i}", f"u{rng.randrange(units)}", *rng.choice(kinds)) for i in range(rng.randint(1, 300))]
    if seed % 2:  # as in a model, where the pieces of a unit follow each other
        costs.sort(key=lambda cost: cost.unit)
    assert assign(costs, slots).owner == minimum_over_all_slots(costs, slots)


def test_thirty_thousand_pieces_on_1024_ranks():
    """256 experts in three stacks beside seven matrices, 39 times: the busiest owner has 1% more work than the mean."""
    experts = costs_of({f"w{i}[{e}]": (2048, 4096) for i in range(3) for e in range(256)}, 39)
    costs = [*experts, *costs_of(LLAMA_8B, 39)]
    assignment = assign(costs, 1024)
    assert len(costs) == 30225 and min(counts_of(assignment)) >= 1
    assert max(assignment.flops) * 1024 / sum(assignment.flops) <= 1.01
    for layer in range(39):
        owners = {assignment.owner[cost.fqn] for cost in experts if cost.unit == f"layers.{layer}"}
        assert len(owners) == 3 * 256  # every expert of a unit has an owner of its own


@pytest.mark.parametrize("frozen", [0, 1, 4])
@pytest.mark.parametrize("matrices", [8, 9, 13, 100])
def test_no_rank_is_idle_while_there_are_matrices_enough(matrices, frozen):
    costs = [
        MatrixCost(f"p{i}", f"u{i // 4}", 0 if i < frozen else 10 + 7 * (i % 3), 4 + i % 5) for i in range(matrices)
    ]
    assert min(counts_of(assign(costs, 8))) >= 1


def test_fewer_matrices_than_ranks():
    assignment = assign(MODELS["8b"][:3], 8)
    assert sorted(counts_of(assignment)) == [0] * 5 + [1] * 3


@pytest.mark.parametrize("name", MODELS)
def test_naming_does_not_matter(name):
    """Neither alphabetical order nor a number in the name plays a part: layer 10 is not layer 1."""
    costs = MODELS[name]
    rng = random.Random(0)
    letters = {cost.fqn: "".join(rng.choices("abcxyz019._", k=12)) + f"/{i}" for i, cost in enumerate(costs)}
    units = {unit: f"{rng.random()}-{i}" for i, unit in enumerate(dict.fromkeys(cost.unit for cost in costs))}
    renamed = [MatrixCost(letters[c.fqn], units[c.unit], c.flops, c.bytes) for c in costs]
    assert list(assign(renamed, 8).owner.values()) == list(assign(costs, 8).owner.values())


@pytest.mark.parametrize("name", MODELS)
def test_pure_and_deterministic(name):
    costs = MODELS[name]
    before = list(costs)
    first, second = assign(costs, 8), assign(tuple(costs), 8)
    assert first == second
    assert costs == before


def test_matrices_of_one_unit_have_different_owners():
    """Equal matrices, four a unit: every unit has all four ranks as owners."""
    costs = costs_of(dict.fromkeys("abcd", (8, 8)), 6)
    owner = assign(costs, 4).owner
    for layer in range(6):
        assert {owner[f"layers.{layer}.{leaf}"] for leaf in "abcd"} == {0, 1, 2, 3}


def test_among_equally_loaded_ranks_the_unit_is_spread_before_the_bytes():
    """Rank 0 has the heavy matrix of another unit; sharing this one matters more."""
    costs = [MatrixCost("heavy", "a", 10, 100), MatrixCost("x", "b", 10, 4), MatrixCost("y", "b", 10, 4)]
    assert assign(costs, 2).owner == {"heavy": 0, "x": 1, "y": 0}


@pytest.mark.parametrize(("name", "most"), [("8b", 2), ("d768", 2), ("gpt2", 2)])
def test_bytes_of_a_unit_are_spread(name, most):
    """No owner holds more of a unit than ``most`` of its largest matrices, and none holds a whole unit."""
    costs = MODELS[name]
    owner = assign(costs, 8).owner
    largest = max(cost.bytes for cost in costs)
    for unit in {cost.unit for cost in costs}:
        mine = [cost for cost in costs if cost.unit == unit]
        heaviest = max(totals(mine, owner, 8, "bytes"))
        assert heaviest <= most * largest, (unit, heaviest / largest)
        assert heaviest < sum(cost.bytes for cost in mine), unit


@pytest.mark.parametrize("sizes", [[10] * 16, [30, 20, 10] * 8])
def test_frozen_parameters_alone_are_spread_by_bytes(sizes):
    costs = [MatrixCost(f"p{i}", f"u{i // 4}", 0, size) for i, size in enumerate(sizes)]
    assignment = assign(costs, 8)
    assert max(assignment.bytes) <= 1.20 * sum(sizes) / 8
    assert assignment.loads == pytest.approx([b / sum(sizes) for b in assignment.bytes])
    assert assignment.imbalance == pytest.approx(max(assignment.bytes) * 8 / sum(sizes) - 1)


@pytest.mark.parametrize("trained", [1, 7, 16, 20])
def test_frozen_parameters_beside_trainable_ones_are_spread_by_bytes(trained):
    """Some layers are frozen, as in fine-tuning. Their cost is memory and broadcasts, so they must not
    gather on the one rank whose FLOPs happen to be the smallest."""
    slots = 8
    costs = [
        MatrixCost(c.fqn, c.unit, c.flops if int(c.unit.split(".")[-1]) < trained else 0, c.bytes) for c in MODELS["8b"]
    ]
    assignment = assign(costs, slots)
    mean = sum(assignment.bytes) / slots
    assert max(assignment.bytes) <= 1.25 * mean, [round(size / mean, 2) for size in assignment.bytes]


def test_a_frozen_parameter_goes_by_bytes_then_unit_then_slot():
    trained = [MatrixCost("x", "a", 100, 30), MatrixCost("y", "b", 90, 10), MatrixCost("z", "c", 80, 20)]
    assert assign(trained, 3).owner == {"x": 0, "y": 1, "z": 2}
    # Slot 1 has the fewest bytes, though neither the fewest FLOPs nor none of unit b.
    assert assign([*trained, MatrixCost("f", "b", 0, 5)], 3).owner["f"] == 1
    # Now slots 1 and 2 have 20 bytes each: a unit avoids the slot where it already is, else the lower slot is taken.
    filled = [*trained, MatrixCost("f", "d", 0, 10)]
    for unit, slot in (("b", 2), ("c", 1), ("d", 2), ("e", 1)):
        assert assign([*filled, MatrixCost("g", unit, 0, 4)], 3).owner == {"x": 0, "y": 1, "z": 2, "f": 1, "g": slot}


def test_nothing_to_assign():
    assignment = assign([], 3)
    assert assignment.owner == {}
    assert assignment.flops == assignment.bytes == (0, 0, 0)
    assert assignment.loads == (0.0, 0.0, 0.0)
    assert assignment.imbalance == 0.0


def test_errors():
    with pytest.raises(ValueError, match="num_slots must be at least 1, got 0"):
        assign(MODELS["gpt2"], 0)
    with pytest.raises(ValueError, match=r"a\.weight is listed twice"):
        assign([MatrixCost("a.weight", "a", 1, 1), MatrixCost("a.weight", "b", 2, 2)], 2)


@distributed(world=2)
def test_dedication_gives_the_same_assignment_on_every_process(rank, world):
    torch.manual_seed(rank)  # nothing random may play a part
    model = ToyModel(layers=5)
    selected = [name for name, param in model.named_parameters() if is_proj(name, param)]
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    assignment = dmuon.dedicate_params(model, flat_mesh(world), predicate=is_proj)
    everywhere = [None] * world
    dist.all_gather_object(everywhere, assignment)
    assert everywhere[0] == everywhere[1] == assignment
    assert list(assignment.owner) == selected
    assert list(assignment.bytes) == [
        sum(4 * shapes[name][0] * shapes[name][1] for name in selected if assignment.owner[name] == slot)
        for slot in range(world)
    ]
    assert list(assignment.flops) == [
        sum(default_flops(*shapes[name]) for name in selected if assignment.owner[name] == slot)
        for slot in range(world)
    ]
    owned = {dp.fqn for dp in dmuon.get_owned_params(model)}
    assert owned == {name for name, slot in assignment.owner.items() if slot == rank}
