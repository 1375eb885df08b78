"""``param_policy`` and ``route_hint_fn``: precedence, patterns, and what is refused. No processes."""

import logging

import pytest
import torch
from torch import nn

from torchtitan_dmuon.dmuon.ownership.boundaries import boundary_dtypes
from torchtitan_dmuon.dmuon.ownership.decide import Selection
from torchtitan_dmuon.dmuon.ownership.fused_weights import matrix_layouts
from torchtitan_dmuon.dmuon.ownership.policy import ROUTES, matches, nearest, resolve_specs
from torchtitan_dmuon.dmuon.ownership.spec import ParamSpec

Q0, Q1, UP0, UP1 = (
    "layers.0.attn.q_proj.weight",
    "layers.1.attn.q_proj.weight",
    "layers.0.mlp.up_proj.weight",
    "layers.1.mlp.up_proj.weight",
)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def parameters(**shapes):
    shapes = shapes or dict.fromkeys((Q0, UP0, Q1, UP1), (4, 6))
    return {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}


def resolve(policy=None, selected=None, hint=None, reasons=None, tied=None, layouts=None):
    """``tied``: the further names of a parameter, by its first one."""
    selected = selected or parameters()
    names = {fqn: [fqn, *(tied or {}).get(fqn, ())] for fqn in selected}
    selection = Selection(selected, dict.fromkeys(selected, "") | (reasons or {}), names, {})
    return resolve_specs(selection, policy, hint, layouts or {})


def override(names, **values):
    return {"name": names, "set": values}


# ------------------------------------------------------------------ precedence


def test_without_rules():
    selected = parameters(a=(4, 6), b=(2, 3))
    selected["b"].requires_grad_(False)
    selected["c"] = nn.Parameter(torch.empty(3, 2, dtype=BF16, device="meta"))
    specs = resolve(selected=selected, reasons={"a": "because", "c": "so"})
    assert list(specs) == ["a", "b", "c"]
    common = {"route": "muon", "grad_dtype": FP32, "master_dtype": FP32, "optim_dtype": FP32}
    none = {"output_dtype": None, "cast_forward_inputs": None}
    assert specs["a"] == ParamSpec("a", (4, 6), trainable=True, param_dtype=FP32, reason="because", **common, **none)
    assert specs["b"] == ParamSpec("b", (2, 3), trainable=False, param_dtype=FP32, reason="", **common, **none)
    assert specs["c"] == ParamSpec("c", (3, 2), trainable=True, param_dtype=BF16, reason="so", **common, **none)


DEFAULTS = {
    "param_dtype": BF16,
    "grad_dtype": BF16,
    "master_dtype": BF16,
    "optim_dtype": BF16,
    "output_dtype": BF16,
    "cast_forward_inputs": True,
}
OTHER = {
    "param_dtype": FP16,
    "grad_dtype": FP64,
    "master_dtype": FP64,
    "optim_dtype": FP64,
    "output_dtype": None,
    "cast_forward_inputs": False,
}


@pytest.mark.parametrize("field", DEFAULTS)
def test_an_override_changes_its_field_and_nothing_else(field):
    specs = resolve({"defaults": DEFAULTS, "overrides": [override(Q1, **{field: OTHER[field]})]})
    for name, spec in specs.items():
        for other, value in DEFAULTS.items():
            expected = OTHER[other] if (name, other) == (Q1, field) else value
            assert getattr(spec, other) == expected, (name, other)


@pytest.mark.parametrize("field", DEFAULTS)
def test_a_default_changes_its_field_and_nothing_else(field):
    plain, changed = resolve()[Q0], resolve({"defaults": {field: DEFAULTS[field]}})[Q0]
    assert {key for key in vars(plain) if getattr(plain, key) != getattr(changed, key)} == {field} | (
        {"declares_param_dtype"} if field == "param_dtype" else set()
    )
    assert getattr(changed, field) == DEFAULTS[field]


def test_a_param_dtype_is_declared_by_whichever_rule_gives_it():
    """Also when it is the parameter's own dtype; the other fields declare nothing."""

    def declared(policy=None):
        return {name for name, spec in resolve(policy).items() if spec.declares_param_dtype}

    others = {field: value for field, value in DEFAULTS.items() if field != "param_dtype"}
    assert declared() == set()
    assert declared({"defaults": others, "overrides": [override(Q1, **others)]}) == set()
    assert declared({"defaults": {"param_dtype": FP32}}) == {Q0, Q1, UP0, UP1}
    assert declared({"overrides": [override(Q1, param_dtype=FP32), override("up_proj", **others)]}) == {Q1}
    assert declared({"overrides": [override("q_proj", param_dtype=BF16), override(Q1, **others)]}) == {Q0, Q1}


def test_the_last_matching_override_wins_field_by_field():
    specs = resolve(
        {
            "defaults": {"param_dtype": BF16},
            "overrides": [
                override("q_proj", param_dtype=FP16, optim_dtype=BF16),
                override("layers.1.", param_dtype=FP32, master_dtype=FP64),
                override(["up_proj", Q1], grad_dtype=BF16),
            ],
        }
    )
    fields = ("param_dtype", "grad_dtype", "master_dtype", "optim_dtype")
    assert {name: tuple(getattr(spec, field) for field in fields) for name, spec in specs.items()} == {
        Q0: (FP16, FP32, FP32, BF16),
        Q1: (FP32, BF16, FP64, BF16),
        UP0: (BF16, BF16, FP32, FP32),
        UP1: (FP32, BF16, FP64, FP32),
    }


def test_route_hint():
    seen = {}
    selected = parameters()

    def hint(name, param):
        seen[name] = param
        return "muon" if "q_proj" in name else None

    assert {spec.route for spec in resolve(selected=selected, hint=hint).values()} == {"muon"}
    assert seen.keys() == selected.keys()
    assert all(seen[name] is param for name, param in selected.items())
    with pytest.raises(ValueError, match=r"route_hint_fn\('layers.0.attn.q_proj.weight'\).*'muno'.*mean 'muon'"):
        resolve(hint=lambda name, param: "muno")


def routes(*arguments, **keywords):
    return {name: spec.route for name, spec in resolve(*arguments, **keywords).items()}


def test_the_routes():
    assert ROUTES == ("muon", "adamw", "sharded_adamw")
    for route in ROUTES:
        everywhere = dict.fromkeys((Q0, UP0, Q1, UP1), route)
        assert routes({"defaults": {"route": route}}) == everywhere
        assert routes({"overrides": [override("weight", route=route)]}) == everywhere
        assert routes(hint=lambda name, param, route=route: route) == everywhere


def test_overrides_choose_among_the_routes():
    policy = {
        "overrides": [override("up_proj", route="adamw"), override([UP1, "layers.0.attn"], route="sharded_adamw")]
    }
    assert routes(policy) == {Q0: "sharded_adamw", UP0: "adamw", Q1: "muon", UP1: "sharded_adamw"}
    policy["overrides"].append(override("layers.1.*", route="muon"))
    assert routes(policy) == {Q0: "sharded_adamw", UP0: "adamw", Q1: "muon", UP1: "muon"}
    assert routes(
        {"defaults": {"route": "adamw"}, "overrides": [override("q_proj", param_dtype=BF16)]}
    ) == dict.fromkeys((Q0, UP0, Q1, UP1), "adamw")


def test_a_route_hint_is_stronger_than_the_defaults_and_weaker_than_overrides():
    hints = {Q0: "adamw", UP0: "sharded_adamw", Q1: "muon"}

    def hint(name, param):
        return hints.get(name)

    assert routes(hint=hint) == {**hints, UP1: "muon"}
    assert routes({"defaults": {"route": "sharded_adamw"}}, hint=hint) == {**hints, UP1: "sharded_adamw"}
    policy = {"defaults": {"route": "adamw"}, "overrides": [override("layers.0.", route="muon", optim_dtype=BF16)]}
    assert routes(policy, hint=hint) == {Q0: "muon", UP0: "muon", Q1: "muon", UP1: "adamw"}
    # A rule about something else leaves the hint standing.
    assert routes({"overrides": [override("layers", param_dtype=BF16)]}, hint=hint) == {**hints, UP1: "muon"}


def llama(layers=2):
    shapes = {"model.embed_tokens.weight": (32, 8)}
    for prefix in (f"model.layers.{i}" for i in range(layers)):
        shapes |= {f"{prefix}.self_attn.{name}.weight": (8, 8) for name in ("q_proj", "o_proj")}
        shapes |= {f"{prefix}.self_attn.{name}.weight": (4, 8) for name in ("k_proj", "v_proj")}
        shapes |= {f"{prefix}.mlp.{name}.weight": (20, 8) for name in ("gate_proj", "up_proj")}
        shapes |= {f"{prefix}.mlp.down_proj.weight": (8, 20)}
        shapes |= {f"{prefix}.{name}.weight": (8,) for name in ("input_layernorm", "post_attention_layernorm")}
    return parameters(**shapes, **{"model.norm.weight": (8,), "lm_head.weight": (32, 8)})


PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize("by_hint", [False, True])
def test_the_guides_type_split_on_llama(by_hint):
    """Matrices to Muon, vocabulary to shared rows, the rest to AdamW; everything computes in bfloat16."""
    selected = llama()
    overrides = [
        override(PROJECTIONS, route="muon"),
        override(["embed_tokens", "lm_head"], route="sharded_adamw"),
    ]

    def hint(name, param):
        if "embed_tokens" in name or "lm_head" in name:
            return "sharded_adamw"
        return "muon" if name.split(".")[-2] in PROJECTIONS else None

    policy = {"defaults": {"route": "adamw", "param_dtype": BF16}} | ({} if by_hint else {"overrides": overrides})
    specs = resolve(policy, selected, hint if by_hint else None)
    assert list(specs) == list(selected)
    by_route = {route: {name for name, spec in specs.items() if spec.route == route} for route in ROUTES}
    assert by_route["sharded_adamw"] == {"model.embed_tokens.weight", "lm_head.weight"}
    assert by_route["muon"] == {name for name in selected if "proj" in name} and len(by_route["muon"]) == 14
    assert by_route["adamw"] == {name for name in selected if "norm" in name} and len(by_route["adamw"]) == 5
    for name, spec in specs.items():
        assert spec.shape == tuple(selected[name].shape)
        assert (spec.param_dtype, spec.grad_dtype, spec.master_dtype, spec.optim_dtype) == (BF16, FP32, FP32, FP32)
        assert spec.declares_param_dtype and spec.output_dtype is None
    for boundary in ("model.layers.0.", "model.layers.1.", "lm_head"):
        assert boundary_dtypes(boundary, [s for n, s in specs.items() if n.startswith(boundary)]) == (BF16, None)


def test_a_type_split_without_the_vocabulary_selected_names_the_rule():
    """As when the predicate takes the matrices only."""
    selected = {name: param for name, param in llama().items() if "proj" in name}
    rules = [override(PROJECTIONS, route="muon"), override(["embed_tokens", "lm_head"], route="sharded_adamw")]
    with pytest.raises(ValueError, match=r"overrides\[1\]: 'embed_tokens' or 'lm_head' matches none of the 14"):
        resolve({"defaults": {"route": "adamw"}, "overrides": rules}, selected)


def test_rules_are_not_changed():
    policy = {"defaults": {"param_dtype": BF16}, "overrides": [override(["q_proj"], grad_dtype=BF16)]}
    resolve(policy)
    assert policy == {
        "defaults": {"param_dtype": BF16},
        "overrides": [{"name": ["q_proj"], "set": {"grad_dtype": BF16}}],
    }


@pytest.mark.parametrize("policy", [None, {}, {"defaults": {}}, {"overrides": []}, {"defaults": {}, "overrides": ()}])
def test_empty_policies(policy):
    assert resolve(policy) == resolve()


# ------------------------------------------------------------------ patterns


@pytest.mark.parametrize(
    ("pattern", "hits"),
    [
        ("q_proj", {Q0, Q1}),
        ("layers.1", {Q1, UP1}),
        ("layers", {Q0, Q1, UP0, UP1}),
        ("layersX1", set()),
        ("layers.", {Q0, Q1, UP0, UP1}),  # a substring: the dot is a dot
        ("Q_proj", set()),
        (Q0, {Q0}),
        ("layers.*.attn.*", {Q0, Q1}),
        ("*up_proj*", {UP0, UP1}),
        ("*.q_proj", set()),  # a glob has to cover the whole name
        ("*Q_PROJ*", set()),
        ("layers.?.mlp.up_proj.weight", {UP0, UP1}),
        ("layers.[1-9].*", {Q1, UP1}),
        (r"re:layers\.1\.", {Q1, UP1}),
        (r"re:^attn", set()),
        (r"re:(q|up)_proj\.weight$", {Q0, Q1, UP0, UP1}),
        (r"re:layers.\d.mlp", {UP0, UP1}),
        (r"re:[*]", set()),
    ],
)
def test_patterns(pattern, hits):
    assert {name for name in (Q0, Q1, UP0, UP1) if matches(pattern, name)} == hits
    policy = {"overrides": [override(pattern, optim_dtype=BF16)]}
    if hits:
        assert {name for name, spec in resolve(policy).items() if spec.optim_dtype is BF16} == hits
    else:
        with pytest.raises(ValueError) as caught:
            resolve(policy)
        assert repr(pattern) in str(caught.value)


def test_a_rule_that_matches_nothing_names_itself():
    overrides = [
        override("q_proj", param_dtype=BF16),
        override(["zzz", "layers.0.attn.qproj.weight"], param_dtype=BF16),
    ]
    with pytest.raises(ValueError) as caught:
        resolve({"overrides": overrides})
    message = str(caught.value)
    assert "overrides[1]" in message
    assert "'zzz' or 'layers.0.attn.qproj.weight' matches none of the 4 selected" in message
    assert f"did you mean {Q0!r}" in message


def test_one_pattern_of_a_rule_is_enough_and_the_others_are_told(caplog):
    caplog.set_level(logging.INFO)
    specs = resolve({"overrides": [override(["k_proj", "up_proj", "gate"], param_dtype=BF16)]})
    assert {name for name, spec in specs.items() if spec.param_dtype is BF16} == {UP0, UP1}
    assert caplog.messages == ["param_policy overrides[0]: no selected parameter matches 'k_proj', 'gate'"]


def test_every_name_of_a_tied_parameter_counts():
    selected, tied = (
        parameters(**{"embed_tokens.weight": (9, 4), Q0: (4, 4)}),
        {"embed_tokens.weight": ["lm_head.weight"]},
    )
    for pattern in ("lm_head", "lm_head.weight", "embed_tokens", "re:^lm", "*head*"):
        specs = resolve({"overrides": [override(pattern, route="sharded_adamw")]}, selected, tied=tied)
        assert {name: spec.route for name, spec in specs.items()} == {
            "embed_tokens.weight": "sharded_adamw",
            Q0: "muon",
        }


def test_a_rule_without_names_matches_nothing():
    for names in ([], ()):
        with pytest.raises(ValueError, match=r"overrides\[0\].*empty"):
            resolve({"overrides": [override(names, param_dtype=BF16)]})
        with pytest.raises(ValueError, match=r"overrides\[1\].*empty"):
            resolve({"overrides": [override("q_proj", param_dtype=BF16), override(names, param_dtype=BF16)]})


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("policy", "parts"),
    [
        ({"default": {}}, ["unknown key 'default'", "did you mean 'defaults'"]),
        ({"override": []}, ["unknown key 'override'", "did you mean 'overrides'"]),
        ({"defaults": {"param_dtpye": BF16}}, ["defaults", "'param_dtpye'", "did you mean 'param_dtype'"]),
        ({"defaults": {"shape": (2, 2)}}, ["defaults", "unknown key 'shape'", "known: route, param_dtype"]),
        ({"defaults": {"fqn": "x"}}, ["unknown key 'fqn'"]),
        ({"defaults": {"route": "moun"}}, ["defaults", "unknown route 'moun'", "did you mean 'muon'"]),
        (
            {"defaults": {"route": "shard_adamw"}},
            ["did you mean 'sharded_adamw'", "known: muon, adamw, sharded_adamw"],
        ),
        ({"defaults": {"route": "AdamW"}}, ["unknown route 'AdamW'", "known: muon, adamw, sharded_adamw"]),
        ({"defaults": {"route": None}}, ["unknown route None"]),
        ({"overrides": [override("q", output_dtypes=BF16)]}, ["overrides[0]", "did you mean 'output_dtype'"]),
        ({"overrides": [override("q"), override("q", route="x")]}, ["overrides[1]", "unknown route 'x'"]),
        ({"overrides": [{"name": "q"}]}, ["overrides[0]", "'name' and 'set'", "['name']"]),
        (
            {"overrides": [{"names": "q", "set": {}}]},
            ["overrides[0]", "'name' and 'set'", "['names', 'set']"],
        ),
        ({"overrides": [{"name": "q", "set": {}, "route": "muon"}]}, ["overrides[0]", "'name' and 'set'"]),
    ],
)
def test_unknown_keys_and_routes(policy, parts):
    with pytest.raises(ValueError) as caught:
        resolve(policy)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("field", ["param_dtype", "grad_dtype", "master_dtype", "optim_dtype", "output_dtype"])
@pytest.mark.parametrize("value", ["bfloat61", "int32", torch.int32, torch.bool, 16, torch.complex64])
def test_dtypes_are_checked(field, value):
    for policy in ({"defaults": {field: value}}, {"overrides": [override("q_proj", **{field: value})]}):
        with pytest.raises(
            ValueError, match=rf"{field} must be a floating torch.dtype or its name \('bf16', .*{value!r}$"
        ):
            resolve(policy)


@pytest.mark.parametrize("field", ["param_dtype", "master_dtype", "output_dtype", "grad_dtype", "optim_dtype"])
def test_dtypes_by_name(field):
    names = {
        BF16: ("bf16", "bfloat16"),
        FP16: ("fp16", "float16"),
        FP32: ("fp32", "float32"),
        FP64: ("fp64", "float64"),
    }
    for dtype, spelled in names.items():
        if (field, dtype) != ("grad_dtype", FP16):  # which overflows
            for name in (*spelled, str(dtype)):
                assert resolve({"defaults": {field: name}}) == resolve({"defaults": {field: dtype}})


@pytest.mark.parametrize("field", ["param_dtype", "master_dtype", "optim_dtype"])
def test_only_output_dtype_and_grad_dtype_may_be_none(field):
    with pytest.raises(ValueError, match=f"{field} must be a floating torch.dtype .*, got None"):
        resolve({"defaults": {field: None}})
    back = {"overrides": [override(Q0, output_dtype=None, grad_dtype=None)]}
    specs = resolve({"defaults": {"output_dtype": BF16, "grad_dtype": BF16}} | back)
    assert (specs[Q0].output_dtype, specs[Q0].grad_dtype) == (None, FP32)
    assert (specs[Q1].output_dtype, specs[Q1].grad_dtype) == (BF16, BF16)


@pytest.mark.parametrize("dtype", [FP16, torch.float8_e4m3fn])
def test_a_grad_dtype_that_overflows_is_refused(dtype):
    with pytest.raises(ValueError, match=f"{UP1}: grad_dtype {dtype} overflows"):
        resolve({"overrides": [override(UP1, grad_dtype=dtype)]})


@pytest.mark.parametrize("value", [None, 1, "yes"])
def test_cast_forward_inputs_is_a_bool(value):
    with pytest.raises(ValueError, match="cast_forward_inputs must be True or False"):
        resolve({"defaults": {"cast_forward_inputs": value}})


NORM = "layers.0.norm.weight"
ADAMW = {"defaults": {"route": "adamw"}}


@pytest.mark.parametrize("shape", [(7,), ()])
def test_what_is_no_matrix_goes_to_muon_by_its_exact_name_only_and_that_is_an_error(shape):
    """A rule for many (a predicate, the defaults, a pattern, a hint) leaves it to AdamW, and the table says why."""
    selected = parameters(**{"ok": (2, 3), NORM: shape})
    for policy, hint in [
        (None, None),
        ({"defaults": {"route": "muon", "optim_dtype": BF16}}, None),
        (ADAMW, lambda name, param: "muon"),
        *(
            (ADAMW | {"overrides": [override(wide, route="muon")]}, None)
            for wide in ("norm", "layers.*", "re:norm", "")
        ),
        (ADAMW | {"overrides": [override(NORM, param_dtype=BF16), override("norm", route="muon")]}, None),
        (ADAMW | {"overrides": [override(NORM, route="muon"), override("norm", route="muon")]}, None),
    ]:
        norm = resolve(policy, selected, hint)[NORM]
        assert (norm.route, norm.shape, norm.optim_dtype) == ("adamw", shape, norm.master_dtype)
        assert norm.reason == f"{len(shape)}-D: adamw, not muon"
    for names in (NORM, ["layers", NORM]):
        with pytest.raises(ValueError) as caught:
            resolve(ADAMW | {"overrides": [override(names, route="muon")]}, selected)
        assert str(caught.value) == (
            f"{NORM}: the muon route needs a matrix or a stack of matrices, this parameter has shape {list(shape)}; "
            "give the parameter route 'adamw', or leave it out of the predicate"
        )
    told = resolve(ADAMW | {"overrides": [override("norm", optim_dtype=FP32)]}, selected, reasons={NORM: "so"})[NORM]
    assert told.reason == "so"  # nobody has asked for muon


@pytest.mark.parametrize("shape", [(2, 3), (5, 3, 4), (1, 1, 1)])
def test_muon_takes_matrices_and_declared_stacks(shape):
    specs = resolve({"overrides": [override("w", stack=True)]}, parameters(w=shape))
    assert specs["w"] == ParamSpec("w", shape, "muon", True, FP32, stack=True)


CONV = "layers.0.conv.weight"
DECLARE = f"stack of 16 matrices by the param_policy override {{'name': '{CONV}', 'set': {{'stack': True}}}}"


@pytest.mark.parametrize("ask", ["predicate", "defaults", "override", "exact", "hint", "stack=False"])
@pytest.mark.parametrize("shape", [(16, 16, 3), (16, 1, 4), (8, 3, 14, 14)])
def test_what_nobody_calls_a_stack_is_none(ask, shape):
    """The weight of ``nn.Conv1d`` is [out, in, width]: its slices are no matrices of a layer."""
    policy = {
        "defaults": {"defaults": {"route": "muon"}},
        "override": {"defaults": {"route": "adamw"}, "overrides": [override("conv", route="muon")]},
        "exact": {"defaults": {"route": "adamw"}, "overrides": [override(CONV, route="muon")]},
        "stack=False": {"overrides": [override("conv", stack=False)]},
    }.get(ask)
    selected = parameters(**{"ok": (2, 3), CONV: shape})
    with pytest.raises(ValueError) as caught:
        resolve(policy, selected, (lambda name, param: "muon") if ask == "hint" else None)
    told = str(caught.value)
    assert told.startswith(f"{CONV}: the muon route needs a matrix or a stack of matrices")
    assert f"shape {list(shape)}" in told and "route 'adamw'" in told and "out of the predicate" in told
    assert f"store it flat ([{shape[0]}, " in told
    assert (DECLARE in told) == (len(shape) == 3)
    assert resolve({"overrides": [override("conv", route="adamw")]}, selected)[CONV].route == "adamw"


def test_experts_are_a_known_stack():
    class GroupedExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Parameter(torch.empty(4, 6, 8))

    with torch.device("meta"):
        model = nn.ModuleDict({"experts": GroupedExperts(), "conv": nn.Conv1d(16, 16, 3, bias=False)})
    layouts = matrix_layouts(model)
    selected = dict(model.named_parameters())
    spec = resolve(selected={"experts.w1": selected.pop("experts.w1")}, layouts=layouts)["experts.w1"]
    assert spec.route == "muon" and spec.stack
    with pytest.raises(ValueError, match=r"^conv\.weight: the muon route needs a matrix"):
        resolve(selected=selected, layouts=layouts)


def test_shared_rows_need_a_row():
    selected = parameters(ok=(2, 3), scale=())
    with pytest.raises(ValueError, match=r"scale: the sharded_adamw route .* this parameter is a scalar"):
        resolve({"defaults": {"route": "sharded_adamw"}}, selected)
    with pytest.raises(ValueError, match=r"scale: the sharded_adamw route"):
        resolve(selected=selected, hint=lambda name, param: "sharded_adamw")
    specs = resolve({"defaults": {"route": "sharded_adamw"}, "overrides": [override("scale", route="adamw")]}, selected)
    assert [spec.route for spec in specs.values()] == ["sharded_adamw", "adamw"]


@pytest.mark.parametrize("route", ["adamw", "sharded_adamw"])
@pytest.mark.parametrize("shape", [(7,), (2, 3), (2, 3, 4), (2, 3, 4, 5)])
def test_adamw_takes_any_shape(route, shape):
    assert resolve({"defaults": {"route": route}}, parameters(w=shape))["w"].route == route


def test_nearest():
    assert nearest("param_dtpye", ("route", "param_dtype")) == " (did you mean 'param_dtype'?)"
    assert nearest("zzz", ("route", "param_dtype")) == ""
