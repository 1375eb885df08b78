"""Train a model: ``./run_train.sh``, or ``torchrun train.py --job.config_file FILE [--section.key value ...]``."""

import gc
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from torchtitan_dmuon.checkpoint import CheckpointError
from torchtitan_dmuon.config import ConfigError, JobConfig, config_to_toml, load_config
from torchtitan_dmuon.data import DataError
from torchtitan_dmuon.distributed import world_from_env
from torchtitan_dmuon.logging import init_logger, logger
from torchtitan_dmuon.run_folder import release
from torchtitan_dmuon.signals import SignalWatch, end_with_parent
from torchtitan_dmuon.trainer import NonFiniteError, Trainer


@record
def _train(config: JobConfig, trainer: type[Trainer]) -> int:
    """As :func:`main`. ``record`` notes any other exception in a file that the launcher reads, before ``main``
    destroys the process group: the other ranks then fail too, and theirs would be noted first."""
    try:
        with SignalWatch(config.checkpoint.grace_seconds) as signals:
            trainer(config, signals).train()
    except ConfigError as error:
        for line in error.lines:
            logger.error("error: %s", line)
        return 1
    except (DataError, CheckpointError, NonFiniteError) as error:
        logger.error("error: %s", " ".join(str(error).split()))
        return 1
    return 0


def main(argv: list[str], trainer: type[Trainer] = Trainer) -> int:
    """Returns the exit code: 0, or 1 after a line for each thing that is wrong."""
    rank, _, _ = world_from_env()
    try:
        config = load_config(argv)
    except ConfigError as error:
        sys.stderr.writelines(f"error: {line}\n" for line in error.lines)
        return 1
    init_logger(rank, color=not config.metrics.disable_color_printing)
    logger.info("Starting: %s", config.job.description)
    if config.job.print_config:
        logger.info("Resolved config:\n%s", config_to_toml(config))
    try:
        return _train(config, trainer)
    finally:
        release(Path(config.job.dump_folder))
        if dist.is_initialized():
            dist.destroy_process_group()
        # The groups' threads must be gone before the interpreter is: model and groups refer to each other in cycles.
        gc.collect()


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
