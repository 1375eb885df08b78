"""How a configuration key is declared and checked, and the error of a configuration that cannot be used.

The keys themselves are in `job_config`.
"""

import math
import sys
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be used: always one line, naming the key and where its value came from."""

    def __init__(self, key: str | None, source: str | None, problem: str):
        where = f"{key} ({source})" if key and source else key or source
        super().__init__(f"{where}: {problem}".replace("\r", "\\r").replace("\n", "\\n"))


def key(default: Any, help: str, *, compare: bool = True, **rules: Any) -> Any:
    """Declare a configuration key; `rules` are the optional fields of `KeySpec` (choices, minimum, ...)."""
    metadata = {"help": help, **rules}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), compare=compare, metadata=metadata)
    return field(default=default, compare=compare, metadata=metadata)


@dataclass(frozen=True)
class KeySpec:
    """One key as declared: what `loading` checks, prints and documents.

    `type` is bool, int, float, str or list (of str). `special` is a value allowed outside the range.
    """

    name: str
    type: type
    optional: bool
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    special: int | None = None

    @property
    def section(self) -> str:
        """The TOML table that holds the key."""
        return self.name.rpartition(".")[0]

    def expected(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            text = ("list of " if self.type is list else "one of ") + ", ".join(map(repr, self.choices))
        else:
            text = {bool: "true or false", list: "list of str"}.get(self.type, self.type.__name__)
        bounds = {">=": self.minimum, ">": self.above, "<=": self.maximum, "<": self.below}
        limits = [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
        text = " ".join([text, " and ".join(limits)]).rstrip()
        text += f", or {self.special}" if self.special is not None else ""
        return text + (", or none" if self.optional else "")

    def check(self, value: Any) -> Any:
        """Return `value` in this key's type (an int becomes a float).

        Raises:
            ValueError: it is not allowed; the message says what was found and what is expected.
        """
        if self.type is float and type(value) is int:
            value = float(value) if abs(value) <= sys.float_info.max else math.inf
        if not self._allows(value):
            raise ValueError(f"found {value!r}, expected {self.expected()}")
        return value

    def _allows(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if type(value) is not self.type:  # not isinstance: True is no int
            return False
        if self.type is list:
            return all(type(item) is str and (not self.choices or item in self.choices) for item in value)
        if self.type is float and not math.isfinite(value):
            return False
        if self.special is not None and value == self.special:
            return True
        return (
            (not self.choices or value in self.choices)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )
