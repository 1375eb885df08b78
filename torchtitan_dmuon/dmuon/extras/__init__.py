"""What no weight needs on its way: reports and QK-clip."""
