"""Meshes and the one function that applies every parallelism to a model."""

from torchtitan_dmuon.parallel.dims import Meshes, ParallelDims
from torchtitan_dmuon.parallel.parallelize import parallelize

__all__ = ["Meshes", "ParallelDims", "parallelize"]
