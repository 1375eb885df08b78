"""HuggingFace folders: written, read back, and the same logits as ours through transformers."""

import dataclasses
import json
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from models import get_model_args, get_model_spec, model_names
from models.layers import RopeScaling
from scripts.convert_checkpoint import main as convert
from tests.support.pool import distributed
from tests.support.toy import read_checkpoint
from tests.support.training import TINY, assert_refused, tiny, train, write_corpus
from torchtitan_dmuon.checkpoint import CheckpointError, Contents, TrainState
from torchtitan_dmuon.checkpoint.directory import checksum
from torchtitan_dmuon.checkpoint.loading import load_huggingface

SPEC = get_model_spec("llama3")
ARGS = dataclasses.replace(TINY, vocab_size=257)
TOKENS = torch.randint(257, (2, 50), generator=torch.Generator().manual_seed(1))

pytestmark = pytest.mark.dist


def our_model(weights):
    """The plain model with the ``model.`` tensors of a checkpoint."""
    model = SPEC.build(ARGS)
    model.load_state_dict({n.removeprefix("model."): t.float() for n, t in weights.items() if n.startswith("model.")})
    return model


def logits(model):
    with torch.no_grad():
        out = model(TOKENS)
    return out.logits if hasattr(out, "logits") else out


def hf_logits(folder, kind=LlamaForCausalLM):
    return logits(kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps on two ranks, vocabulary 257."""
    folder = tmp_path_factory.mktemp("run")
    write_corpus(folder / "corpus")
    done = train(2, *tiny(folder, training__steps=2))
    assert done.codes == [0, 0], done.output
    return folder


def test_to_huggingface_and_back(run, tmp_path):
    checkpoint = run / "out/checkpoint/step-2"
    assert convert(["to-hf", str(checkpoint), str(tmp_path / "hf"), "--max_shard_gb", "0.001"]) == 0
    weights = read_checkpoint(checkpoint)
    expected = logits(our_model(weights))
    for kind in (LlamaForCausalLM, AutoModelForCausalLM):
        torch.testing.assert_close(hf_logits(tmp_path / "hf", kind), expected, atol=2e-5, rtol=1e-5)
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    assert len(files) > 1 and set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for n, t in weights.items() if n.startswith("model."))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"], config["torch_dtype"]) == (257, 2048, "float32")

    assert convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back"), "--model", "llama3"]) == 0
    back = read_checkpoint(tmp_path / "back")
    assert back.keys() == {name for name in weights if name.startswith("model.")}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in back.items())


def save_plain(folder, family, model):
    """A model-only checkpoint of a model in this process."""
    folder.mkdir()
    names = dict(model.named_parameters())  # a tied weight once
    dcp.save({f"model.{n}": p.detach() for n, p in names.items()}, checkpoint_id=str(folder), no_dist=True)
    state = TrainState(3, {}, {}, "DMuon", f"{family} debugmodel", contents="model")
    state.hf_config = get_model_spec(family).hf.hf_config(model.args)
    (folder / "trainer.json").write_text(state.to_json())
    sums = {path.name: checksum(path) for path in folder.iterdir()}
    (folder / "checksums.json").write_text(json.dumps(sums))


VARIANTS = {
    "as it is": {},
    "tied": {"tie_embeddings": True},
    "scaled": {"rope_scaling": RopeScaling(factor=8.0, original_max_seq_len=32)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", model_names())
def test_every_family_there_and_back(tmp_path, family, variant):
    """Ours to transformers, the same logits; transformers' own files back, the same weights to the last bit."""
    args = dataclasses.replace(get_model_args(family, "debugmodel"), vocab_size=257, init_std=0.1, **VARIANTS[variant])
    model = get_model_spec(family).build(args)
    save_plain(tmp_path / "ours", family, model)
    assert convert(["to-hf", str(tmp_path / "ours"), str(tmp_path / "hf")]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(logits(theirs), logits(model), atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "saved")
    assert convert(["from-hf", str(tmp_path / "saved"), str(tmp_path / "back"), "--model", family]) == 0
    back = read_checkpoint(tmp_path / "back")
    expected = dict(model.named_parameters())
    assert back.keys() == {f"model.{name}" for name in expected}
    assert all(torch.equal(back[f"model.{name}"], param) for name, param in expected.items())


def test_what_transformers_writes_is_read(run, tmp_path):
    """A folder that transformers saved, in bf16, as the start of a run on another number of ranks."""
    checkpoint = run / "out/checkpoint/step-2"
    assert convert(["to-hf", str(checkpoint), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    saved.save_pretrained(tmp_path / "theirs", max_shard_size="500KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    for path, in_hf in ((tmp_path / "theirs", True), (tmp_path / "ours", False)):
        if not in_hf:
            assert convert(["from-hf", str(tmp_path / "theirs"), str(path), "--model", "llama3"]) == 0
        done = train(
            4,
            *tiny(
                run,
                job__dump_folder=tmp_path / f"out-{in_hf}",
                training__steps=1,
                lr_scheduler__warmup_steps=0,
                optimizer__lr="1e-30",  # moves nothing that float32 can show
                optimizer__weight_decay=0,
                parallelism__tensor_parallel_degree=2,
                checkpoint__initial_load_path=path,
                checkpoint__initial_load_in_hf=in_hf,
            ),
        )
        assert done.codes == [0] * 4, done.output
        found = read_checkpoint(tmp_path / f"out-{in_hf}/checkpoint/step-1")
        expected = saved.float().state_dict()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[f"model.{SPEC.hf.from_hf(name)}"], tensor, atol=1e-20, rtol=0)


@pytest.mark.parametrize("in_hf", [True, False])
def test_last_save(run, tmp_path, in_hf):
    done = train(
        2,
        *tiny(
            run,
            job__dump_folder=tmp_path / "out",
            training__steps=3,
            checkpoint__last_save_model_only=True,
            checkpoint__last_save_in_hf=in_hf,
            checkpoint__export_dtype="bfloat16",
        ),
    )
    assert done.codes == [0, 0], done.output
    last = tmp_path / "out/checkpoint/step-3"
    if in_hf:
        exported = logits(LlamaForCausalLM.from_pretrained(last, dtype=torch.float32, attn_implementation="eager"))
        assert not list(last.glob("*.distcp"))
    else:
        weights = read_checkpoint(last)
        assert {t.dtype for t in weights.values()} == {torch.bfloat16}
        assert all(name.startswith("model.") for name in weights)
        exported = logits(our_model(weights))
    again = train(2, *tiny(run, job__dump_folder=tmp_path / "out", training__steps=3))
    assert again.codes == [0, 0] and not again.steps, again.output
    assert "it holds only weights" in again.output and "Nothing to do: step 3 of 3 is done" in again.output
    # The same run with a full checkpoint at its end.
    whole = train(2, *tiny(run, job__dump_folder=tmp_path / "full", training__steps=3))
    assert whole.codes == [0, 0], whole.output
    state = read_checkpoint(tmp_path / "full/checkpoint/step-3")
    full = our_model({n: t.to(torch.bfloat16) for n, t in state.items() if n.startswith("model.")})
    torch.testing.assert_close(exported, logits(full), atol=2e-5, rtol=1e-5)


def test_weights_of_another_model_are_refused(run, tmp_path):
    assert convert(["to-hf", str(run / "out/checkpoint/step-2"), str(tmp_path / "hf")]) == 0
    options = {"checkpoint__initial_load_path": tmp_path / "hf", "checkpoint__initial_load_in_hf": True}
    options |= {"job__dump_folder": tmp_path / "out"}
    other = train(2, *tiny(run, model__flavor="160M", **options))
    assert_refused(other, "model.embed_tokens.weight is [257, 128] there, llama3 160M has [257, 768]")
    shutil.rmtree(tmp_path / "hf")
    assert_refused(train(2, *tiny(run, **options)), f"checkpoint.initial_load_path: {tmp_path}/hf does not exist")


def hf_folder(folder, model, config, **stored):
    """A HuggingFace folder of ``model`` with ``stored`` tensors more."""
    folder.mkdir()
    tensors = {SPEC.hf.to_hf(name): param.detach() for name, param in model.named_parameters()}
    # transformers writes several files, and the head in the last.
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    save_file(
        {SPEC.hf.to_hf(f"{name}.weight"): t for name, t in stored.items()}, folder / "model-00002-of-00002.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({**SPEC.hf.hf_config(ARGS), **config}))
    return folder


def llama(tied):
    return SPEC.build(dataclasses.replace(ARGS, tie_embeddings=tied))


@distributed(world=2)
def test_a_stored_head_and_a_tied_model(rank, world, tmp_path):
    """The last row of the head differs: only the last rank sees it, and every rank says so."""
    tied, untied = llama(tied=True), llama(tied=False)
    embedding = tied.tok_embeddings.weight.detach()
    other = embedding.clone()
    other[-1, -1] += 1
    if rank == 0:
        for name, tie in (("own", False), ("stale", True)):
            hf_folder(tmp_path / name, tied, {"tie_word_embeddings": tie}, output=other)
        hf_folder(tmp_path / "equal", tied, {"tie_word_embeddings": True}, output=embedding.clone())
        hf_folder(tmp_path / "bf16", tied, {"tie_word_embeddings": True}, output=embedding.bfloat16())
        hf_folder(tmp_path / "short", tied, {}, output=embedding[:-1].clone())
        hf_folder(tmp_path / "none", tied, {"tie_word_embeddings": True}, norm=tied.norm.weight.detach())
    dist.barrier()

    def load(model, name):
        model.init_weights(seed=7)
        load_huggingface(tmp_path / name, contents_of(model), dist.group.WORLD)
        return model

    refused = r"lm_head.weight is a head of its own, not model.embed_tokens.weight, .*: choose a model whose head"
    for name in ("own", "stale", "bf16", "short"):
        with pytest.raises(CheckpointError, match=refused):
            load(tied, name)
    with pytest.raises(CheckpointError, match=refused):
        load(untied, "stale")
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight, .*: choose a model.flavor that ties them"):
        load(untied, "none")
    for model, name, head in (
        (tied, "equal", embedding),
        (untied, "equal", embedding),
        (untied, "own", other),
        (tied, "none", embedding),
    ):
        loaded = load(model, name)
        assert torch.equal(loaded.tok_embeddings.weight, embedding), name
        assert torch.equal(loaded.output.weight, head), name


def contents_of(model):
    """A plain model as the loader sees it."""
    named = dict(model.named_parameters())
    return Contents(
        model=lambda: {name: param.detach() for name, param in named.items()},
        optimizer=dict,
        shapes=lambda: {name: tuple(param.shape) for name, param in named.items()},
        frozen=set,
        loaded=lambda: None,
        model_name="llama3 tiny",
        optimizer_name="DMuon",
        config_toml="",
        seed=0,
        hf_names=SPEC.hf,
        hf_config=SPEC.hf.hf_config(ARGS),
    )


def test_converting_a_stored_tied_head(tmp_path, capsys):
    """Left out if it is the embedding, refused if it is not."""
    model = llama(tied=True)
    embedding = model.tok_embeddings.weight.detach()
    hf_folder(tmp_path / "equal", model, {"tie_word_embeddings": True}, output=embedding.clone())
    hf_folder(tmp_path / "stale", model, {"tie_word_embeddings": True}, output=embedding + 1)
    assert convert(["from-hf", str(tmp_path / "equal"), str(tmp_path / "ours"), "--model", "llama3"]) == 0
    assert read_checkpoint(tmp_path / "ours").keys() == {f"model.{name}" for name, _ in model.named_parameters()}
    assert convert(["from-hf", str(tmp_path / "stale"), str(tmp_path / "no"), "--model", "llama3"]) == 1
    assert "lm_head.weight is a head of its own" in capsys.readouterr().err and not (tmp_path / "no").exists()


def test_converting_refuses_in_one_line(run, tmp_path, capsys):
    assert convert(["to-hf", str(tmp_path), str(tmp_path / "hf")]) == 1
    assert "is no complete checkpoint (half-written, checksums.json is missing)" in capsys.readouterr().err
    assert convert(["to-hf", str(run / "out/checkpoint/step-2"), str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err
    assert convert(["from-hf", str(tmp_path), str(tmp_path / "new"), "--model", "llama3"]) == 1
    assert "has no *.safetensors files" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_files_cut_off_and_other_architectures_are_one_line(run, tmp_path, capsys):
    assert convert(["to-hf", str(run / "out/checkpoint/step-2"), str(tmp_path / "hf")]) == 0
    options = {"checkpoint__initial_load_path": tmp_path / "hf", "checkpoint__initial_load_in_hf": True}
    options |= {"job__dump_folder": tmp_path / "out"}
    config_file = tmp_path / "hf" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "rope_theta": 123.0}))
    other = train(2, *tiny(run, **options))
    assert_refused(other, "its config.json has rope_theta 123.0, llama3 tiny has 500000.0")
    config_file.write_text(json.dumps(config))
    weights = tmp_path / "hf" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert_refused(train(2, *tiny(run, **options)), "cannot load HuggingFace weights from")
    assert convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "new"), "--model", "llama3"]) == 1
    assert "model.safetensors is cut off or no safetensors file" in capsys.readouterr().err
