"""The scripts as a newcomer calls them: with a Python that has nothing, from any folder, as the README writes it."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest

from tests.support.scripts import SCRIPTS, run_script
from tests.support.training import ROOT, tiny, train, write_corpus

LINES = re.findall(r"^    python3 (.*)", (ROOT / "README.md").read_text(), re.MULTILINE)
WRITTEN = [line.partition("#")[0].split() for line in LINES]
# What each of the README's lines is run with here, for time, and what it prints then.
SHORT = {
    "convert_checkpoint": ([], ""),
    "kill_test": (["--help"], "SIGKILL of one process"),
    "bench_checkpoint": (["--help"], "is emptied first"),
}


def bare(folder, *arguments):
    """The outcome of a script in a repository of its own, with a Python that has no packages."""
    (folder / "scripts").mkdir()
    shutil.copy(SCRIPTS / "environment.py", folder / "scripts")
    (folder / "scripts/call.py").write_text("import environment\nimport torch\n")
    command = [sys.executable, "-S", str(folder / "scripts/call.py"), *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=60)


def test_a_script_starts_again_in_the_environment_of_run_train(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\nexit 7\n')
    (tmp_path / ".venv/bin/python").chmod(0o755)
    done = bare(tmp_path, "--out", "a b")
    assert (done.returncode, done.stdout.splitlines()) == (7, [str(tmp_path / "scripts/call.py"), "--out", "a b"])


def test_a_script_without_an_environment_says_how_to_get_one(tmp_path):
    done = bare(tmp_path)
    assert done.returncode == 1 and f"has no torch: run {tmp_path}/run_train.sh once" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.dist
@pytest.mark.parametrize("words", WRITTEN, ids=lambda words: words[0])
def test_the_readmes_lines(tmp_path, words):
    name = re.fullmatch(r"scripts/(\w+)\.py", words[0])[1]
    more, printed = SHORT[name]
    words = [word.replace("outputs/.../checkpoint/step-100", "out/checkpoint/step-2") for word in words[1:]]
    if "out/checkpoint/step-2" in words:
        write_corpus(tmp_path / "corpus")
        keys = {"training__steps": 2, "model__flavor": "debugmodel", "lr_scheduler__warmup_steps": 1}
        assert train(1, *tiny(tmp_path, **keys)).codes == [0]
    done = run_script(name, *words, *more, folder=tmp_path)
    assert done.returncode == 0 and printed in done.stdout, (shlex.join(words), done.stderr)
    assert name != "convert_checkpoint" or (tmp_path / "my-model/model.safetensors").exists()


def test_the_table_names_the_readmes_scripts():
    assert sorted(SHORT) == sorted(words[0][len("scripts/") : -len(".py")] for words in WRITTEN)
