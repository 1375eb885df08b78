"""``./run_train.sh --plan``: the plan of the run that the same command would launch."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import fields

from torchtitan_dmuon.config import ConfigError, read_config
from torchtitan_dmuon.plan import Assumptions, format_plan, make_plan
from torchtitan_dmuon.preflight import count_processes, examine

_FORMATS = ("text", "json")


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(usage="run_train.sh --plan[=json] [--section.key value ...]", allow_abbrev=False)
    parser.add_argument("--plan", nargs="?", const="text", default="text", choices=_FORMATS)
    for field in fields(Assumptions):
        parser.add_argument(f"--plan.{field.name}", dest=field.name, type=float, default=field.default)
    parser.add_argument("--plan.png", dest="png", metavar="FILE", help="also draw the plan; needs matplotlib")
    options, rest = parser.parse_known_args(argv)
    assumed = Assumptions(**{field.name: vars(options)[field.name] for field in fields(Assumptions)})
    try:
        config, problems = read_config(rest)
        _, ranks = count_processes()
        examined = examine(config, ranks, problems, only_model=True)
        if options.png is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plan.png", "command line", "needs the package matplotlib: pip install matplotlib")
        plan = make_plan(config, examined.model_args, examined.dims, assumed)
    except ConfigError as error:
        print(*(f"error: {line}" for line in error.lines), sep="\n", file=sys.stderr)
        return 1
    if options.png is not None:
        from torchtitan_dmuon.plan.picture import draw_plan  # matplotlib is optional

        draw_plan(plan, options.png)
    print(json.dumps(plan) if options.plan == "json" else format_plan(plan))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
