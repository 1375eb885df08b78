"""The one exception of the data package. Nothing else lives here."""


class DataError(ValueError):
    """Data that cannot be used as asked: the message is one line that says what is wrong and what to do."""
