"""`mrl schema [-o FILE]`: print the JSON schema of configurations, for completion in editors."""

import argparse
import json
from pathlib import Path
from typing import Any

from mrl.config.run_folder import write_json
from mrl.config.schema import RunConfig
from mrl.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument: output file."""
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write to FILE instead of stdout")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the schema."""
    schema = config_schema()
    if arguments.output is None:
        print(json.dumps(schema, indent=2))
        return 0
    try:
        write_json(arguments.output, schema)
    except OSError as error:
        raise ConfigError(f"the file cannot be written ({error.strerror})", where=str(arguments.output)) from None
    print(arguments.output)
    return 0


def config_schema() -> dict[str, Any]:
    """Return the schema of a configuration file, with the parameters of every regime in the `[sharing]` table."""
    from mrl.sharing.regimes import sharing_schema

    schema = RunConfig.model_json_schema(by_alias=True)
    schema["properties"]["sharing"] = sharing_schema() | {"title": "Sharing"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
