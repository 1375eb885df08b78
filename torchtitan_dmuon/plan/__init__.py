"""What a run will need and take, from its configuration alone: ``./run_train.sh --plan``. Nothing is allocated, no
process group is made, and no GPU is needed."""

from torchtitan_dmuon.plan.duration import Assumptions
from torchtitan_dmuon.plan.plan import make_plan
from torchtitan_dmuon.plan.text import format_plan

__all__ = ["Assumptions", "format_plan", "make_plan"]
