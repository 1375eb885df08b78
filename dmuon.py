"""``import dmuon``: the public face of the ownership runtime and the optimizer."""

from torchtitan_dmuon.dmuon import *  # noqa: F403
from torchtitan_dmuon.dmuon import __all__  # noqa: F401
