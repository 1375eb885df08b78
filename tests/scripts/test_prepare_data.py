"""scripts/prepare_data.py through its command line, and its shards read back by the training loader."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.scripts import SCRIPTS, run_script
from torchtitan_dmuon.data import ByteTokenizer, LoaderConfig, TokenLoader, build_dataset, build_tokenizer, read_shard

TEXTS = ["first document", "", "second \u00e9", "third and last"]
# An empty text is no document.
TOKENS = [token for text in TEXTS if text for token in [*text.encode(), 256]]


def run(folder, *arguments):
    """The finished process; run in another folder than the repository."""
    return run_script("prepare_data", *arguments, folder=folder)


def stored(folder):
    """The tokens of each shard, by name."""
    return {path.name: read_shard(path).tolist() for path in sorted(folder.glob("*.bin"))}


def write_input(folder, kind):
    folder.mkdir()
    if kind == "text":
        for number, text in enumerate(TEXTS):
            (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    elif kind == "jsonl":
        for number, texts in enumerate([TEXTS[:2], TEXTS[2:]]):
            lines = [json.dumps({"text": text}) for text in texts]
            (folder / f"{number}.jsonl").write_text("\n".join(lines))
    else:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"text": [*TEXTS, None], "other": [1, 2, 3, 4, 5]})
        pyarrow.parquet.write_table(table, folder / "a.parquet")
    return folder


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_shards_hold_the_exact_stream(tmp_path, kind):
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    source, output = write_input(tmp_path / "in", kind), tmp_path / "out"
    done = run(tmp_path, "--input", source, "--format", kind, "--output", output, "--shard-tokens", 16)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"wrote 3 shards with 3 documents and {len(TOKENS)} tokens to {output} (vocabulary 257, tokenizer bytes-1)"
    )
    assert stored(output) == {
        "shard_00000.bin": TOKENS[:16],
        "shard_00001.bin": TOKENS[16:32],
        "shard_00002.bin": TOKENS[32:],
    }
    dataset = build_dataset("bin", str(output), "text", ByteTokenizer(), 5, tmp_path / "cache")
    batches = list(TokenLoader(dataset, LoaderConfig(1, infinite=False)))
    assert len(batches) == (len(TOKENS) - 1) // 5 == 7
    for index, batch in enumerate(batches):
        assert batch["input"].tolist() == [TOKENS[5 * index : 5 * index + 5]]
        assert batch["labels"].tolist() == [TOKENS[5 * index + 1 : 5 * index + 6]]


def test_several_processes_keep_the_order(tmp_path):
    source = tmp_path / "in.jsonl"
    texts = [f"{number} " * 60_000 for number in range(40)]
    source.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    arguments = ["--input", source, "--format", "jsonl", "--text-key", "body", "--output"]
    command = [sys.executable, SCRIPTS / "prepare_data.py", *arguments, tmp_path / "out2", "--num-proc", 2]
    several = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    for done in (run(tmp_path, *arguments, tmp_path / "out1", "--num-proc", 1), several):
        assert done.returncode == 0, done.stderr
    content = [(tmp_path / f"out{n}" / "shard_00000.bin").read_bytes() for n in (1, 2)]
    assert content[0] == content[1]
    tokens = read_shard(tmp_path / "out1" / "shard_00000.bin")
    assert bytes(tokens[tokens < 256].astype("u1")).decode() == "".join(texts)


def test_hugging_face_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "in.txt").write_text("b a b")
    arguments = [
        "--input",
        "in.txt",
        "--format",
        "text",
        "--tokenizer",
        tmp_path,
        "--output",
        tmp_path / "out",
    ]
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert stored(tmp_path / "out") == {"shard_00000.bin": [1, 0, 1, 2]}
    dataset = build_dataset("bin", str(tmp_path / "out"), "text", build_tokenizer(str(tmp_path)), 3, tmp_path)
    assert dataset[0]["labels"].tolist() == [0, 1, 2]


def test_existing_shards_are_kept_unless_told(tmp_path):
    source, output = write_input(tmp_path / "in", "text"), tmp_path / "out"
    arguments = ["--input", source, "--format", "text", "--output", output]
    assert run(tmp_path, *arguments, "--shard-tokens", 10).returncode == 0
    before = stored(output)
    assert len(before) == 4
    refused = run(tmp_path, *arguments)
    assert refused.returncode == 1
    assert refused.stderr == (
        f"error: {output} already holds shard_00000.bin: choose another --output or add --append or --overwrite\n"
    )
    assert stored(output) == before
    assert run(tmp_path, *arguments, "--overwrite").returncode == 0
    assert stored(output) == {"shard_00000.bin": TOKENS}


def test_files_of_others_are_never_deleted(tmp_path):
    source, output = write_input(tmp_path / "in", "text"), tmp_path / "out"
    arguments = ["--input", source, "--format", "text", "--output", output, "--overwrite"]
    output.mkdir()
    for name in ("pytorch_model.bin", "shard_00000.bin"):
        (output / name).write_bytes(b"weights")
        refused = run(tmp_path, *arguments)
        assert refused.returncode == 1
        assert refused.stderr == f"error: {output} holds {name}, which is no token shard: choose another --output\n"
        assert [path.name for path in output.iterdir()] == [name]
        (output / name).unlink()
    (output / "old.bin").write_bytes(b"DMUONTOK cut off")  # a shard of ours, if a broken one
    assert run(tmp_path, *arguments).returncode == 0
    assert stored(output) == {"shard_00000.bin": TOKENS}


def test_failure_leaves_the_old_shards(tmp_path):
    source, output = write_input(tmp_path / "in", "jsonl"), tmp_path / "out"
    arguments = ["--input", source, "--format", "jsonl", "--output", output, "--overwrite"]
    assert run(tmp_path, *arguments).returncode == 0
    before = stored(output)
    (source / "2.jsonl").write_text("not json")
    failed = run(tmp_path, *arguments, "--shard-tokens", 4)
    assert failed.returncode == 1
    assert "2.jsonl, line 1 is not valid JSON" in failed.stderr and "Traceback" not in failed.stderr
    assert stored(output) == before


def test_missing_input_is_one_line(tmp_path):
    done = run(tmp_path, "--input", "none/*.txt", "--format", "text", "--output", "out")
    assert done.returncode == 1
    assert done.stderr.startswith("error: --input = 'none/*.txt': matches no file")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_run_that_ended_early_goes_on(tmp_path):
    """After the last complete shard, which ends within a chunk of documents and within a document."""
    source = tmp_path / "in.jsonl"
    texts = [f"{number} " * 60_000 for number in range(30)]
    good = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    arguments = ["--input", source, "--format", "jsonl", "--shard-tokens", 700_001, "--num-proc", 1, "--output"]

    def write(content):
        source.write_bytes(content)
        os.utime(source, ns=(10**18, 10**18))  # the run that goes on shall not notice that this was the way it ended

    write(good)
    whole = run(tmp_path, *arguments, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert not (tmp_path / "whole/.staging").exists()
    for place in (-9, -2_000_000):  # ends in the last line, then the run that goes on ends there too; then earlier
        write(good[:place] + b"!" + good[place + 1 :].replace(b"}", b"!"))
        ended = run(tmp_path, *arguments, tmp_path / "out")
        assert ended.returncode == 1 and "is not valid JSON" in ended.stderr, ended.stderr
        assert stored(tmp_path / "out") == {}
    write(good)
    done = run(tmp_path, *arguments, tmp_path / "out")
    assert done.returncode == 0 and done.stdout == whole.stdout.replace("whole", "out")
    assert "going on after " in done.stderr and "tokens/s" in done.stderr
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    assert not (tmp_path / "out/.staging").exists()


def test_other_settings_start_over(tmp_path):
    source, output = write_input(tmp_path / "in", "jsonl"), tmp_path / "out"
    (source / "1.jsonl").write_text(3 * (json.dumps({"text": "x" * 1_100_000}) + "\n") + "bad")
    arguments = ["--input", source, "--format", "jsonl", "--output", output, "--shard-tokens", 500_000, "--num-proc", 1]
    assert run(tmp_path, *arguments).returncode == 1
    assert (output / ".staging/progress.json").exists()
    (source / "1.jsonl").write_text('{"text": "x"}')
    done = run(tmp_path, *arguments)
    assert done.returncode == 0 and "starting over: a run that ended early had other files or settings" in done.stderr
    assert list(stored(output)) == ["shard_00000.bin"]


def test_shards_are_added_but_not_of_another_tokenizer(tmp_path):
    source, output = write_input(tmp_path / "in", "text"), tmp_path / "out"
    arguments = ["--input", source, "--format", "text", "--output", output, "--shard-tokens", 30]
    for _ in range(2):
        assert run(tmp_path, *arguments, "--append").returncode == 0
    assert list(stored(output)) == [f"shard_0000{number}.bin" for number in range(4)]
    assert [token for shard in stored(output).values() for token in shard] == 2 * TOKENS
    refused = run(tmp_path, *arguments, "--append", "--no-add-eos")
    assert refused.returncode == 1
    assert refused.stderr == (
        f"error: {output / 'shard_00000.bin'} was made with the tokenizer bytes-1, not bytes-1-eos: one folder holds "
        "shards of one tokenizer; choose another --output\n"
    )
