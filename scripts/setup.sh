# Picks a Python that can run this repository and exports it as PYTHON. Sourced, from the repository root, by
# run_train.sh (`source scripts/setup.sh train`) and scripts/test.sh (`source scripts/setup.sh test`).
#
# 1. $PYTHON or python3, if it has all that is needed: a cluster's own torch is used as it is.
# 2. If it has torch but lacks small packages: .venv on top of it, holding only those.
# 3. Else .venv with everything in the requirements file.
# A .venv that a user made is used if it has all that is needed, and never changed.
# shellcheck shell=bash

_setup_fail() {
    echo "error: $1" >&2
    exit 1
}

# Prints two lines: the version of a usable torch (empty if none) and the requirements, separated by |, that
# Python $1 does not meet for $2 (train or test). Without importing torch, which would cost seconds.
_setup_inspect() {
    "$1" - "$2" <<'PYTHON_CODE'
import importlib.util
import re
import sys
from importlib import metadata

modules = ["torch", "torchdata", "tensorboard", "tqdm", "numpy"]
if sys.version_info < (3, 11):
    modules.append("tomli")
if sys.argv[1] == "test":
    modules += ["pytest", "pytest_timeout", "ruff", "transformers", "tokenizers", "safetensors", "setuptools"]
requirements = {}
for name in ("requirements.txt", "requirements-test.txt"):
    for line in open(name, encoding="utf-8"):
        found = re.match(r"[A-Za-z0-9_.-]+", line)
        if found and not line.startswith("-"):
            requirements[found[0].lower().replace("-", "_")] = line.split(";")[0].strip()



def version(name, oldest):
    """The version of an installed package, empty where it is missing or older than `oldest`."""
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
    return found if tuple(map(int, re.match(r"(\d+)\.(\d+)", found).groups())) >= oldest else ""


missing = [name for name in modules if importlib.util.find_spec(name) is None]
found = {"torch": "" if "torch" in missing else version("torch", (2, 11))}
if "setuptools" in modules and "setuptools" not in missing:
    found["setuptools"] = version("setuptools", (70, 1))
missing += [name for name, text in found.items() if not text and name not in missing]
print(found["torch"])
print("|".join(requirements[name] for name in missing))
PYTHON_CODE
}

# Creates or updates .venv from Python $1 for $2; $3 is the torch version to keep (empty: install one) and $4
# the missing requirements, separated by |. The caller holds the lock.
_setup_venv() {
    local base=$1 kind=$2 torch=$3 missing=$4 stamp=.venv/.stamp
    local -a options=(--clear) install=()
    if [[ -n $torch ]]; then
        options+=(--system-site-packages)
        IFS='|' read -r -a install <<<"$missing"
    elif [[ $kind == test ]]; then
        install=(-r requirements-test.txt)
    else
        install=(-r requirements.txt)
    fi
    # The stamp is there only between complete set-ups: without it, an earlier one was interrupted. A .venv on
    # another Python or another kind of torch is of no use either.
    if ! grep -qsxF "base $base $torch" "$stamp" || ! .venv/bin/python -c '' 2>/dev/null; then
        rm -f "$stamp"
        "$base" -m venv "${options[@]}" .venv >&2 ||
            _setup_fail "$base cannot create .venv (on Debian and Ubuntu: apt install python3-venv)"
        touch .venv/.ours
    fi
    rm -f "$stamp"
    if [[ -n $torch ]]; then
        # The system packages of a .venv made from a venv are not those of that venv.
        "$base" -c 'import sys; print(*[p for p in sys.path if p.endswith("-packages")], sep="\n")' \
            >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
        echo "torch==$torch" >.venv/constraints.txt
        install+=(-c .venv/constraints.txt)
    fi
    echo "setting up .venv for $kind with $base (once; takes a few minutes)" >&2
    .venv/bin/python -m pip install --quiet --disable-pip-version-check "${install[@]}" >&2 ||
        _setup_fail "pip could not install into .venv: ${install[*]} (its message is above)"
    {
        echo "base $base $torch"
        echo "train $(_setup_hash train)"
        [[ $kind == train ]] || echo "test $(_setup_hash test)"
    } >"$stamp.new"
    mv "$stamp.new" "$stamp"
}

# A hash of the requirements files for $1.
_setup_hash() {
    local -a files=(requirements.txt)
    [[ $1 == train ]] || files+=(requirements-test.txt)
    cat "${files[@]}" | cksum | tr ' ' '-'
}

# Whether the .venv made for base Python $1 is complete for $2 on top of torch $3.
_setup_ready() {
    grep -qsxF "base $1 $3" .venv/.stamp && grep -qsxF "$2 $(_setup_hash "$2")" .venv/.stamp &&
        .venv/bin/python -c '' 2>/dev/null
}

# Whether there is a .venv that the user made, and that has all $1 needs. One that lacks something is left alone.
_setup_foreign() {
    local report missing
    [[ -x .venv/bin/python && ! -e .venv/.ours ]] || return 1
    report=$(_setup_inspect .venv/bin/python "$1") || _setup_fail ".venv is broken: remove it"
    { read -r _ && read -r missing; } <<<"$report" || true
    [[ -z $missing ]] || _setup_fail ".venv is not of this script and lacks ${missing//|/, }: install or remove it"
}

_setup() {
    local kind=$1 base report torch missing
    base=$(command -v "${PYTHON:-python3}") || _setup_fail "no ${PYTHON:-python3} found: install Python 3.10 or newer"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        _setup_fail "$base is older than Python 3.10: set PYTHON to a newer one"
    base=$("$base" -c 'import sys; print(sys.executable)')  # behind a pyenv shim
    report=$(_setup_inspect "$base" "$kind") || _setup_fail "$base cannot list its packages"
    { read -r torch && read -r missing; } <<<"$report" || true
    PYTHON=$base
    if [[ -n $missing ]]; then
        if ! _setup_ready "$base" "$kind" "$torch"; then
            exec 9>.venv.lock
            if command -v flock >/dev/null; then
                flock 9
            fi
            # Another launch may have done it while this one waited.
            _setup_ready "$base" "$kind" "$torch" || _setup_foreign "$kind" ||
                _setup_venv "$base" "$kind" "$torch" "$missing"
            exec 9>&-  # or the training processes would inherit the lock
        fi
        PYTHON=$PWD/.venv/bin/python
    fi
    export PYTHON
}

_setup "${1:?train or test}"
