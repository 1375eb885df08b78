"""Newton-Schulz and the passes around it on one device. Knows nothing of ranks."""
