"""A configuration as TOML text, for runs whose configuration a command derives from another one."""

import tomli_w

from mrl.config.schema import RunConfig


def config_toml(config: RunConfig) -> str:
    """The keys set in `config`, as TOML that `load_config` reads back to an equal configuration."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_unset=True, exclude_none=True))
