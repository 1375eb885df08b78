"""How tensors get from rank to rank, and every private name of PyTorch."""
