"""The rooms of ``torchtitan_dmuon/dmuon`` (its README.md): which imports which, what only one file may touch, how large
they may be. Read from the source, so that imports under ``TYPE_CHECKING`` and inside functions count."""

import ast
import functools
import re
import sys
from pathlib import Path

import pytest

DMUON = Path(__file__).parents[2] / "torchtitan_dmuon" / "dmuon"
PACKAGE = "torchtitan_dmuon.dmuon"
FILES = sorted(str(path.relative_to(DMUON).with_suffix("")) for path in DMUON.rglob("*.py"))  # as "runtime/unit"

# The arrows: a room -> the rooms that its files may import, beside its own. ``dedicate``, ``guards``, ``nested``,
# ``migration`` and ``__init__`` are files.
BELOW = {
    "kernels": set(),
    "transport": set(),
    "ownership": set(),
    "nested": set(),
    "migration": {"ownership"},
    "runtime": {"ownership", "transport", "nested"},
    "guards": {"runtime", "transport"},
    "state": {"runtime", "ownership", "transport"},
    "optimizer": {"state", "runtime", "kernels", "ownership", "transport", "migration"},
    "extras": {"optimizer", "state", "runtime", "kernels", "ownership", "transport"},
    "dedicate": {"runtime", "kernels", "ownership", "transport", "guards", "migration"},
    "__init__": {"dedicate", "extras", "optimizer", "state", "runtime", "kernels", "ownership", "transport"},
}
OTHERS = {"torch", "triton", "quack"}  # beside the standard library

# Private names of PyTorch that a file other than transport/torch_private.py may use.
PRIVATE = "transport/torch_private"
ALLOWED_PRIVATE = {
    "*": r"_foreach_\w+|_fields",  # multi-tensor operations have no other names; a named tuple's fields are public
    "state/pieces": "_make_subclass",  # the way to a Tensor subclass without a dispatch of its own
}

MAX_DEPTH = 8  # imports, one below the other
MAX_FILE, MAX_TRITON_FILE, MAX_BODY = 400, 450, 60
# The package is to come down to 6,300 lines; until then it may only shrink.
MAX_PACKAGE, MAX_WAY = 7242, 2300


@functools.cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((DMUON / f"{file}.py").read_text(encoding="utf-8"))


def lines_of(file: str) -> int:
    return len((DMUON / f"{file}.py").read_text(encoding="utf-8").splitlines())


@functools.cache
def modules_imported(file: str) -> tuple[str, ...]:
    """Absolute names of everything that a file imports, wherever in it; ``from a import b`` is ``a.b``."""
    package = [*PACKAGE.split("."), *file.split("/")[:-1]]
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            assert isinstance(node.args[0], ast.Constant), f"{file}:{node.lineno}: imports what cannot be read here"
            found.append(node.args[0].value)
    return tuple(found)


@functools.cache
def imports(file: str) -> frozenset[str]:
    """The files of the package that ``file`` imports."""
    found = set()
    for name in modules_imported(file):
        if name.startswith(f"{PACKAGE}."):
            path = name.removeprefix(f"{PACKAGE}.").replace(".", "/")
            found.add(path if path in FILES else path.rpartition("/")[0])
    return frozenset(found - {file})


def room_of(file: str) -> str:
    return file.split("/")[0]


# -------------------------------------------------------------------- imports


def test_files_are_found_and_imports_are_read():
    """Else everything below would pass on nothing."""
    assert {"dedicate", "runtime/unit", "ownership/policy", "kernels/newton_schulz", PRIVATE} <= set(FILES)
    assert {room_of(file) for file in FILES} == set(BELOW)
    assert {"ownership/policy", "runtime/unit", "transport/grid"} <= imports("dedicate")
    assert "kernels/passes" in imports("optimizer/stack")  # under TYPE_CHECKING
    assert all(imported in FILES for file in FILES for imported in imports(file))


@pytest.mark.parametrize("room", BELOW)
def test_imports_point_one_way(room):
    wrong = [
        f"{file} imports {imported}"
        for file in FILES
        if room_of(file) == room
        for imported in sorted(imports(file))
        if room_of(imported) not in BELOW[room] | {room}
    ]
    assert not wrong


def test_nothing_but_torch_and_the_standard_library_is_imported():
    """The runtime works without the trainer, the models and whatever else this repository has."""
    wrong = [
        f"{file} imports {name}"
        for file in FILES
        for name in modules_imported(file)
        if not name.startswith(PACKAGE) and name.split(".")[0] not in OTHERS | sys.stdlib_module_names
    ]
    assert not wrong


def longest_chain(file: str, above: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The longest chain of files from ``file`` down, each imported by the one before it."""
    assert file not in above, f"a cycle: {' -> '.join([*above[above.index(file) :], file])}"
    chains = [longest_chain(imported, (*above, file)) for imported in sorted(imports(file))]
    return (file, *max(chains, key=len, default=()))


@pytest.mark.parametrize("file", FILES)
def test_no_cycle_and_no_deep_chain(file):
    chain = longest_chain(file)
    assert len(chain) - 1 <= MAX_DEPTH, " -> ".join(chain)


# -------------------------------------------------------------------- private names of PyTorch


@functools.cache
def own_private_names() -> frozenset[str]:
    """Names with an underscore that the package gives its own functions, classes, variables and attributes."""
    names = set()
    for node in (node for file in FILES for node in ast.walk(tree_of(file))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return frozenset(names)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(file: str) -> list[tuple[int, str]]:
    """(line, name) of every private name of someone else's that a file uses: imported, as an attribute, or as a key of
    an object's ``vars`` or a name for ``getattr`` and its kin."""
    found = []
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Attribute):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            found += [(node.lineno, name) for name in names if is_private(name)]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, name) for alias in node.names for name in alias.name.split(".")]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
            found.append((node.lineno, node.slice.value if isinstance(node.slice, ast.Constant) else ""))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            found.append((node.lineno, node.args[1].value if isinstance(node.args[1], ast.Constant) else ""))
    return [(line, name) for line, name in found if is_private(name) and name not in own_private_names()]


@pytest.mark.parametrize("file", [file for file in FILES if file != PRIVATE])
def test_only_one_file_touches_private_names_of_pytorch(file):
    allowed = [ALLOWED_PRIVATE["*"], ALLOWED_PRIVATE.get(file, "-")]
    wrong = [
        f"{file}.py:{line}: {name}"
        for line, name in private_names(file)
        if not any(re.fullmatch(pattern, name) for pattern in allowed)
    ]
    assert not wrong, f"private names belong into {PRIVATE}.py"


def test_private_names_are_seen():
    seen = {name for _, name in private_names(PRIVATE)}
    assert {"_C", "_fsdp_init", "_execution_engine", "_get_backend", "_local_tensor", "_StridedShard"} <= seen


# -------------------------------------------------------------------- sizes


def body_lines(function: ast.FunctionDef) -> int:
    """Lines from the first statement behind the docstring to the last."""
    first = 1 if ast.get_docstring(function) is not None else 0
    return function.end_lineno - function.body[first].lineno + 1 if len(function.body) > first else 0


@pytest.mark.parametrize("file", FILES)
def test_files_and_functions_are_short(file):
    uses_triton = any(name.split(".")[0] == "triton" for name in modules_imported(file))
    assert lines_of(file) <= (MAX_TRITON_FILE if uses_triton else MAX_FILE)
    functions = [node for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef)]
    assert not {f.name: body_lines(f) for f in functions if body_lines(f) > MAX_BODY}


def test_the_package_is_small():
    rooms = {room: sum(lines_of(file) for file in FILES if room_of(file) == room) for room in BELOW}
    assert sum(rooms.values()) <= MAX_PACKAGE, rooms


def test_the_way_of_one_weight_is_short():
    """What must be read to understand how a weight is used, its gradient reduced and its update made."""
    way = ["dedicate", "optimizer/muon", "optimizer/stack"]
    way += [file for file in FILES if room_of(file) in ("runtime", "transport") and file != PRIVATE]
    sizes = {file: lines_of(file) for file in way}
    assert sum(sizes.values()) <= MAX_WAY, sizes
