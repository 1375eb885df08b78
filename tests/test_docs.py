"""The documents say what the code does: every snippet runs, and every table of options is that of the code.

In a document, ``python`` blocks share one namespace and run in their order on two ranks; a ``text`` block right after
one is what rank 0 prints there. ``toml`` blocks are configurations. A comment ``<!-- table: ... -->`` says what the
table under it lists.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from unittest import mock

import pytest
import torch

import dmuon
from tests.support.pool import distributed
from tests.support.private import group_keys, known_linears
from torchtitan_dmuon.config import load_config
from torchtitan_dmuon.config.job_config import KEYS, ParamGroup
from torchtitan_dmuon.config.key import KeySpec, key_specs

DOCS = Path(__file__).parents[1] / "docs"
ENGLISH = ["dmuon.md", "learning_rates.md", "migration.md"]
DOCUMENTS = [f"{folder}{name}" for name in ENGLISH for folder in ("", "zh/")]
REQUIRED = ("required", "必填")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block; ``line`` is where its first line of code stands."""

    language: str
    line: int
    text: str
    follows: int  # line of the block that ends right above it, or 0


def code_blocks(name: str) -> list[CodeBlock]:
    blocks, fence, closed = [], None, None
    for number, line in enumerate((DOCS / name).read_text(encoding="utf-8").splitlines(), start=1):
        if fence is None and line.startswith("```"):
            fence = (line[3:].strip(), number + 1, [])
        elif fence is not None and line == "```":
            language, start, code = fence
            blocks.append(CodeBlock(language, start, "\n".join(code) + "\n", closed or 0))
            fence, closed = None, start
        elif fence is not None:
            fence[2].append(line)
        elif line.strip():
            closed = None
    assert fence is None, f"{name}: the block at line {fence[1]} does not end"
    return blocks


# -------------------------------------------------------------------- snippets


@distributed(world=2, new_processes=True)
def run_snippets(rank, world, name, folder):
    blocks = code_blocks(name)
    expected = {block.follows: block for block in blocks if block.language == "text" and block.follows}
    namespace = {"__name__": name}
    # Two ranks on the CPU: NCCL refuses a GPU that they share.
    with _inside(folder), mock.patch.object(torch.cuda, "is_available", return_value=False):
        for block in (block for block in blocks if block.language == "python"):
            # Padded, so that a traceback shows the document's own line.
            code = compile("\n" * (block.line - 1) + block.text, str(DOCS / name), "exec")
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(code, namespace)
            if rank == 0 and block.line in expected:
                wanted = expected[block.line]
                assert printed.getvalue() == wanted.text, f"{name}:{wanted.line}: printed\n{printed.getvalue()}"


@contextlib.contextmanager
def _inside(folder):
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", ENGLISH)
def test_snippets_run(name, tmp_path):
    run_snippets(name=name, folder=str(tmp_path))


@pytest.mark.parametrize("name", ENGLISH)
def test_both_languages_have_the_same_code(name):
    english, chinese = code_blocks(name), code_blocks(f"zh/{name}")
    for ours, theirs in zip(english, chinese, strict=False):
        assert (ours.language, ours.text) == (theirs.language, theirs.text), f"{name}:{ours.line}, zh:{theirs.line}"
    assert len(english) == len(chinese)
    headings = [
        re.findall(r"^#+", (DOCS / path).read_text(encoding="utf-8"), re.MULTILINE) for path in (name, f"zh/{name}")
    ]
    assert headings[0] == headings[1]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_configurations_load(name, tmp_path):
    for block in code_blocks(name):
        if block.language == "toml":
            path = tmp_path / f"line_{block.line}.toml"
            path.write_text(block.text, encoding="utf-8")
            load_config(["--job.config_file", str(path)])


# -------------------------------------------------------------------- tables


def tables(name: str) -> dict[str, list[list[str]]]:
    """Rows of cells of every marked table, without the two lines of its head."""
    text = (DOCS / name).read_text(encoding="utf-8")
    found = {}
    for what, body in re.findall(r"<!-- table: (.+?) -->\n+((?:\|.*\n)+)", text):
        assert what not in found, what
        found[what] = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in body.splitlines()[2:]]
    return found


def check_signature(path: str, rows: list[list[str]]) -> None:
    """Columns: name, type, default, meaning."""
    parameters = dict(inspect.signature(vars(dmuon)[path.removeprefix("dmuon.")]).parameters)
    parameters.pop("unknown", None)  # takes what other libraries call so, and refuses it
    assert [row[0] for row in rows] == list(parameters), path
    for name, _, default, _ in rows:
        expected = parameters[name].default
        if expected is inspect.Parameter.empty:
            assert default in REQUIRED, f"{path}: {name} has no default"
        else:
            assert ast.literal_eval(default) == expected, f"{path}: the default of {name} is {expected!r}"


def check_keys(section: str, rows: list[list[str]]) -> None:
    """Columns: key, type, default, meaning."""
    specs: dict[str, KeySpec] = {s.name.rpartition(".")[2]: s for s in KEYS.values() if s.section == section}
    if section == "optimizer.param_groups":
        specs = {spec.name: spec for spec in key_specs(ParamGroup, "")}
    assert sorted(row[0] for row in rows) == sorted(specs), section
    for name, kind, default, _ in rows:
        spec = specs[name]
        assert kind == spec.type.__name__, f"[{section}] {name} is a {spec.type.__name__}"
        if spec.default is None:
            assert default in (("none",) if spec.optional else REQUIRED), f"[{section}] {name}: {default}"
        else:
            value = ast.literal_eval(default.replace("true", "True").replace("false", "False"))
            assert value == spec.default, f"[{section}]: the default of {name} is {spec.default!r}"


def check_policy(rows: list[list[str]]) -> None:
    """Columns: key, default, meaning."""
    policy = importlib.import_module("torchtitan_dmuon.dmuon.ownership.policy")
    assert [row[0] for row in rows] == list(policy.SETTABLE)
    declared = {field.name: field.default for field in fields(policy.ParamSpec) if field.default is not MISSING}
    for name, default, _ in rows:
        if name in declared and name not in ("stack", "transposed", "blocks"):  # of known models
            assert default == str(declared[name]), f"param_policy: the default of {name} is {declared[name]}"


def check_names(what: str, rows: list[list[str]]) -> None:
    names = {re.sub(r"`", "", part).strip() for row in rows for part in row[0].split(",")}
    known = {
        "param_groups": group_keys,
        "scales": lambda: importlib.import_module("torchtitan_dmuon.dmuon.optimizer.stack").SCALES,
        "coefficients": lambda: dmuon.COEFFICIENTS,
        "routes": lambda: importlib.import_module("torchtitan_dmuon.dmuon.ownership.policy").ROUTES,
        "fused": lambda: {*known_linears(), "c_attn"},
    }[what]()
    assert names == set(known), what


def check_errors(rows: list[list[str]]) -> None:
    """The first column is a part of a message that the code has."""
    folder = Path(dmuon.__file__).parent / "torchtitan_dmuon" / "dmuon"
    literals = [
        node.value
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for row in rows:
        assert any(row[0] in literal for literal in literals), f"no message says {row[0]!r}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_tables_are_those_of_the_code(name):
    found = tables(name)
    assert list(found) == list(tables(name.removeprefix("zh/"))), "both languages have the same tables"
    for what, rows in found.items():
        kind, _, subject = what.partition(" ")
        if kind == "signature":
            check_signature(subject, rows)
        elif kind == "keys":
            check_keys(subject, rows)
        elif what == "param_policy":
            check_policy(rows)
        elif what == "errors":
            check_errors(rows)
        else:
            check_names(what, rows)


@pytest.mark.parametrize("name", ["dmuon.md", "zh/dmuon.md"])
def test_every_option_has_its_table(name):
    expected = {"signature dmuon.Muon", "signature dmuon.dedicate_params", "signature dmuon.NewtonSchulz"}
    expected |= {"keys dmuon", "keys optimizer", "keys optimizer.param_groups", "param_policy", "errors"}
    assert expected <= set(tables(name))


@pytest.mark.parametrize("name", ["dmuon.md", "zh/dmuon.md"])
def test_every_public_name_is_mentioned(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    missing = [public for public in dmuon.__all__ if not re.search(rf"\b{re.escape(public)}\b", text)]
    assert not missing
