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
from torchtitan_dmuon.config.key import ConfigError, KeySpec
from torchtitan_dmuon.config.unsupported import UNSUPPORTED

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
            file that cannot be read; always one line.
        SystemExit: with status 0, after printing the help that `--help` asks for.
    """
    arguments = _parse_command_line(argv)
    layers = [(_COMMAND_LINE, arguments)]
    config_file = arguments.get("job.config_file")
    if config_file is not None:
        config_file = _expanded("job.config_file", config_file, _COMMAND_LINE)
        layers.insert(0, (config_file, _read_toml(config_file)))

    values = {name: spec.default for name, spec in KEYS.items()}
    sources = dict.fromkeys(KEYS, "default")
    for source, layer in layers:
        for name, value in layer.items():
            try:
                values[name] = KEYS[name].check(value)
            except ValueError as error:
                raise ConfigError(name, source, str(error)) from None
            sources[name] = source

    for name in _TEMPLATES:
        values[name] = _fill_placeholders(name, values, sources[name])
    values = {name: _expanded(name, value, sources[name]) for name, value in values.items()}
    config = _build(JobConfig, "", values)
    for name, problem in conflicts(config):
        raise ConfigError(name, sources[name], problem)
    return config


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
                nargs: dict[str, Any] = {}
                if spec.type is bool:
                    nargs = {"nargs": "?", "const": "true"}
                elif spec.type is list:
                    nargs = {"nargs": "*"}
                group.add_argument(f"--{spec.name}", metavar=spec.type.__name__, help=text.replace("%", "%%"), **nargs)
    return parser


def _parse_command_line(argv: list[str]) -> dict[str, Any]:
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
    if rest:
        name = rest[0][2:].partition("=")[0]
        if rest[0].startswith("--") and name:
            raise _unknown(name, _COMMAND_LINE, KEYS)
        raise ConfigError(None, _COMMAND_LINE, f"found {rest[0]!r}, expected --section.key value")
    return {name: _from_text(KEYS[name], text) for name, text in vars(namespace).items()}


def _from_text(spec: KeySpec, text: str | list[str]) -> Any:
    """Convert command-line text to the key's type; what does not convert is left for `check` to refuse."""
    if spec.optional and (text[0] if isinstance(text, list) and len(text) == 1 else text) in ("none", "None"):
        return None
    if spec.table is not None:  # TOML, as [{patterns = ["*.wq.*"], lr = 1e-3}]
        try:
            return tomllib.loads(f"tables = {' '.join(text) or '[]'}")["tables"]
        except ValueError:
            return " ".join(text)
    if isinstance(text, list):
        return [_number(spec.item, item) for word in text for item in word.split(",") if item]
    if spec.type is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    return _number(spec.type, text)


def _number(kind: type, text: str) -> Any:
    """`text` as an int or float if it is to be one and can be."""
    if kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


# ---- TOML


def _read_toml(path: str) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except OSError as error:
        problem = f"cannot read {path!r}: {error.strerror}"
        raise ConfigError("job.config_file", _COMMAND_LINE, problem) from None
    except ValueError as error:  # TOML syntax, or bytes that are not UTF-8
        raise ConfigError(None, path, f"not valid TOML: {error}") from None
    values = _flatten_toml(table, "", path)
    if "job.config_file" in values:
        raise ConfigError("job.config_file", path, "expected on the command line only")
    return values


def _flatten_toml(table: dict[str, Any], prefix: str, source: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in table.items():
        path = prefix + name
        if "." in name or (path not in KEYS and path not in SECTIONS):
            raise _unknown(path, source, SECTIONS if isinstance(value, dict) else KEYS)
        if path in KEYS:
            values[path] = value
        elif isinstance(value, dict):
            values |= _flatten_toml(value, f"{path}.", source)
        else:
            raise ConfigError(path, source, f"found {value!r}, expected a table [{path}]")
    return values


def _unknown(path: str, source: str, known: dict[str, Any]) -> ConfigError:
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        reason = UNSUPPORTED.get(".".join(parts[:length]))
        if reason is not None:
            problem = f"this TorchTitan feature does not exist in torchtitan_dmuon: {reason}"
            return ConfigError(path, source, problem)
    # A right name in the wrong section is closer than a similar name in the right one.
    pool = [name for name in known if name.rpartition(".")[2] == parts[-1]] or list(known)
    nearest = difflib.get_close_matches(path, pool, n=1, cutoff=0.0)[0]
    kind = "section" if known is SECTIONS else "key"
    return ConfigError(path, source, f"unknown {kind}, nearest is {nearest}")


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


def _expanded(name: str, value: Any, source: str) -> Any:
    try:
        return KEYS[name].expand(value)
    except ValueError as error:
        raise ConfigError(name, source, str(error)) from None


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
