"""A configuration as TOML text, for runs whose configuration a command derives from another one."""

import tomli_w

from mrl.config.schema import RunConfig


def config_toml(config: RunConfig) -> str:
    """What `config` sets, as a file that `load_config` reads back to an equal one; defaults stay unsaid."""
    return tomli_w.dumps(config.model_dump(mode="json", exclude_unset=True, exclude_none=True))
