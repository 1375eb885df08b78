"""The wheel: what is in it, and the README's loop in a process that has nothing but it and torch."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
import torchdata

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "README.md", "dmuon.py", "train.py", "torchtitan_dmuon", "models", "tests", "scripts")
# A user without the trainer's packages. torch tries numpy and goes on without it.
NOT_INSTALLED = ("numpy", "torchdata", "tensorboard", "tqdm", "transformers", "tokenizers", "safetensors", "pytest")

BEFORE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {missing!r} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
sys.path += {paths!r}
"""

SETTING = """
from types import SimpleNamespace

import models
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

assert models.MINE == "the user's"
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up_proj, self.down_proj = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down_proj(self.up_proj(self.norm(x)).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(7, 16), nn.ModuleList([Layer(), Layer()]), nn.Linear(16, 7)

    def forward(self, batch):
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x).flatten(0, 1), (batch * 3 % 7).flatten()))

model = Model()
batches = [torch.arange(21).reshape(3, 7) % 7] * 200
first = model(batches[0]).loss.item()
"""

AFTER = """
last = loss.item()
assert last < first / 4, (first, last)
assert optimizer.param_groups[0]["params"] and len(dmuon.get_dedicated_params(model)) == 4
print("trained with", dmuon.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, for setuptools puts files of earlier builds beside the sources and takes them up again."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("made")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    pip("wheel", "--no-build-isolation", "--no-index", "--wheel-dir", made, copy)
    (path,) = made.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with the wheel installed beside a package ``models`` of the user's."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "models").mkdir()
    (folder / "models" / "__init__.py").write_text('MINE = "the user\'s"\n')
    pip("install", "--no-index", "--target", folder, wheel)
    return folder


def pip(command, *arguments):
    words = [sys.executable, "-m", "pip", command, "--no-deps", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def run(program, installed, missing=()):
    """In a process whose ``sys.path`` is the standard library, the folder and site-packages, without ``missing``."""
    packages = dict.fromkeys(str(Path(module.__file__).parents[1]) for module in (torch, numpy, torchdata))
    paths = [str(installed), *packages]
    text = BEFORE.format(missing=missing, paths=paths) + program
    command = [sys.executable, "-I", "-S", "-c", text]  # without the environment's variables and site-packages
    return subprocess.run(command, cwd=installed, capture_output=True, text=True, timeout=120)


def test_it_holds_two_names_and_needs_torch_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA")]
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "torchtitan_dmuon").rglob("*.py")} | {"dmuon.py"}
    assert {name for name in names if ".dist-info/" not in name} == expected
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert needed == ["Requires-Dist: torch>=2.11"]


def test_the_readmes_loop_beside_a_foreign_models_package(installed):
    (loop,) = re.findall(r"```python\n(import dmuon\n.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = run(SETTING + loop + AFTER, installed, NOT_INSTALLED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"trained with {installed / 'dmuon.py'}\n"


def test_the_trainer_outside_a_checkout_says_where_it_runs(installed):
    done = run("import torchtitan_dmuon.trainer", installed)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: the trainer of torchtitan_dmuon runs from a checkout, and {installed} is none: run "
        "./run_train.sh in a clone of the repository. An installed wheel is for `import dmuon`; it brings no models"
    )


def test_a_foreign_models_package_before_the_checkout_is_told(installed):
    ours = f"import torchtitan_dmuon\ntorchtitan_dmuon.__path__ = [{str(ROOT / 'torchtitan_dmuon')!r}]\n"
    done = run(ours + "import torchtitan_dmuon.families", installed)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: the trainer of torchtitan_dmuon needs {ROOT}/models/__init__.py, and `import models` finds "
        f"{installed}/models/__init__.py: put {ROOT} first on sys.path, as ./run_train.sh does"
    )
