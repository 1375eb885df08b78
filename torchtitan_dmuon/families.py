"""The model families of ``models/``, which lies beside this package in a checkout and is in no wheel.

Every module of the trainer takes them from here, so that a ``models`` package of the user's own is never taken for
ours.
"""

from importlib.util import find_spec
from pathlib import Path

_CHECKOUT = Path(__file__).resolve().parents[1]
_OURS = _CHECKOUT / "models" / "__init__.py"
_FOUND = find_spec("models")
_ORIGIN = None if _FOUND is None else _FOUND.origin
# In site-packages a foreign `models` lies beside this package, too.
if not (_CHECKOUT / "run_train.sh").is_file():
    raise ImportError(
        f"the trainer of torchtitan_dmuon runs from a checkout, and {_CHECKOUT} is none: run ./run_train.sh in a clone "
        "of the repository. An installed wheel is for `import dmuon`; it brings no models"
    )
if _ORIGIN is None or Path(_ORIGIN).resolve() != _OURS:
    raise ImportError(
        f"the trainer of torchtitan_dmuon needs {_OURS}, and `import models` finds {_ORIGIN}: put {_CHECKOUT} first on "
        "sys.path, as ./run_train.sh does"
    )

from models import AttentionHeads, HFNameMap, ModelSpec, Parts, get_model_args, get_model_spec  # noqa: E402
from models.check import undescribed  # noqa: E402

__all__ = ["AttentionHeads", "HFNameMap", "ModelSpec", "Parts", "get_model_args", "get_model_spec", "undescribed"]
