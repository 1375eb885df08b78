"""The one exception of the data package."""


class DataError(ValueError):
    """Data that a run cannot use. The message is one line: the key or file, its problem, and the remedy."""
