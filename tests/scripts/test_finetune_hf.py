"""scripts/finetune_hf.py on tiny folders that transformers has written."""

import re

import pytest
import torch

from tests.support.scripts import run_script

transformers = pytest.importorskip("transformers", reason="the script trains models of transformers")
tokenizers = pytest.importorskip("tokenizers", reason="the folder needs a tokenizer")

SIZES = {"vocab_size": 64, "initializer_range": 0.05, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
WIDE = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {  # tied and untied, bfloat16 and float32
    "llama": (transformers.LlamaConfig, {**SIZES, **WIDE, "tie_word_embeddings": True}, torch.bfloat16),
    "gpt2": (transformers.GPT2Config, {**SIZES, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 32},
             torch.float32),
}  # fmt: skip


def write_folder(folder, kind):
    config, sizes, dtype = MODELS[kind]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config(**sizes)).to(dtype)
    model.save_pretrained(folder)
    words = {"<pad>": 0, "<end>": 1, "<unk>": 2, **{f"w{index}": 3 + index for index in range(61)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)
    return model


@pytest.mark.dist
@pytest.mark.parametrize(("kind", "world"), [("llama", 2), ("gpt2", 1)])
def test_a_folder_is_trained_and_loads_again(tmp_path, kind, world):
    source, out = tmp_path / "source", tmp_path / "out"
    start = write_folder(source, kind)
    for number in range(3):  # words that count upwards: easy to learn
        text = " ".join(f"w{(number + index) % 61}" for index in range(400))
        (tmp_path / f"{number}.txt").write_text(text)
    arguments = [source, out, "--data", tmp_path / "*.txt", "--steps", 12, "--batch", 2, "--length", 24]
    arguments += ["--lr", 1e-2, "--adamw-lr", 1e-2, "--warmup", 2, "--held-out", 4]
    done = run_script("finetune_hf", *arguments, folder=tmp_path, world=world)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.search(r"held-out loss: ([\d.]+) before, ([\d.]+) after", done.stdout)
    before, after = map(float, told.groups())
    assert 3.5 < before < 5 and after < before - 1, told[0]
    assert "q_proj" in done.stdout if kind == "llama" else "stored [in, out]" in done.stdout
    assert "Newton-Schulz" in done.stdout

    trained = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert type(trained) is type(start) and trained.dtype == start.dtype
    assert trained.config.architectures == [type(start).__name__]
    changed = dict(trained.named_parameters())
    assert {n: p.shape for n, p in changed.items()} == {n: p.shape for n, p in start.named_parameters()}
    assert all(not torch.equal(changed[n], p) for n, p in start.named_parameters() if p.ndim > 1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    tokens = [
        token for path in sorted(tmp_path.glob("*.txt")) for token in [*tokenizer(path.read_text())["input_ids"], 1]
    ]
    held_out = torch.tensor(tokens[: len(tokens) // 24 * 24]).view(-1, 24)[-4:]
    with torch.no_grad():  # what was measured at the end is what the folder computes
        loss = trained.float().eval()(input_ids=held_out, labels=held_out).loss.item()
    assert abs(loss - after) < (0.02 if kind == "llama" else 2e-4), (loss, after)


def test_wrong_arguments_are_refused_before_anything_is_loaded(tmp_path):
    for arguments, told in (
        ([tmp_path, tmp_path / "out"], "has no config.json: give a HuggingFace folder"),
        ([tmp_path / "a", tmp_path / "a"], "is not empty: give a new folder"),
        ([tmp_path / "a", tmp_path / "out"], "matches no file"),
    ):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "config.json").write_text("{}")
        done = run_script("finetune_hf", *arguments, "--data", tmp_path / "*.txt", folder=tmp_path)
        assert done.returncode == 2 and told in done.stderr, done.stderr
