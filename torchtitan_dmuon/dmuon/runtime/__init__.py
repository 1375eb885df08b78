"""The life of one weight: unsharded, read, its gradient reduced to the owner, updated, published."""
