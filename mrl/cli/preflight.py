"""Everything that can be found wrong before a process is started or a file is written."""

import json
from pathlib import Path

from mrl.config.schema import RunConfig
from mrl.errors import AddressError, ModelFolderError


def preflight(config: RunConfig, *, where: str) -> None:
    """Check sharing parameters, addresses, model folders and tasks. Raises UserError for the first that is wrong."""
    from mrl.sharing.regimes import check_sharing
    from mrl.transport.server import check_address

    check_sharing(config.sharing, where)
    try:
        check_address(config.exchange.host, config.exchange.port)
    except AddressError as error:
        raise AddressError(error.what, where=f"{where}: [exchange] {error.where}", cure=error.cure) from None
    for name, policy in config.policies.items():
        if policy.model:
            check_model_folder(Path(policy.model), key=f"policies.{name}.model")
    from mrl.tasks.pool import build_pool

    build_pool(config.tasks, config.pool)


def check_model_folder(folder: Path, *, key: str) -> None:
    """Raises ModelFolderError unless `folder` looks like a Hugging Face folder of a causal language model."""
    where = f"{key} = {str(folder)!r}"
    if not folder.is_dir():
        raise ModelFolderError(
            "no such folder" if not folder.exists() else "not a folder",
            where=where,
            wanted="a Hugging Face model folder",
            cure=f"download the model there, or give the policy a [{key.rsplit('.', 1)[0]}.make] table instead",
        )
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ModelFolderError(f"{name} is missing", where=where, wanted="a Hugging Face model folder")
    try:
        described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"config.json cannot be read ({error})", where=where) from None
    if not isinstance(described, dict) or "model_type" not in described:
        raise ModelFolderError("config.json names no model_type", where=where, wanted="a Hugging Face model folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelFolderError("no weights", where=where, wanted="*.safetensors")
