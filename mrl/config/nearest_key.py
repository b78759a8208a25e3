"""Look-ups in the schema by dotted keys: keys of a table, type of a key, and the valid key that a wrong one meant."""

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mrl.config.schema import RunConfig

ANY_NAME = "<name>"
"""Stands in a dotted key where a person gives the name."""
OTHER_NAMES = {
    "learning_rate": "lr",
    "scheduler": "lr_schedule",
    "lr_scheduler_type": "lr_schedule",
    "num_generations": "group_size",
    "samples_per_prompt": "group_size",
    "max_completion_length": "max_new_tokens",
    "max_tokens": "max_new_tokens",
    "max_response_length": "max_new_tokens",
    "batch_size": "prompts_per_step",
    "train_batch_size": "prompts_per_step",
    "max_steps": "steps",
    "total_steps": "steps",
    "num_mini_batches": "minibatches",
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_clipping": "max_grad_norm",
    "kl_coef": "kl_coefficient",
    "beta": "kl_coefficient",
    "entropy_coef": "entropy_coefficient",
    "model_path": "model",
    "model_name_or_path": "model",
    "revision": "model_revision",
}
"""Name of a key in other libraries -> its name here."""


def table_keys(path: tuple[str, ...]) -> list[str] | None:
    """Return the keys of the table at `path`; None when there is no such table, or when it takes any key."""
    kind = annotation_at(path)
    table = _table_of(kind)
    return None if table is None else list(table.model_fields)


def annotation_at(path: tuple[str, ...]) -> Any:
    """Return the type that the schema gives to the key at `path`; None when the schema does not know the key."""
    kind: Any = RunConfig
    for key in path:
        table = _table_of(kind)
        if table is not None:
            field = table.model_fields.get(key)
            kind = None if field is None else field.annotation
        elif _is_dict(kind):
            kind = get_args(kind)[1]
        elif get_origin(kind) is list:
            kind = get_args(kind)[0]
        else:
            return None
    return kind


def field_at(path: tuple[str, ...]) -> FieldInfo | None:
    """Return the schema's field of the key at `path`; None for a name that a person gave, and for an unknown key."""
    table = _table_of(annotation_at(path[:-1]))
    return table.model_fields.get(path[-1]) if table else None


def is_named_collection(path: tuple[str, ...]) -> bool:
    """Whether `path` is a table whose keys are names that the person gave, as in `policies.<name>`."""
    kind = annotation_at(path)
    return _is_dict(kind) and _table_of(get_args(kind)[1]) is not None


def nearest_key(path: tuple[str, ...]) -> str:
    """Return the valid dotted key that `path` most likely meant, or "" when nothing is near.

    Looks among the neighbours first, then for the same key in every other table.
    """
    *above, key = path
    neighbours = table_keys(tuple(above)) or []
    near = OTHER_NAMES.get(key, "")
    near = near if near in neighbours else nearest(key, neighbours)
    if near:
        return ".".join([*above, near])
    elsewhere = [known for known in all_keys() if known.rsplit(".", 1)[-1] in (key, OTHER_NAMES.get(key))]
    if not elsewhere:
        return ""
    inside = [known for known in elsewhere if known.split(".")[0] == path[0]]
    found = (inside or elsewhere)[0]
    return found.replace(ANY_NAME, path[1], 1) if inside and len(path) > 2 else found


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return the candidate closest to `word`, or ""."""
    found = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.55)
    return found[0] if found else ""


def all_keys() -> list[str]:
    """Return every dotted key of the schema, with `<name>` where a person gives the name."""
    return list(_walk(RunConfig, ""))


def _walk(kind: Any, prefix: str) -> Iterator[str]:
    table = _table_of(kind)
    if table is not None:
        for key, field in table.model_fields.items():
            yield from _walk(field.annotation, f"{prefix}.{key}".lstrip("."))
    elif _is_dict(kind) and _table_of(get_args(kind)[1]) is not None:
        yield from _walk(get_args(kind)[1], f"{prefix}.{ANY_NAME}")
    elif get_origin(kind) is list and _table_of(get_args(kind)[0]) is not None:
        yield from _walk(get_args(kind)[0], f"{prefix}.{ANY_NAME}")
    else:
        yield prefix


def _table_of(kind: Any) -> type[BaseModel] | None:
    for candidate in (kind, *get_args(kind)) if get_origin(kind) not in (dict, list) else ():
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _is_dict(kind: Any) -> bool:
    return get_origin(kind) is dict
