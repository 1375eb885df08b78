"""From TOML to the optimizer: groups by patterns, and every key's way to where it works."""

import dataclasses
from unittest import mock

import pytest
import torch

from models.llama3 import Llama3, Llama3Args
from models.llama3 import spec as llama3
from tests.support.meshes import one_rank
from tests.support.training import tiny, train, write_corpus
from torchtitan_dmuon import dmuon
from torchtitan_dmuon.config import ConfigError, config_to_toml, load_config
from torchtitan_dmuon.dmuon.ownership.blocks import split_heads
from torchtitan_dmuon.optimizer import build_optimizer, group_parameters, guarded_step
from torchtitan_dmuon.parallel import parallelize
from torchtitan_dmuon.parallel.parallelize import plan_dedication

ARGS = Llama3Args(dim=128, n_layers=2, n_heads=4, n_kv_heads=2, ffn_hidden_dim=160, vocab_size=64, max_seq_len=64)
TABLES = """
[[optimizer.param_groups]]
patterns = ["layers.1.attention.*", "tok_embeddings.weight"]
group_name = "fast"
lr = 2e-3
muon_weight_decay = 0
adamw_betas = [0.8, 0.9]

[[optimizer.param_groups]]
patterns = ["*.wq.weight"]
momentum = 0.5
nesterov = false
"""


def config_of(tmp_path, toml=TABLES, *arguments):
    path = tmp_path / "groups.toml"
    path.write_text(toml)
    return load_config(["--job.config_file", str(path), *arguments])


def test_groups_by_patterns(tmp_path):
    model = Llama3(ARGS)
    config = config_of(tmp_path)
    groups = group_parameters(model, config.optimizer.param_groups)
    assert [g["group_name"] for g in groups] == ["fast", "group1", "base"]
    names = {id(p): name for name, p in model.named_parameters()}
    held = [[names[id(p)] for p in group["params"]] for group in groups]
    assert sorted(held[0]) == sorted(
        ["tok_embeddings.weight", *(f"layers.1.attention.w{leaf}.weight" for leaf in "qkvo")]
    )
    assert held[1] == ["layers.0.attention.wq.weight"]  # the other one is in the first group already
    assert sorted(name for names_of_group in held for name in names_of_group) == sorted(names.values())
    assert groups[0]["lr"] == 2e-3 and groups[0]["muon_weight_decay"] == 0.0
    with pytest.raises(ConfigError, match=r"optimizer.param_groups: table 0: pattern '\*.wz' matches no trainable"):
        group_parameters(model, [{"patterns": ["*.wz"]}])
    with pytest.raises(
        ConfigError, match=r"table 1: every parameter of its patterns is in an earlier table: put it bef"
    ):
        group_parameters(model, [{"patterns": ["*.wq.*", "*.wk.*"]}, {"patterns": ["layers.0.*.wq.*"]}])


def test_the_same_groups_for_adamw(tmp_path):
    config = config_of(tmp_path, TABLES, "--optimizer.name", "AdamW", "--optimizer.lr", "1e-3")
    optimizer = build_optimizer(Llama3(ARGS), config)
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (2e-3, [0.8, 0.9], 0.1),
        (1e-3, (0.9, 0.95), 0.1),
        (1e-3, (0.9, 0.95), 0.1),
    ]


@pytest.mark.dist
@pytest.mark.parametrize("optimizer", ["DMuon", "AdamW"])
def test_the_logged_learning_rate_is_that_of_no_table(tmp_path, optimizer):
    write_corpus(tmp_path / "corpus")
    for tables, logged in [
        ('[{patterns = ["norm.weight"], lr = 0}]', 1e-3),
        ('[{patterns = ["*"], lr = 2e-3}]', 2e-3),
        ("[]", 1e-3),
    ]:
        options = {"optimizer__name": optimizer, "optimizer__lr": 1e-3, "optimizer__param_groups": tables}
        options |= {"training__steps": 2, "lr_scheduler__warmup_steps": 0, "checkpoint__enable": False}
        run = train(1, *tiny(tmp_path, **options))
        assert run.codes == [0] and run.steps[1][2] == logged, run.output


def test_tables_round_trip_and_are_checked(tmp_path):
    config = config_of(tmp_path)
    again = tmp_path / "again.toml"
    again.write_text(config_to_toml(config))
    assert load_config(["--job.config_file", str(again)]) == dataclasses.replace(config)
    line = '[{patterns = ["*.wq.weight"], lr = 1e-3}]'
    from_line = load_config(["--optimizer.param_groups", line])
    assert from_line.optimizer.param_groups == [{"patterns": ["*.wq.weight"], "lr": 1e-3}]
    for table, message in [
        ('patterns = ["a"]\nlrr = 1', "table 0: unknown key 'lrr', nearest is lr"),
        ("lr = 1", "table 0: patterns is missing, expected list of str"),
        ('patterns = "a"', "table 0: patterns: found 'a', expected list of str"),
        ('patterns = ["a"]\nmomentum = 1.0', "table 0: momentum: found 1.0, expected float >= 0 and < 1, or none"),
        ('patterns = ["a"]\nadamw_betas = [0.9, 1]', r"adamw_betas: found \[0.9, 1.0\], expected list of float"),
        (
            'patterns = ["a"]\nadamw_betas = [0.9]',
            r"found \[0.9\], expected list of float >= 0 and < 1, 2 of them, or none",
        ),
        ('patterns = ["a"]\nadamw_betas = [0.9, 0.9, 0.9]', "table 0: adamw_betas: found .*, 2 of them, or none"),
        ("patterns = []", r"table 0: patterns: found \[\], expected list of str, at least 1 of them"),
        ('patterns = ["a"]\ndmuon_route = "moun"', "dmuon_route: found 'moun', expected one of"),
    ]:
        with pytest.raises(ConfigError, match=message):
            config_of(tmp_path, f"[[optimizer.param_groups]]\n{table}")
    with pytest.raises(ConfigError, match="expected list of tables"):
        config_of(tmp_path, '[optimizer]\nparam_groups = ["wq"]')
    with pytest.raises(ConfigError, match="found 3, expected list of tables"):
        load_config(["--optimizer.param_groups", "3"])


def test_every_key_reaches_the_optimizer(tmp_path):
    arguments = ["--dmuon.normuon", "true", "--dmuon.normuon_beta2", "0.9", "--dmuon.cautious_weight_decay", "true",
                 "--dmuon.qk_clip_threshold", "30", "--dmuon.split_heads", "true", "--dmuon.scale", "spectral",
                 "--dmuon.ns_restart_iterations", "1", "3", "--dmuon.momentum", "0.8",
                 "--dmuon.ns_kernel", "cublas", "--debug.deterministic", "true"]  # fmt: skip
    config = config_of(tmp_path, "", *arguments)
    with one_rank() as meshes:
        with torch.device("meta"):
            model = Llama3(ARGS)
        parallelize(model, meshes, llama3, config)
        dmuon.materialize(model, lambda fqn, tensor: tensor.normal_(), torch.device("cpu"))
        model.init_buffers("cpu")
        optimizer = build_optimizer(model, config)
        assert optimizer.normuon.beta2 == 0.9 and optimizer.rule.cautious_weight_decay
        assert optimizer.rule.scale == "spectral" and optimizer.newton_schulz.restarts == (1, 3)
        assert optimizer.newton_schulz.kernel == "cublas" and optimizer.newton_schulz.deterministic
        assert optimizer.qk_clip.threshold == 30 and len(optimizer.qk_clip.layers) == 2
        assert optimizer.param_groups[0]["momentum"] == 0.8
        specs = {dp.fqn: dp.spec for dp in dmuon.get_dedicated_params(model)}
        for leaf, rows in (("wq", 128), ("wk", 64), ("wv", 64)):
            name = f"layers.1.attention.{leaf}.weight"
            # keys and values of 64 rows are thin, and left to AdamW
            assert (name in specs) == (rows >= 128)
        assert specs["layers.1.attention.wq.weight"].blocks == split_heads(32)((128, 128))
        assert specs["layers.1.attention.wo.weight"].blocks is None


def test_a_familys_rules_for_its_matrices(tmp_path):
    rule = {"name": "*.w2.weight", "set": {"transposed": True}}
    family = dataclasses.replace(llama3, matrices=lambda args: [rule] * (args == ARGS))
    with one_rank() as meshes:
        with torch.device("meta"):
            model = Llama3(ARGS)
        parallelize(model, meshes, family, config_of(tmp_path, "", "--dmuon.split_heads", "true"))
        specs = {dp.fqn: dp.spec for dp in dmuon.get_dedicated_params(model)}
    assert {fqn for fqn, spec in specs.items() if spec.transposed} == {
        f"layers.{i}.feed_forward.w2.weight" for i in (0, 1)
    }
    assert specs["layers.1.attention.wq.weight"].blocks is not None


def test_plan_is_untouched_by_the_new_keys():
    config = load_config([])
    assert plan_dedication(Llama3(ARGS), config.dmuon)["layers.0.attention.wq.weight"].muon


def plan_of(*arguments):
    return plan_dedication(Llama3(ARGS), load_config(list(arguments)).dmuon)


def test_what_muon_cannot_take_is_an_error_of_the_config():
    with pytest.raises(
        ConfigError, match=r"dmuon.include: layers.0.attention_norm.weight is no matrix \(shape \[128\]"
    ):
        plan_of("--dmuon.include", "layers.*")
    kept = plan_of("--dmuon.include", "layers.*", "--dmuon.exclude", "*norm*")  # taken back
    assert {name for name, decision in kept.items() if decision.muon} == {
        name for name in kept if name.startswith("layers.") and "norm" not in name
    }
    for others in ("fsdp2", "dedicated"):
        with pytest.raises(ConfigError, match=r"dmuon.exclude: no parameter of the model is left for Muon"):
            plan_of("--dmuon.exclude", "*", "--dmuon.others", others)


def test_what_dedication_refuses_is_an_error_of_the_config():
    """Of a model and config that do not fit, only dedication knows."""
    with one_rank() as meshes:
        with torch.device("meta"):
            model = Llama3(ARGS)
        refuse = mock.patch.object(dmuon, "dedicate_params", side_effect=ValueError("layers.0 does not fit"))
        with refuse, pytest.raises(ConfigError, match=r"^\[dmuon\]: layers.0 does not fit$"):
            parallelize(model, meshes, llama3, load_config([]))


@pytest.mark.parametrize("flag", [2.0, -1.0, torch.nan])
def test_a_guarded_adamw_stands_still_whatever_the_flag_is_but_zero(flag):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones(3)
    guarded_step(optimizer, torch.tensor(flag))
    assert weight.eq(1).all() and optimizer.state[weight]["step"] == 0
    weight.grad = torch.ones(3)
    guarded_step(optimizer, torch.tensor(0.0))
    assert weight.lt(1).all() and optimizer.state[weight]["step"] == 1


@pytest.mark.slow
@pytest.mark.dist
def test_variants_train_alike_on_every_mesh(tmp_path):
    """All of them together, with a threshold low enough for QK-clip to act: 1-D and tensor parallel agree."""
    write_corpus(tmp_path / "corpus")
    options = {
        "checkpoint__enable": "false",
        "dmuon__normuon": "true",
        "dmuon__cautious_weight_decay": "true",
        "dmuon__qk_clip_threshold": "0.02",
        "dmuon__split_heads": "true",
    }
    runs = [
        train(2, *tiny(tmp_path, **options)),
        train(2, *tiny(tmp_path, **options, training__global_batch_size="4", parallelism__tensor_parallel_degree="2")),
        train(2, *tiny(tmp_path, **{**options, "dmuon__qk_clip_threshold": "none"})),
    ]  # fmt: skip
    assert [run.codes for run in runs] == [[0, 0]] * 3, [run.output for run in runs]
    losses = [[run.steps[step][0] for step in range(1, 5)] for run in runs]
    assert losses[1] == pytest.approx(losses[0], abs=3e-4)
    assert abs(losses[2][3] - losses[0][3]) > 1e-3, "QK-clip made no difference: the test shows nothing"


@pytest.mark.slow
@pytest.mark.dist
def test_clipping_in_buckets(tmp_path):
    """The first norm is that of all gradients either way; with a bound that acts, the runs part."""
    write_corpus(tmp_path / "corpus")
    runs = [
        train(2, *tiny(tmp_path, checkpoint__enable="false", dmuon__clip=clip, training__max_norm=0.05))
        for clip in ("joint", "buckets")
    ]
    assert [run.codes for run in runs] == [[0, 0]] * 2, [run.output for run in runs]
    assert runs[0].steps[1] == runs[1].steps[1]
    assert runs[0].steps[4] != runs[1].steps[4]
