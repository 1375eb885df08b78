"""Imported before all else by the scripts, so that they run from any folder and without an activated environment.

It puts the repository on ``sys.path``. Where this Python lacks a package that training needs and ``run_train.sh`` has
set up ``.venv``, the script starts again there, with the same arguments.
"""

import importlib.util
import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_VENV = _ROOT / ".venv"

_missing = [name for name in ("torch", "numpy", "torchdata", "tqdm") if importlib.util.find_spec(name) is None]
if _missing and Path(sys.prefix) != _VENV:
    python = str(_VENV / "bin" / "python")
    if os.access(python, os.X_OK):
        os.execv(python, [python, *sys.argv])
    if "torch" in _missing:
        sys.exit(f"error: {sys.executable} has no torch: run {_ROOT}/run_train.sh once, it sets up an environment")
if str(_ROOT) not in sys.path:
    sys.path.insert(0, str(_ROOT))
