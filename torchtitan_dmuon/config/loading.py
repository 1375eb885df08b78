"""From TOML and the command line to a `JobConfig`, and back to TOML.

Precedence: command line > TOML file > defaults. Both sources go through the same checks, `KeySpec.check` for
one value and `conflicts` between keys. The keys themselves are declared in `job_config`.
"""

import argparse
import contextlib
import dataclasses
import difflib
import json
import re
from typing import Any, NoReturn

from torchtitan_dmuon.config.conflicts import conflicts
from torchtitan_dmuon.config.job_config import KEYS, SECTIONS, JobConfig
from torchtitan_dmuon.config.key import ConfigError, KeySpec, Problems
from torchtitan_dmuon.config.unsupported import RENAMED, asks_for_nothing, unsupported_because

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

_COMMAND_LINE = "command line"
# The [job] texts that may hold placeholders. job.config_file, the optional one, is read before other keys have values.
_TEMPLATES = [s.name for s in KEYS.values() if s.section == "job" and s.type is str and not s.optional]


def load_config(argv: list[str]) -> JobConfig:
    """Build the configuration of a run from its command line and the TOML file that it names.

    Args:
        argv: arguments without the program name, `--section.key value` or `--section.key=value` each.

    Raises:
        ConfigError: anything unknown, unsupported, of the wrong type, out of range or contradictory, and a
            file that cannot be read; one line for each of them.
        SystemExit: with status 0, after printing the help that `--help` asks for.
    """
    config, problems = read_config(argv)
    problems.raise_if_any()
    return config


def read_config(argv: list[str]) -> tuple[JobConfig, Problems]:
    """As `load_config`, for a caller that has more to check: returns the problems beside a configuration in which every
    key with a problem has its default. Raises ConfigError when the file cannot be read."""
    problems = Problems()
    arguments = _parse_command_line(argv, problems)
    given = {_COMMAND_LINE: _checked(arguments, _COMMAND_LINE, problems)}
    if (config_file := given[_COMMAND_LINE].get("job.config_file")) is not None:
        try:
            table = _read_toml(config_file)
        except ConfigError as error:  # without the file, every default would look like a mistake
            problems.add(error)
            raise problems.error() from None
        given = {config_file: _checked(_flatten_toml(table, "", config_file, problems), config_file, problems), **given}

    values = {name: spec.default for name, spec in KEYS.items()}
    sources = dict.fromkeys(KEYS, "default")
    for source, layer in given.items():
        values |= layer
        sources |= dict.fromkeys(layer, source)
    for name in _TEMPLATES:
        with problems.collect():
            values[name] = _fill_placeholders(name, values, sources[name])
    config = _build(JobConfig, "", values)
    for keys, problem in conflicts(config):
        if problems.sound(*keys):
            problems.add(ConfigError(keys[0], sources[keys[0]], problem))
    return config, problems


def _checked(layer: dict[str, Any], source: str, problems: Problems) -> dict[str, Any]:
    """The valid values of a layer, in the types of their keys and with `~` expanded."""
    values = {}
    for name, value in layer.items():
        try:
            values[name] = KEYS[name].expand(KEYS[name].check(value))
        except ValueError as error:
            problems.add(ConfigError(name, source, str(error)))
    return values


def config_to_dict(config: JobConfig) -> dict[str, Any]:
    """The config as nested dicts of plain values, one per section."""
    return dataclasses.asdict(config)


def config_to_toml(config: JobConfig) -> str:
    """The config as TOML text; loading the text gives an equal config.

    Keys that are None, and job.config_file, which a file cannot set, are comment lines.
    """
    lines: list[str] = []
    for section in SECTIONS:
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        table = config_to_dict(config)
        for name in section.split("."):
            table = table[name]
        for name, value in table.items():
            if isinstance(value, dict):
                continue  # a section of its own
            if f"{section}.{name}" in _TEMPLATES:
                value = value.replace("{", "{{").replace("}", "}}")
            comment = "# " if value is None or (section, name) == ("job", "config_file") else ""
            lines.append(f"{comment}{name} = {_toml_value(value)}")
    return "\n".join(lines) + "\n"


# ---- command line


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(None, _COMMAND_LINE, message)


def _build_parser() -> _Parser:
    parser = _Parser(
        usage="train.py [--section.key value ...]",
        description="Precedence: command line > TOML file (--job.config_file) > defaults.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=110),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for section, cls in SECTIONS.items():
        group = parser.add_argument_group(f"[{section}]", cls.__doc__)
        for spec in KEYS.values():
            if spec.section == section:
                text = f"{spec.help} ({spec.expected()}; default {_toml_value(spec.default)})"
                # A key without a value is told with all other problems; argparse would end at the first.
                nargs: dict[str, Any] = {"nargs": "?", "const": "true" if spec.type is bool else None}
                if spec.type is list:
                    nargs = {"nargs": "*"}
                group.add_argument(f"--{spec.name}", metavar=spec.type.__name__, help=text.replace("%", "%%"), **nargs)
    return parser


def _parse_command_line(argv: list[str], problems: Problems) -> dict[str, Any]:
    """The keys given on the command line, with values converted as far as their text allows."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            words.append(f"--{name[2:].replace('-', '_')}{equals}{value}")
        elif re.match(r"-\.?\d", word) and words and words[-1].startswith("--") and "=" not in words[-1]:
            words[-1] += f"={word}"  # argparse takes -1e-3 for an option
        else:
            words.append(word)
    namespace, rest = _build_parser().parse_known_args(words)
    unknown: dict[str, list[str]] = {}
    values: list[str] | None = None  # of the unknown key before, which are no problems of their own
    for word in rest:
        name, equals, value = word[2:].partition("=")
        if word.startswith("--") and name:
            values = unknown[name] = [value] if equals else []
            values = None if equals else values
        elif values is not None:
            values.append(word)
        else:
            problems.add(ConfigError(None, _COMMAND_LINE, f"found {word!r}, expected --section.key value"))
    for name, texts in unknown.items():
        if unsupported_because(name) is None or not asks_for_nothing(name, _literal(" ".join(texts) or "true")):
            problems.add(_unknown(name, _COMMAND_LINE, KEYS))
    for name in [name for name, text in vars(namespace).items() if text is None]:
        problems.add(ConfigError(name, _COMMAND_LINE, f"found no value, expected {KEYS[name].expected()}"))
    return {name: _from_text(KEYS[name], text) for name, text in vars(namespace).items() if text is not None}


def _literal(text: str) -> Any:
    """Command-line text of a key that has no type here: TOML, else as it is."""
    with contextlib.suppress(ValueError):
        return tomllib.loads(f"value = {text}")["value"]
    return text


def _from_text(spec: KeySpec, text: str | list[str]) -> Any:
    """Convert command-line text to the key's type. Text that does not convert is left for `check` to refuse."""
    if spec.optional and (text[0] if isinstance(text, list) and len(text) == 1 else text) in ("none", "None"):
        return None
    if isinstance(text, list):
        line = " ".join(text).strip()
        if line.startswith("[") or spec.table is not None:  # as in a file; a glob that starts with [ needs this form
            try:
                return tomllib.loads(f"list = {line or '[]'}")["list"]
            except ValueError:
                return line
        return [_number(spec.item, item) for word in text for item in word.split(",") if item]
    if spec.type is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    return _number(spec.type, text)


def _number(kind: type, text: str) -> Any:
    """`text` as a number if `kind` is one and the text can be; 1e4 is a float, which `check` takes for an int."""
    if kind in (int, float):
        for number in (kind, float):
            with contextlib.suppress(ValueError):
                return number(text)
    return text


# ---- TOML


def _read_toml(path: str) -> dict[str, Any]:
    """The tables of a file. Raises ConfigError."""
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError("job.config_file", _COMMAND_LINE, f"{path!r} does not exist") from None
    except OSError as error:
        raise ConfigError("job.config_file", _COMMAND_LINE, f"cannot read {path!r}: {error.strerror}") from None
    except ValueError as error:  # TOML syntax, or bytes that are not UTF-8
        raise ConfigError(None, path, f"not valid TOML: {error}") from None


def _flatten_toml(table: dict[str, Any], prefix: str, source: str, problems: Problems) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in table.items():
        path = prefix + name
        if path == "job.config_file":
            problems.add(ConfigError(path, source, "expected on the command line only"))
        elif "." not in name and path not in RENAMED and unsupported_because(path) is not None:
            if isinstance(value, dict):
                values |= _flatten_toml(value, f"{path}.", source, problems)
            elif not asks_for_nothing(path, value):
                problems.add(_unknown(path, source, KEYS))
        elif "." in name or (path not in KEYS and path not in SECTIONS):
            problems.add(_unknown(path, source, SECTIONS if isinstance(value, dict) else KEYS))
        elif path in KEYS:
            values[path] = value
        elif isinstance(value, dict):
            values |= _flatten_toml(value, f"{path}.", source, problems)
        else:
            problems.add(ConfigError(path, source, f"found {value!r}, expected a table [{path}]"))
    return values


def _unknown(path: str, source: str, known: dict[str, Any]) -> ConfigError:
    if path in RENAMED:
        error = ConfigError(path, source, f"unknown key, {RENAMED[path]} is its name now")
        error.keys.add(RENAMED[path])
        return error
    if (reason := unsupported_because(path)) is not None:
        return ConfigError(path, source, f"this TorchTitan feature does not exist in torchtitan_dmuon: {reason}")
    parts = path.split(".")
    # A right name in the wrong section is closer than a similar name in the right one.
    pool = [name for name in known if name.rpartition(".")[2] == parts[-1]] or list(known)
    nearest = difflib.get_close_matches(path, pool, n=1, cutoff=0.0)[0]
    kind = "section" if known is SECTIONS else "key"
    error = ConfigError(path, source, f"unknown {kind}, nearest is {nearest}")
    error.keys.add(nearest)  # its default is probably not what the user wants
    return error


def _toml_value(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # A JSON string is a TOML string, except that TOML wants DEL escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_toml_value(item)}' for name, item in value.items())}}}"
    return repr(value)


# ---- flat values to JobConfig


def _build(cls: type, prefix: str, values: dict[str, Any]) -> Any:
    arguments = {}
    for field in dataclasses.fields(cls):
        path = prefix + field.name
        value = _build(SECTIONS[path], f"{path}.", values) if path in SECTIONS else values[path]
        arguments[field.name] = list(value) if isinstance(value, list) else value
    return cls(**arguments)


def _fill_placeholders(name: str, values: dict[str, Any], source: str) -> str:
    """Replace each {section.key} in a [job] text by that key's value; {{ and }} stand for plain braces."""

    def fill(match: re.Match[str]) -> str:
        if match[0] in ("{{", "}}"):
            return match[0][0]
        # [job] itself is left out, so no text can refer to another that still has placeholders.
        value = None if match[1].startswith("job.") else values.get(match[1])
        if value is None or isinstance(value, list):
            expected = "{section.key} of a single value that is set, outside [job]"
            raise ConfigError(name, source, f"found placeholder {match[0]}, expected {expected}")
        return value if isinstance(value, str) else _toml_value(value)

    return re.sub(r"\{\{|\}\}|\{([^{}]*)\}", fill, values[name])
