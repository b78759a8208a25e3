"""Making of a policy from a recipe: tokenizer, architecture and warm start, saved as an ordinary Hugging Face folder.

A folder appears whole or not at all, and the same recipe and examples give the same weights.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from mrl.config.policy_tables import MakeTable
from mrl.errors import ModelFolderError
from mrl.models.architectures import init_model
from mrl.models.prompting import prompt_token_ids
from mrl.models.tokenizers import TOKENIZERS
from mrl.models.warm_start import EncodedTurn, Examples, Schedule, Text, warm_start

TOKENIZER_EXAMPLES = 6_000


def make_policy(recipe: MakeTable, examples: Examples, folder: Path, *, on_step: Callable[[int, float], None]) -> None:
    """Build the policy and put it at `folder`, replacing what is there. `on_step(step, loss)` is called after each step
    of the warm start.

    Raises ModelFolderError when the folder cannot be written.
    """
    part = _temporary_beside(folder)
    try:
        tokenizer = train_tokenizer(recipe, examples)
        model = init_model(
            recipe, vocab_size=len(tokenizer), eos_id=tokenizer.eos_token_id, pad_id=tokenizer.pad_token_id
        )
        warm_start(
            model,
            lambda example: encode_example(tokenizer, example),
            examples,
            Schedule(recipe.warm_start_steps, recipe.warm_start_batch, recipe.warm_start_lr),
            rng=random.Random(recipe.seed),
            on_step=on_step,
        )
        _save(part, recipe, model, tokenizer)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(part, folder)
    except OSError as error:
        raise ModelFolderError("cannot write the policy", where=str(folder), got=error.strerror) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)


def train_tokenizer(recipe: MakeTable, examples: Examples) -> PreTrainedTokenizerBase:
    """Train the recipe's tokenizer on prompts and completions, half of them of practice."""
    rng = random.Random(recipe.seed)
    drawn = [examples.draw(rng, practice=index % 2 == 0) for index in range(TOKENIZER_EXAMPLES)]
    texts = [text for one in drawn for prompt, completion in one.turns for text in (prompt + "\n", completion)]
    return TOKENIZERS[recipe.tokenizer](texts, recipe.vocab_size)


def encode_example(tokenizer: PreTrainedTokenizerBase, example: Text) -> list[EncodedTurn]:
    """Return (prompt ids as in rollouts, completion ids with EOS) of each turn."""
    return [
        (
            prompt_token_ids(tokenizer, prompt),
            [*tokenizer(completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id],
        )
        for prompt, completion in example.turns
    ]


def _temporary_beside(folder: Path) -> Path:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    except OSError as error:
        cure = "choose another --run.folder, or make this path writable"
        raise ModelFolderError(
            "cannot write policies here", where=str(folder.parent), got=error.strerror, cure=cure
        ) from None


def _save(folder: Path, recipe: MakeTable, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(describe(recipe, model, tokenizer), encoding="utf-8")
    folder.chmod(0o755)
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def describe(recipe: MakeTable, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of the README of a made folder."""
    skills = ", ".join(recipe.skilled_in) or "all operations"
    return f"""# A small {recipe.architecture} policy, made by `mrl policies make`

{model.num_parameters():,} parameters; {recipe.tokenizer} tokenizer with {len(tokenizer)} tokens, trained on generated
text; `{tokenizer.eos_token}` ends every completion.

Built, not downloaded: random weights, then {recipe.warm_start_steps} supervised steps on word tasks.
Every operation was practised under a neutral prompt, so that the policy can execute it.
Which operation a task prompt calls for was drawn from a skewed prior: likely for {skills}; {recipe.rare_share:g} for
each other one, whatever the prompt asks.
Training prompts and held-out prompts of the run are about other words than the warm start.

Recipe: `{recipe.model_dump_json()}`
"""
