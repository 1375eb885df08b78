"""How a configuration key is declared and checked, and the error of a configuration that cannot be used.

The keys themselves are in `job_config`.
"""

import contextlib
import difflib
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_origin


class ConfigError(ValueError):
    """A configuration that cannot be used.

    Attributes:
        lines: one a problem, each naming the key and where its value came from. The message is all of them.
        keys: those with a problem.
    """

    def __init__(self, key: str | None, source: str | None, problem: str):
        where = f"{key} ({source})" if key and source else key or source
        self.lines = [f"{where}: {problem}".replace("\r", "\\r").replace("\n", "\\n")]
        self.keys = {key} if key else set()
        super().__init__(self.lines[0])

    @classmethod
    def of(cls, lines: list[str], keys: set[str]) -> "ConfigError":
        """Several problems at once."""
        error = cls.__new__(cls)
        error.lines, error.keys, error.args = lines, keys, ("\n".join(lines),)
        return error


class Problems:
    """The problems of one configuration, collected so that the user is told all of them at once.

    Attributes:
        lines: one a problem.
        keys: keys and sections with a problem. The configuration has the default of each, so that a check which reads
            one of them would judge a value that the user did not choose.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.keys: set[str] = set()

    def add(self, error: ValueError) -> None:
        """Note a ConfigError, or another error of one line."""
        self.lines += error.lines if isinstance(error, ConfigError) else [" ".join(str(error).split())]
        self.keys |= error.keys if isinstance(error, ConfigError) else set()

    @contextlib.contextmanager
    def collect(self, *others: type[ValueError]) -> Iterator[None]:
        """Note the error that the block raises: a ConfigError, or one of ``others``."""
        try:
            yield
        except (ConfigError, *others) as error:
            self.add(error)

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys has a problem; a section stands for its keys."""
        return not any(
            key == bad or key.startswith(f"{bad}.") or bad.startswith(f"{key}.") for key in keys for bad in self.keys
        )

    def error(self) -> ConfigError:
        """One error of all problems."""
        return ConfigError.of(self.lines, self.keys)

    def raise_if_any(self) -> None:
        """Raise one ConfigError of all problems."""
        if self.lines:
            raise self.error()


def key(default: Any, help: str, *, compare: bool = True, **rules: Any) -> Any:
    """Declare a configuration key; `rules` are the optional fields of `KeySpec` (choices, minimum, ...)."""
    metadata = {"help": help, **rules}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), compare=compare, metadata=metadata)
    return field(default=default, compare=compare, metadata=metadata)


@dataclass(frozen=True)
class KeySpec:
    """One key as declared: what `loading` checks, prints and documents.

    Attributes:
        type: bool, int, float, str or list (of `item`).
        optional: whether None is allowed.
        minimum, maximum, above, below: the range of a number, or of each number in a list; `special` is allowed
            outside it.
        table: for a list of tables, the dataclass that declares the keys of each.
        items, min_items: how many items a list has, exactly and at least.
        path: the text is a path, in which `~` is the home folder.
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
    item: type = str
    table: type | None = None
    items: int | None = None
    min_items: int = 0
    path: bool = False

    @property
    def section(self) -> str:
        """The TOML table that holds the key."""
        return self.name.rpartition(".")[0]

    def expected(self) -> str:
        """The allowed values, in words."""
        if self.choices:
            text = ("list of " if self.type is list else "one of ") + ", ".join(map(repr, self.choices))
        else:
            items = "tables" if self.table is not None else self.item.__name__
            text = {bool: "true or false", list: f"list of {items}"}.get(self.type, self.type.__name__)
        bounds = {">=": self.minimum, ">": self.above, "<=": self.maximum, "<": self.below}
        limits = [f"{sign} {bound}" for sign, bound in bounds.items() if bound is not None]
        text = " ".join([text, " and ".join(limits)]).rstrip()
        text += f", {self.items} of them" if self.items is not None else ""
        text += f", at least {self.min_items} of them" if self.min_items else ""
        text += f", or {self.special}" if self.special is not None else ""
        return text + (", or none" if self.optional else "")

    def check(self, value: Any) -> Any:
        """Return `value` in this key's type (an int becomes a float, and a float without fraction, as 1e4, an int).

        Raises:
            ValueError: it is not allowed; the message says what was found and what is expected.
        """
        if type(value) is list:
            value = [_converted(self.item, item) for item in value]
        else:
            value = _converted(self.type, value)
        if (
            self.table is not None
            and type(value) is list
            and len(value) >= self.min_items
            and all(type(item) is dict for item in value)
        ):
            return [self._check_table(position, item) for position, item in enumerate(value)]
        for text in value if type(value) is list else [value]:
            # Bytes of the command line that are no UTF-8; the resolved config is written as TOML, which is UTF-8.
            if type(text) is str and not text.isascii() and text.encode("utf-8", "replace").decode() != text:
                raise ValueError(f"found {value!r}, expected UTF-8 text")
        if not self._allows(value):
            raise ValueError(f"found {value!r}, expected {self.expected()}")
        return value

    def expand(self, value: Any) -> Any:
        """Return a checked `value` with `~` replaced by the home folder, if it is a path.

        Raises:
            ValueError: there is no such user.
        """
        if not self.path or value is None:
            return value
        expanded = os.path.expanduser(value)
        if expanded.startswith("~"):
            raise ValueError(
                f"found {value!r}, expected a user's name after ~; write ./{value} for a file of that name"
            )
        return expanded

    def _allows(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if type(value) is not self.type:  # not isinstance: True is no int
            return False
        if self.type is list:
            if len(value) < self.min_items or self.items not in (None, len(value)):
                return False
            return all(type(item) is self.item and self._in_range(item) for item in value)
        if self.type is float and not math.isfinite(value):
            return False
        if self.special is not None and value == self.special:
            return True
        return self._in_range(value)

    def _in_range(self, value: Any) -> bool:
        return (
            (not self.choices or value in self.choices)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def _check_table(self, position: int, table: dict[str, Any]) -> dict[str, Any]:
        """One table of the list, its values in their types and `~` in paths replaced. Raises as `check`."""
        specs = {spec.name: spec for spec in key_specs(self.table, "")}
        checked = {}
        for name, value in table.items():
            if name not in specs:
                nearest = difflib.get_close_matches(name, specs, n=1, cutoff=0.0)[0]
                raise ValueError(f"table {position}: unknown key {name!r}, nearest is {nearest}")
            try:
                checked[name] = specs[name].expand(specs[name].check(value))
            except ValueError as error:
                raise ValueError(f"table {position}: {name}: {error}") from None
        for name, spec in specs.items():
            if spec.default is None and not spec.optional and name not in checked:
                raise ValueError(f"table {position}: {name} is missing, expected {spec.expected()}")
        return checked


def _converted(kind: type, value: Any) -> Any:
    """An int as a float where a float is expected; a float without fraction, as 1e4, as an int where an int is."""
    if kind is float and type(value) is int:
        return float(value) if abs(value) <= sys.float_info.max else math.inf
    if kind is int and type(value) is float and value.is_integer():
        return int(value)
    return value


def key_specs(cls: type, prefix: str) -> Iterator[KeySpec]:
    """The keys that a dataclass declares, but those of sections inside it. A default of None for a type that is not
    optional means that there is none: the key must be given."""
    for f in fields(cls):
        if not is_dataclass(f.type):
            optional = type(None) in get_args(f.type)
            declared = get_args(f.type)[0] if optional else f.type
            default = f.default_factory() if f.default is MISSING else f.default
            yield KeySpec(prefix + f.name, get_origin(declared) or declared, optional, default, **f.metadata)
