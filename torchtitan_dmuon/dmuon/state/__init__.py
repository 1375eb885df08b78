"""Weights and optimizer state as tensors by name, for checkpoints."""
