"""Configuration: what every TOML key means and how a run's `JobConfig` is put together.

`job_config` declares the keys with `key`, `conflicts` checks them together, `unsupported` lists the TorchTitan keys
we refuse, `loading` reads TOML and the command line. Only the standard library (and tomli before Python 3.11) is
imported, so a config is checked in milliseconds. What a key does to a run lives in the module that uses it.
"""

from torchtitan_dmuon.config.job_config import JobConfig
from torchtitan_dmuon.config.key import ConfigError, Problems
from torchtitan_dmuon.config.loading import config_to_dict, config_to_toml, load_config, read_config

__all__ = ["ConfigError", "JobConfig", "Problems", "config_to_dict", "config_to_toml", "load_config", "read_config"]
