"""NorMuon, cautious weight decay and QK-clip, against plain re-statements of their papers' updates."""

import pytest
import torch

import dmuon
from dmuon import Block, HeadWeights, QKClip, QKClipLayer, split_interleaved, split_sizes
from tests.support.harness import assert_same, build, full_weights, train, weights_of
from tests.support.oracle import OracleMuon, ToyModel, is_proj, train_one_process
from tests.support.pool import distributed

HYPER = {"lr": 0.05, "weight_decay": 0.2}
MESHES = [None, (2, 1, 2)]


@pytest.mark.parametrize("mesh", MESHES, ids=["1-D", "2x1x2"])
@pytest.mark.parametrize(
    "variant",
    [
        {"normuon": True},
        {"normuon": True, "normuon_beta2": 0.5, "scale": "original"},
        {"cautious_weight_decay": True},
        {"normuon": True, "cautious_weight_decay": True, "scale": "spectral"},
    ],
    ids=["normuon", "beta2", "cautious", "both"],
)
@distributed(world=4)
def test_variants_equal_one_process(rank, world, mesh, variant):
    columns = mesh[2] if mesh else 1
    cautious = variant.get("cautious_weight_decay", False)
    steps = 2 if cautious else 4
    model, optimizer = build(world, mesh=mesh, muon={**HYPER, **variant})
    train(model, optimizer, steps, rank // columns)
    oracle = ToyModel()
    expected = OracleMuon(
        oracle,
        is_proj,
        **HYPER,
        scale=variant.get("scale", "match_rms_adamw"),
        normuon_beta2=variant.get("normuon_beta2", 0.95) if "normuon" in variant else None,
        cautious=cautious,
    )
    train_one_process(oracle, expected, steps, world // columns)
    weights = full_weights(model)
    if cautious:
        # An element decays or not by the sign of its update: where that is zero but for rounding, it may do either.
        for name, values in weights_of(oracle).items():
            difference = (weights[name] - values).abs()
            flipped = difference > 1e-5
            assert flipped.sum() <= 1
            assert (difference[flipped] < 1.1 * HYPER["lr"] * HYPER["weight_decay"] * values[flipped].abs()).all()
            weights[name][flipped] = values[flipped]
    assert_same(weights, weights_of(oracle))


@distributed(world=2)
def test_normuon_of_blocks_and_of_transposed_weights(rank, world):
    """Neurons are rows of each block; of a weight stored [in, out] they are columns, and so is its scale's ``out``."""
    policy = {
        "overrides": [
            {"name": "up_proj", "set": {"blocks": split_interleaved(4, (2, 7))}},
            {"name": "down_proj", "set": {"transposed": True, "blocks": split_sizes((6, 30), dim=1)}},
        ]
    }
    model, optimizer = build(world, muon={**HYPER, "normuon": True, "scale": "original"}, param_policy=policy)
    train(model, optimizer, 3, rank)
    assert optimizer.state_of(optimizer.runtime.owned[0])["second_moment"].dtype == torch.float32

    def parts(name, shape):
        everything = slice(None)
        if "up_proj" in name:
            first = [h * 9 + i for h in range(4) for i in range(2)]
            return [(first, everything), ([i for i in range(36) if i not in first], everything)]
        if "down_proj" in name:
            return [(everything, list(range(6))), (everything, list(range(6, 36)))]
        return [(everything, everything)]

    oracle = ToyModel()
    expected = OracleMuon(
        oracle, is_proj, **HYPER, scale="original", normuon_beta2=0.95, parts=parts,
        transposed=lambda name: "down_proj" in name,
    )  # fmt: skip
    train_one_process(oracle, expected, 3, world)
    assert_same(full_weights(model), weights_of(oracle))


@distributed(world=2)
def test_normuon_needs_whole_neurons(rank, world):
    policy = {"overrides": [{"name": "down_proj", "set": {"blocks": split_sizes((6, 30), dim=1)}}]}
    model, _ = build(world, optimizer=False, param_policy=policy)
    with pytest.raises(ValueError, match=r"normuon: the blocks of .*down_proj.* cut along its inputs"):
        dmuon.Muon(model, normuon=True)  # on every rank, whoever owns it
    with pytest.raises(ValueError, match="normuon_beta2 is out of range"):
        dmuon.Muon(model, normuon=True, normuon_beta2=1.0)


def test_a_neuron_without_gradient_stays_finite_and_still():
    """A dead neuron's row is zero: 0 / 0 must not appear, and the others keep the update's norm."""
    from torchtitan_dmuon.dmuon.optimizer.normuon import NorMuon

    class View:
        class piece:
            class spec:
                transposed = False

        def __init__(self):
            self.state = {"second_moment": torch.zeros(3, 1)}

        def take(self, tensor):
            return tensor.view(1, 3, 1)

        def put(self, tensor, values):
            pass

    update = torch.tensor([[[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]])
    norm = update.norm()
    NorMuon(0.9)(View(), update, torch.tensor(1.0))
    assert torch.equal(update[0, 1], torch.zeros(2))
    torch.testing.assert_close(update.norm(), norm)
    torch.testing.assert_close(update[0, 0].norm(), update[0, 2].norm())  # every neuron moves alike


# ------------------------------------------------------------------ QK-clip

HEADS, HEAD_DIM = 4, 5


def clip_layers(maxima, exponent=0.5):
    return [
        QKClipLayer(
            maxima[index],
            (
                HeadWeights(f"layers.{index}.q_proj.weight", Block(0, HEAD_DIM, HEADS, HEAD_DIM), exponent),
                # every head has 3 of its 9 rows in the "key"
                HeadWeights(f"layers.{index}.up_proj.weight", Block(2, 3, HEADS, 9), 1.0),
            ),
        )
        for index in range(3)
    ]


@pytest.mark.parametrize("mesh", [None, (2, 2, 1), (2, 1, 2)], ids=["1-D", "2x2", "2x1x2"])
@distributed(world=4)
def test_qk_clip_scales_heads_over_the_threshold(rank, world, mesh):
    """By the largest logit any rank has seen; momentum untouched, the next forward sees it, maxima start anew."""
    columns = mesh[2] if mesh else 1
    local = HEADS // columns
    seen = torch.tensor([[50.0, 80.0, 120.0, 300.0], [0.0, 10.0, 99.0, 101.0], [1.0, 2.0, 3.0, float("inf")]])
    maxima = [torch.zeros(local) for _ in range(3)]
    model, optimizer = build(world, mesh=mesh, muon={**HYPER, "qk_clip": QKClip(clip_layers(maxima), threshold=100.0)})
    plain, reference = build(world, mesh=mesh, muon=HYPER)
    data = rank // columns
    train(plain, reference, 1, data)
    column = rank % columns
    for layer, value in zip(maxima, seen, strict=True):
        # The largest logit is seen by one data-parallel rank, every other sees half of it.
        layer.copy_(value[column * local : (column + 1) * local] * (1.0 if data == 1 else 0.5))
    train(model, optimizer, 1, data)
    expected = full_weights(plain)
    for index in range(3):
        for head in range(HEADS):
            gamma = min(1.0, 100.0 / seen[index, head].item()) if seen[index, head] not in (0, float("inf")) else 1.0
            expected[f"layers.{index}.q_proj.weight"][head * 5 : head * 5 + 5] *= gamma**0.5
            expected[f"layers.{index}.up_proj.weight"][head * 9 + 2 : head * 9 + 5] *= gamma
    assert_same(full_weights(model), expected, atol=1e-7, rtol=1e-6)
    assert all(not layer.any() for layer in maxima)
    state, other = ([o.state_of(p)["momentum_buffer"] for p in o.runtime.owned] for o in (optimizer, reference))
    for actual, wanted in zip(state, other, strict=True):
        assert torch.equal(actual, wanted)
    # A step whose gradients are not finite changes nothing, though its logits were huge.
    before = full_weights(model)
    for layer in maxima:
        layer.fill_(1e6)
    from tests.support.oracle import batch, loss_of

    tokens, labels = batch(1, data)
    loss_of(model(tokens), labels).backward()
    optimizer.step(found_inf=torch.ones(()))
    assert_same(full_weights(model), before, atol=0, rtol=0)


@distributed(world=2)
def test_what_qk_clip_refuses(rank, world):
    model, _ = build(world, optimizer=False)
    rows = Block(0, 5, 4, 5)
    for layer, message in [
        (QKClipLayer(torch.zeros(4), (HeadWeights("layers.0.k_proj.weight", rows, 0.5),)), "did you mean 'layers.0"),
        (QKClipLayer(torch.zeros(4), (HeadWeights("layers.0.norm.weight", rows, 0.5),)), "is no dedicated parameter"),
        (
            QKClipLayer(torch.zeros(3), (HeadWeights("layers.0.q_proj.weight", rows, 0.5),)),
            "4 heads, the layer notes 3",
        ),
        (QKClipLayer(torch.zeros(5), (HeadWeights("layers.0.q_proj.weight", Block(0, 5, 5, 5), 0.5),)), "20 outputs"),
    ]:
        with pytest.raises(ValueError, match=message):
            dmuon.Muon(model, qk_clip=QKClip([layer]))
    with pytest.raises(ValueError, match="threshold must be positive"):
        QKClip(clip_layers([torch.zeros(4)] * 3), threshold=0)
    with pytest.raises(ValueError, match="no layer"):
        QKClip([])
    with pytest.raises(ValueError, match="a layer without weights scales nothing"):
        dmuon.Muon(model, qk_clip=QKClip([QKClipLayer(torch.zeros(4), ())]))
    frozen = ToyModel()
    frozen.layers[0].q_proj.weight.requires_grad_(False)
    frozen, _ = build(world, frozen, optimizer=False)
    with pytest.raises(ValueError, match=r"layers\.0\.q_proj\.weight is frozen; leave its layer out"):
        dmuon.Muon(frozen, qk_clip=QKClip(clip_layers([torch.zeros(4)] * 3)))


def test_which_weights_heads_have():
    maxima = torch.zeros(4)
    own = dmuon.attention_heads(maxima, "q", "k", n_heads=4, n_kv_heads=4, head_dim=8)
    assert [(w.fqn, w.exponent, len(w.heads)) for w in own.weights] == [("q", 0.5, 32), ("k", 0.5, 32)]
    shared = dmuon.attention_heads(maxima, "q", "k", n_heads=4, n_kv_heads=2, head_dim=8)
    assert [(w.fqn, w.exponent) for w in shared.weights] == [("q", 1.0)]
    latent = dmuon.latent_attention_heads(maxima, "q", "kv", n_heads=2, nope_dim=3, rope_dim=2, v_dim=4)
    assert [(w.fqn, w.exponent, w.heads.indices()) for w in latent.weights] == [
        ("q", 0.5, [0, 1, 2, 5, 6, 7]),
        ("q", 1.0, [3, 4, 8, 9]),
        ("kv", 0.5, [0, 1, 2, 7, 8, 9]),
    ]
