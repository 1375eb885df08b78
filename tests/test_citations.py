"""What the repository cites is in the repository: files, tests, numbered behaviours. And private names are read in one
place of the tests."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("torchtitan_dmuon", "models", "scripts", "tests", "docs")
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for kind in ("py", "md", "sh")
    for path in sorted([*ROOT.glob(f"*.{kind}"), *(path for f in FOLDERS for path in (ROOT / f).rglob(f"*.{kind}"))])
}
BEHAVIOURS = TEXTS["docs/design/behaviours.md"]


def named_files(text):
    """(file, test in it or "") of everything in backticks that looks like one of ours: `runtime/unit.py`."""
    return re.findall(r"`([\w./]+\.(?:py|md))(?:::(\w+))?`", text)


def test_files_and_tests_that_are_named_exist():
    wrong, seen = [], 0
    for text_file, text in TEXTS.items():
        for name, test in named_files(text):
            seen += 1
            found = [file for file in TEXTS if f"/{file}".endswith(f"/{name}")]
            if not any(not test or f"def {test}(" in TEXTS[file] for file in found):
                wrong.append(f"{text_file}: there is no {name} {test}")
    assert not wrong
    assert seen > 100


def test_links_lead_somewhere():
    wrong = [
        f"{text_file}: {target}"
        for text_file, text in TEXTS.items()
        if text_file.endswith(".md")
        for target in re.findall(r"\]\(([^()\s,#]+)(?:#[^()\s]*)?\)", text)
        if "://" not in target and not (ROOT / text_file).parent.joinpath(target).exists()
    ]
    assert not wrong


def test_behaviours_are_numbered_and_name_their_tests():
    entries = re.split(r"^(?=\d+\. )", BEHAVIOURS, flags=re.MULTILINE)[1:]
    assert [int(entry.split(".")[0]) for entry in entries] == list(range(1, len(entries) + 1))
    assert not [entry for entry in entries if not any("test_" in name for name, _ in named_files(entry))]


def test_cited_behaviours_exist():
    numbers = {int(number) for number in re.findall(r"^(\d+)\. ", BEHAVIOURS, re.MULTILINE)}
    cited = {
        int(number)
        for text in TEXTS.values()
        for cited in re.findall(r"\b[Bb]ehaviours? (\d+(?: to \d+)?)", text)
        for number in cited.split(" to ")
    }
    assert len(cited) > 10 and cited <= numbers


def test_nothing_outside_the_repository_is_cited():
    outside = re.compile(r"\bfacts/|/work/|\b[Ss]cenarios? \d|\b[Ii]ssue \d")
    wrong = {name: outside.findall(text) for name, text in TEXTS.items() if name != "tests/test_citations.py"}
    assert not {name: found for name, found in wrong.items() if found}


# Private names that tests may read, by where the files lie: those of Python, PyTorch and transformers. Ours are read in
# tests/support/private.py.
PRIVATE = {
    "tests/": {"_exit", "_dynamo", "_composable", "_checkpoint", "_from_config"},
    "tests/support/": {"_utils", "_world"},
    "tests/test_activation_checkpoint.py": {"_functional_collectives", "_python_dispatch", "_c10d_functional"},
    "tests/dmuon/transport/test_torch_private.py": {
        *("_fully_shard", "_fsdp_init", "_get_managed_states", "_get_backend", "_timeout")
    },
}
KERNELS = ("tests/dmuon/kernels/", "tests/gpu/")  # replace the constants of their kernels
SETTERS = ("setattr", "getattr", "hasattr", "patch.object")


def private_names(text):
    """The private names that a file reads or replaces of others: as an attribute, in an import, or as a string."""
    for node in ast.walk(ast.parse(text)):
        names = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
            names += (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(SETTERS):
            names = [value.value for value in node.args[1:2] if isinstance(value, ast.Constant)]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            names = [node.slice.value] if isinstance(node.slice, ast.Constant) else []
        yield from (name for name in names if re.match("_[A-Za-z]", str(name)))


def test_private_names_are_read_in_one_place():
    wrong = []
    for file, text in TEXTS.items():
        if not re.fullmatch(r"tests/.*\.py", file) or file.startswith(("tests/support/private.py", *KERNELS)):
            continue
        allowed = set().union(*(names for place, names in PRIVATE.items() if file.startswith(place)))
        wrong += [f"{file}: {name}" for name in private_names(text) if name not in allowed]
    assert not wrong
    assert {"_packed", "_adjacent"} <= set(private_names(TEXTS["tests/support/private.py"]))


def test_test_files_share_through_support():
    """What two test files need is in tests/support/."""
    wrong = [
        f"{file}: {line}"
        for file, text in TEXTS.items()
        for line in re.findall(r"^ *(?:from|import) tests\.(?!support\.).*", text, re.MULTILINE)
        if not file.startswith("tests/gpu/")  # runs tests as scenarios
    ]
    assert not wrong
