"""`python -m torchtitan_dmuon.config [--section.key value ...]`: check a config without starting a run.

Exits 0 when it is valid (with `--job.print_config` the resolved TOML is printed); otherwise prints an `error:` line
for each problem to stderr and exits 1. Model, data and folders are not looked at: `torchtitan_dmuon.preflight` does.
"""

import sys

from torchtitan_dmuon.config import ConfigError, config_to_toml, load_config


def main(argv: list[str]) -> int:
    """Check the config that `argv` describes and return the exit status; `--help` raises SystemExit(0)."""
    try:
        config = load_config(argv)
    except ConfigError as error:
        print(*(f"error: {line}" for line in error.lines), sep="\n", file=sys.stderr)
        return 1
    if config.job.print_config:
        print(config_to_toml(config), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
