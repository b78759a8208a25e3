# ruff: noqa: E501  (the lines of messages are longer than those of code)
"""What users do wrong, as a table: what is done, the line that is shown, the exit code; and nothing is half-written.

Every row is a mistake that somebody made with a configuration, models and data of their own. Those that need a run that
goes on stand in `SEEN_IN_RUNS` with the test that makes them.
"""

import codecs
import importlib.util
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from mrl.cli.main import main
from mrl.config.defaults import Resolved
from mrl.config.load import load_config
from mrl.config.policy_tables import PolicyTable
from mrl.config.run_folder import create_run_folder, lock_run_folder
from mrl.errors import ModelFolderError
from mrl.models.chat_template import chat_sign
from mrl.processes.preparation.completion import complete
from mrl.processes.preparation.model_folder import STATEFUL, check_model_folder, context_tokens
from tests.support.forgetful_template import FORGETFUL
from tests.support.model_folders import write_model, write_weights

ROOT = Path(__file__).parents[2]
CONFIG = """\
[run]
name = "small"
steps = 4
[tasks.sums]
source = "jsonl"
dataset = "sums.jsonl"
[sharing]
regime = "sgt"
[policies.qwen]
model = "models/qwen"
[policies.llama]
model = "models/llama"
"""
DICE = """\
import random
class Dice:
    deterministic = False
    def reset(self, seed):
        return "Throw it."
    def step(self, text):
        return str(random.randint(1, 6)), False
    def get_reward(self):
        return 0.0
"""
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 400\n"
SYSTEM_FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1 = ?"}]


class Mistake(NamedTuple):
    """One row of the table."""

    name: str
    words: str
    shown: str
    """A regular expression that the line on stderr (of a note: on stdout) contains."""
    prepare: Callable[[Path], object] = lambda folder: None
    code: int = 2


def edit(old: str, new: str) -> Callable[[Path], object]:
    """Another text in the configuration."""

    def change(folder: Path) -> None:
        text = (folder / "small.toml").read_text()
        assert old in text
        (folder / "small.toml").write_text(text.replace(old, new, 1))

    return change


def data(content: bytes | str) -> Callable[[Path], object]:
    """Another content of the file of prompts."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / "sums.jsonl").write_bytes(raw)


def rows(number: int, **values: object) -> str:
    """Lines of prompts, which all differ."""
    made = ({"prompt": f"{n} + {n} = ?", "reference": str(2 * n)} | values for n in range(number))
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made)


def model(file: str, content: str | bytes | None) -> Callable[[Path], object]:
    """Another content of a file of the first model, or none."""

    def change(folder: Path) -> None:
        path = folder / "models" / "qwen" / file
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def described(**values: Any) -> Callable[[Path], object]:
    """Further words in the first model's config.json."""

    def change(folder: Path) -> None:
        path = folder / "models" / "qwen" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def settings(**values: Any) -> Callable[[Path], object]:
    """Further words in the first model's tokenizer_config.json; None takes one out."""

    def change(folder: Path) -> None:
        path = folder / "models" / "qwen" / "tokenizer_config.json"
        known = json.loads(path.read_text()) | values
        path.write_text(json.dumps({key: value for key, value in known.items() if value is not None}))

    return change


def both(*changes: Callable[[Path], object]) -> Callable[[Path], object]:
    """One after the other."""
    return lambda folder: [change(folder) for change in changes]


TRAIN_OWN, CHECK_OWN = (
    f"{command} small.toml --tasks.sums.verifier own_verifier:judge" for command in ("train", "check")
)


def judged(body: str, takes: str = "reference, answer") -> Callable[[Path], object]:
    """A verifier of somebody's own, in the folder where mrl is started."""
    return lambda folder: (folder / "own_verifier.py").write_text(f"def judge({takes}):\n    {body}\n")


def tracked(table: str) -> Callable[[Path], object]:
    """A tracker in the configuration."""
    return edit("[run]", f"trackers = [{{{table}}}]\n[run]")


def run_exists(folder: Path) -> None:
    """A run of this configuration that has ended."""
    create_run_folder(complete(load_config(folder / "small.toml")).config)


TYPING = [
    Mistake("unknown key on the command line", "check small.toml --policies.qwen.learner.learning_rate 1e-4",
            r"unknown key; got 'policies\.qwen\.learner\.learning_rate'; cure: did you mean policies\.qwen\.learner\.lr\?"),
    Mistake("unknown key in TOML", "check small.toml", r"small\.toml: run\.learning_rate: unknown key.*learner\.lr\?",
            edit("steps = 4", "steps = 4\nlearning_rate = 1e-4")),
    Mistake("a key of another library", "check small.toml --policies.qwen.rollout.max_completion_length 8",
            r"did you mean policies\.qwen\.rollout\.max_new_tokens\?"),
    Mistake("misspelt key", "check small.toml --run.step 3", r"did you mean run\.steps\?"),
    Mistake("unknown policy", "check small.toml --policies.gwen.device cpu", r"did you mean qwen\?"),
    Mistake("lr is a word", "check small.toml --policies.qwen.learner.lr fast", r"learner\.lr: invalid value; got 'fast'.*a number"),
    Mistake("steps is a word", "check small.toml --run.steps ten", r"run\.steps: invalid value; got 'ten'.*a whole number"),
    Mistake("a policy stands twice", "check small.toml", r"small\.toml:\d+: \[policies\.qwen\] is defined twice",
            edit("[policies.llama]", "[policies.qwen]")),
    Mistake("no TOML", "check small.toml", r"small\.toml:2: not valid TOML", edit('name = "small"', "name = ")),
    Mistake("no such configuration", "train smal.toml", r"smal\.toml: no such file; cure: did you mean small\.toml\?"),
    Mistake("no configuration of such a name", "check nothere.toml",
            r"nothere\.toml: no such file; cure: `ls \*\.toml` lists the available configurations; `mrl quickstart --show`"),
    Mistake("a required key is misspelt", "check small.toml", r"run\.stpes: unknown key.*did you mean run\.steps\?",
            edit("steps = 4", "stpes = 4")),
    Mistake("the configuration is a folder", "check models", r"models: not a file; wanted a TOML file"),
    Mistake("unknown regime", "check small.toml --sharing.regime sgd", r"no such regime; got 'sgd'.*did you mean sgt\?"),
    Mistake("a regime's parameter out of range", "check small.toml --sharing.sgt.lambda -1",
            r"sharing\.sgt\.lambda: invalid value; got -1.*wanted >= 0"),
    Mistake("a regime's parameter misspelt on the command line", "check small.toml --sharing.sgt.lamda=1",
            r"error: command line: sharing\.sgt\.lamda: unknown key"),
    Mistake("a rule that another key of the command line breaks", "check small.toml --allocation.slots 1 --run.steps 3",
            r"error: small\.toml with --allocation\.slots 1 --run\.steps 3: allocation\.floor_slots: the floors of 2 policies"),
    Mistake("a rule that a list on the command line breaks", 'check small.toml --allocation.slots 1 --launch.remote ["ssh","{host}"]',
            r"error: small\.toml with --allocation\.slots 1 --launch\.remote '\[\"ssh\",\"\{host\}\"\]': allocation\.floor_slots:"),
    Mistake("a rule that an override of the quickstart breaks", "quickstart --policies.qwen.rollout.workers 0",
            r"error: command line: policies\.qwen\.rollout\.workers: a policy needs at least one worker"),
    Mistake("a regime's parameter misspelt", "check small.toml --sharing.sgt.lamda 1", r"did you mean sharing\.sgt\.lambda\?"),
    Mistake("negative learning rate", "check small.toml --policies.qwen.learner.lr -1", r"learner\.lr: .*wanted > 0"),
    Mistake("temperature zero", "check small.toml --policies.qwen.rollout.temperature 0", r"temperature: .*wanted > 0"),
    Mistake("a file that is not there, with an override", "check other.toml --run.steps 3", r"error: other\.toml: no such file"),
    Mistake("no steps", "check small.toml --run.steps 0", r"run\.steps: .*wanted >= 1"),
    Mistake("a name with a slash", "train small.toml --run.name a/b", r"run\.name: invalid value; got 'a/b'; wanted letters, digits"),
    Mistake("a name with a space", "check small.toml", r"run\.name: invalid value; got 'my run'; wanted letters, digits",
            edit('"small"', '"my run"')),
    Mistake("an unknown command", "trian small.toml", r"no such command; got 'trian'; cure: did you mean `mrl train`\?"),
    Mistake("no configuration given", "train", r"required: CONFIG"),
    Mistake("--resume with --clean", "train small.toml --resume --clean", r"not allowed with"),
]  # fmt: skip

FILES = [
    Mistake("no file of prompts", "train small.toml", r"tasks\.sums: data file 'sums\.jsonl' does not exist \(relative to the working directory /",
            lambda folder: (folder / "sums.jsonl").unlink()),
    Mistake("an empty file", "train small.toml", r"sums\.jsonl: the file is empty; wanted a JSONL file", data("")),
    Mistake("blank lines alone", "train small.toml", r"sums\.jsonl: the file has only blank lines", data("\n\n  \n")),
    Mistake("Latin-1", "train small.toml", r"sums\.jsonl:61: the text is not UTF-8; got 'the byte 0xe9.*cure: iconv -f LATIN1 -t UTF-8",
            data(rows(60).encode() + rows(1, prompt="Un été ?").encode("latin-1"))),
    Mistake("UTF-16", "train small.toml", r"sums\.jsonl:1: the text is not UTF-8; got 'UTF-16 text'; .*iconv -f UTF-16 -t UTF-8",
            data(rows(60).encode("utf-16"))),
    Mistake("UTF-16 without a mark", "train small.toml", r"sums\.jsonl:1: the text is not UTF-8; got 'UTF-16 text'",
            data(rows(60).encode("utf-16-le"))),
    Mistake("a line that is no JSON", "train small.toml", r"sums\.jsonl:61: not valid JSON: .*; got '\{\"prompt\": no'",
            data(rows(60) + '{"prompt": no\n')),
    Mistake("a row without a prompt", "train small.toml", r"sums\.jsonl:1: the row has no key 'prompt'; got .*'question'.*options\.prompt_key",
            data('{"question": "1 + 1", "reference": "2"}\n')),
    Mistake("a message that is none", "train small.toml", r"sums\.jsonl:1: prompt: message 1 is not valid; got .*wanted .*content",
            data('{"prompt": [{"from": "human", "value": "1 + 1"}], "reference": "2"}\n')),
    Mistake("a conversation that ends with the answer", "train small.toml",
            r"sums\.jsonl:1: messages: the last message is not from the user; got \"role 'assistant'\"; .*cure: remove the last answer",
            data(json.dumps({"messages": [*SYSTEM_FIRST, {"role": "assistant", "content": "2"}], "reference": "2"}))),
    Mistake("a line of 10 MB", "train small.toml", r"sums\.jsonl:61: the line is too long; got 'more than 8,388,608 bytes'",
            data(rows(60) + rows(1, reference="x" * 10_000_000))),
    Mistake("a prompt of 2 MB", "train small.toml", r"sums\.jsonl:61: the prompt is too long; got '2,000,000 bytes'; wanted at most 1,048,576",
            data(rows(60) + rows(1, prompt="x" * 2_000_000))),
    Mistake("more prompts asked for than there are", "train small.toml --pool.train_prompts 100",
            r"too few distinct prompts; got '\d+ for training and .*wanted 100 and .*0 uses all"),
    Mistake("a single row", "train small.toml", r"too few distinct prompts; got '\d for training and \d held out'; wanted at least 1 and at least 1; "
            r"cure: add rows: a hash of each prompt holds out about 15 % of them; or set tasks\.sums\.options\.held_out",
            data(rows(1))),
    Mistake("a filter by a column that is not there", "train small.toml --tasks.sums.options.filter.levle 3",
            r"sums\.jsonl:1: options\.filter: no column 'levle'; got \"columns \['level', 'prompt', 'reference'\]\"; cure: did you mean 'level'",
            data(rows(60, level=3))),
    Mistake("no Parquet file", "train small.toml --tasks.sums.dataset sums.parquet", r"sums\.parquet: not a valid Parquet file",
            lambda folder: (folder / "sums.parquet").write_text("x")),
    Mistake("a split that a folder lacks", "train small.toml --tasks.sums.dataset own --tasks.sums.options.split tain",
            r"options\.split: the data set has no split 'tain'; got 'train\.jsonl'",
            lambda folder: ((folder / "own").mkdir(), (folder / "own/train.jsonl").write_text(rows(60)))),
    Mistake("a split of a single file", "train small.toml --tasks.sums.options.split test",
            r"tasks\.sums: options\.split: a single file has no split; got 'sums\.jsonl'; wanted a folder, .*; cure: remove options\.split"),
    Mistake("no task is trained on", "train small.toml --tasks.sums.weight 0", r"no task has a weight above 0; cure: set tasks"),
    Mistake("no such benchmark", "train small.toml --tasks.sums.source benchmark --tasks.sums.dataset gms8k",
            r"tasks\.sums\.dataset: no such benchmark; got 'gms8k'; wanted one of gsm8k, math, .*did you mean gsm8k"),
    Mistake("a misspelt option of a task", "check small.toml --tasks.sums.options.promt_key question",
            r"options\.promt_key: unknown option; .*did you mean options\.prompt_key\?"),
    Mistake("a verifier without a colon", "train small.toml --tasks.sums.verifier mine",
            r'tasks\.sums\.verifier: no such verifier; got \'mine\'; wanted "module:name".*cure: for a verifier of your own, write "mine:FUNCTION"'),
    Mistake("a verifier with a dot for the colon", "train small.toml --tasks.sums.verifier my_verifier.score",
            r'cure: set tasks\.sums\.verifier = "my_verifier:score"$'),
    Mistake("no such verifier", "train small.toml --tasks.sums.verifier nowhere:judge", r"No module named 'nowhere'"),
]  # fmt: skip

MODELS = [
    Mistake("a name of the hub as the model", "train small.toml --policies.qwen.model Qwen/Qwen3-0.6B",
            r"policies\.qwen\.model = 'Qwen/Qwen3-0\.6B': no such folder here, and the model Qwen/Qwen3-0\.6B of the hub is not on this machine; got 'HF_HUB_OFFLINE is set'; cure: mrl fetch small\.toml on a host with network access"),
    Mistake("no such folder", "train small.toml --policies.qwen.model ./nowhere",
            r"no such folder \(relative to the working directory /.*\).*cure: set policies\.qwen\.source = \"ORG/NAME\" to fetch"),
    Mistake("no folder of models", "train small.toml --policies.qwen.model model/qwen",
            r"policies\.qwen\.model = 'model/qwen': no such folder here, and the model model/qwen of the hub is not on this machine; got 'HF_HUB_OFFLINE is set'"),
    Mistake("a folder's name is misspelt", "train small.toml --policies.qwen.model models/qven",
            r"no such folder .*cure: did you mean models/qwen\?"),
    Mistake("no tokenizer", "train small.toml --policies.qwen.source maker/Own-1B",
            r"policies\.qwen\.model = 'models/qwen': tokenizer\.json is missing.*cure: hf download maker/Own-1B", model("tokenizer.json", None)),
    Mistake("no tokenizer of a commit", "train small.toml --policies.qwen.source maker/Own-1B@v1",
            r"tokenizer\.json is missing.*cure: hf download maker/Own-1B --revision v1 --local-dir models/qwen$", model("tokenizer.json", None)),
    Mistake("no tokenizer in a model of one's own", "train small.toml",
            r"tokenizer\.json is missing.*cure: python -c \"from transformers .*'THE BASE MODEL'\)\.save_pretrained\('models/qwen'\)",
            model("tokenizer.json", None)),
    Mistake("a tokenizer of the older form", "train small.toml", r"cure: python -c .*\.from_pretrained\('models/qwen'\)\.save_pretrained\('models/qwen'\)",
            both(model("tokenizer.json", None), model("vocab.json", "{}"))),
    Mistake("no weights", "train small.toml", r"no weights found; .*wanted model\.safetensors", model("model.safetensors", None)),
    Mistake("weights of torch", "train small.toml", r"no weights found; got 'pytorch_model\.bin'.*cure: save the model as safetensors",
            both(model("model.safetensors", None), model("pytorch_model.bin", b"PK"))),
    Mistake("a Git LFS pointer", "train small.toml", r"model\.safetensors is a Git LFS pointer.*cure: git -C models/qwen lfs pull",
            model("model.safetensors", LFS)),
    Mistake("weights cut off", "train small.toml", r"model\.safetensors is truncated; got '\d+ bytes'; wanted \d+ bytes, as its header says",
            lambda folder: write_weights(folder / "models/qwen/model.safetensors", num_elements=200, held_bytes=399)),
    Mistake("weights cut off in their header", "train small.toml", r"model\.safetensors is not a safetensors file; got 'truncated within",
            model("model.safetensors", (500).to_bytes(8, "little") + b"{")),
    Mistake("weights that are empty", "train small.toml",
            r"model\.safetensors is not a safetensors file; got '0 bytes, too few for a header'; wanted a whole safetensors file; "
            r"cure: download the model into this folder, or save it there: in transformers, model\.save_pretrained\('models/qwen'\)",
            model("model.safetensors", b"")),
    Mistake("weights without a header", "train small.toml", r"got 'its header is not JSON'; wanted a whole safetensors file",
            model("model.safetensors", (9).to_bytes(8, "little") + b"not found")),
    Mistake("weights with a header without end", "train small.toml", r"got 'its header is not JSON'; wanted a whole safetensors file",
            model("model.safetensors", (200_000).to_bytes(8, "little") + b"[" * 200_000)),
    Mistake("a shard is missing", "train small.toml", r"1 of 2 weight files are missing; got 'no b\.safetensors'",
            both(lambda folder: write_weights(folder / "models/qwen/a.safetensors", num_elements=2),
                 model("model.safetensors.index.json", json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}})))),
    Mistake("no end of answers", "train small.toml", r"no EOS token is declared", settings(eos_token=None)),
    Mistake("an encoder", "train small.toml", r"not a causal language model.*got 'BertForMaskedLM'; wanted a causal language model",
            described(model_type="bert", architectures=["BertForMaskedLM"])),
    Mistake("a classifier of a known family", "train small.toml", r"not a causal language model",
            described(architectures=["Qwen3ForSequenceClassification"])),
    Mistake("code of its own", "train small.toml", r"the model needs custom code, which mrl never runs; got .*auto_map",
            described(model_type="minefold", auto_map={"AutoConfig": "configuration_minefold.MinefoldConfig"})),
    Mistake("an architecture that nobody knows", "train small.toml", r"transformers does not know this architecture; got .*qwen99",
            described(model_type="qwen99")),
    Mistake("quantized weights", "train small.toml",
            r"policies\.qwen\.model = 'models/qwen': the weights are quantized, .*got 'quantization_config in config\.json: fp8'; wanted a release of the model in bfloat16",
            described(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})),
    Mistake("a model of images without one of text", "train small.toml",
            r"transformers has no text-only model for this architecture, and mrl trains no other; got .*Mistral3ForConditionalGeneration",
            described(model_type="mistral3", architectures=["Mistral3ForConditionalGeneration"])),
    Mistake("a model with states", "train small.toml",
            r"a learner cannot train this model: it has recurrent layers.*got .*model_type 'qwen3_next'.*cure: .*frozen = true and a server as its engine",
            described(model_type="qwen3_next")),
    Mistake("a model that says it has states", "train small.toml", r"a learner cannot train this model.*with layers of mamba",
            described(model_type="granitemoehybrid", layer_types=["mamba", "attention"])),
    Mistake("a teacher with states in the embedded engine", "check small.toml --sharing.regime rlad --sharing.rlad.teacher qwen",
            r"policies\.qwen\.model = 'models/qwen': the embedded engine cannot run this model: it has layers that carry a state from token to token; got .*qwen3_next",
            both(edit('model = "models/qwen"', 'model = "models/qwen"\nfrozen = true'), described(model_type="qwen3_next"))),
    Mistake("attention in chunks", "train small.toml", r"a learner cannot train this model: it has chunked attention; got .*with layers of chunked",
            described(model_type="llama4_text", layer_types=["chunked_attention", "full_attention"])),
    Mistake("attention to chosen tokens", "train small.toml", r"it has layers that are neither full nor.*with layers of indexed",
            described(model_type="deepseek_v32", layer_types=["indexed_attention", "full_attention"])),
    Mistake("attention with sinks", "train small.toml", r"a learner cannot train this model: it has attention sinks; got .*gpt_oss",
            described(model_type="gpt_oss")),
    Mistake("adapters over weights that would be rounded",
            "train small.toml --policies.qwen.learner.lora.rank 4 --policies.qwen.learner.parameter_dtype bfloat16",
            r"model\.safetensors: policies\.qwen\.learner\.parameter_dtype: bfloat16 would round the weights under the adapters; got 'a in",
            lambda folder: save_file({"a": np.full((2, 2), 0.1, np.float32)}, folder / "models/qwen/model.safetensors")),
    Mistake("rotary frequencies that transformers refuses", "train small.toml",
            r"small\.toml: policies\.qwen\.model: models/qwen: config\.json cannot be used; got .*short_factor",
            described(model_type="phi3", rope_scaling={"type": "yarn", "factor": 4.0}, pad_token_id=0)),
    Mistake("rotary frequencies of a kind that is not", "train small.toml",
            r"small\.toml: policies\.qwen\.model: .*has a value that transformers does not support; got \"'yaarn' of qwen3\"",
            described(rope_scaling={"type": "yaarn", "factor": 4.0})),
    Mistake("a template with a mistake", "train small.toml",
            r"policies\.qwen: models/qwen/chat_template\.jinja:2: the chat template is not valid",
            model("chat_template.jinja", "a\n{% for %}")),
    Mistake("a template that takes no system message", "train small.toml",
            r"policies\.qwen: models/qwen/chat_template\.jinja: the chat template cannot render a prompt; got 'no system here \(a prompt of sums\)'",
            both(model("chat_template.jinja", "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x"),
                 data(rows(60) + rows(1, prompt=SYSTEM_FIRST)))),
    Mistake("a template by which a conversation cannot go on", "train small.toml --pool.train_prompts 40 --pool.held_out_prompts 8",
            r"policies\.qwen: models/qwen: the chat template changes earlier messages when later ones are added; wanted a template with which .*cure: set policies\.X",
            both(edit("[run]", "[tasks.game]\nsource = 'environment'\ndataset = 'higher_lower'\noptions = { size = 60 }\n[run]"), model("chat_template.jinja",
                 "{% for m in messages %}{{ m.content }}{{ '.' if loop.last else ';' }}{% endfor %}"))),
    Mistake("an agent that is not there", "train small.toml --pool.train_prompts 40 --pool.held_out_prompts 8",
            r"tasks\.talk\.dataset: not usable as an agent: the module my_agents cannot be imported: ModuleNotFoundError: No module named 'my_agents'; got 'my_agents:play'; wanted an async function",
            edit("[run]", "[tasks.talk]\nsource = 'agent'\ndataset = 'my_agents:play'\noptions = { size = 60 }\n[run]")),
    Mistake("an agent without a function", "check small.toml",
            r"tasks\.talk\.dataset: no such agent; got 'my_agents'; wanted an async function, \"module:function\", or \"outside\"",
            edit("[run]", "[tasks.talk]\nsource = 'agent'\ndataset = 'my_agents'\noptions = { size = 60 }\n[run]")),
    Mistake("requests from outside in a synchronous run", "train small.toml --run.sync true --gateway.serve true",
            r"gateway\.serve: a synchronous run cannot answer other requests; got 'run\.sync = true'; cure: set --run\.sync false"),
    Mistake("kept versions where nothing is served", "train small.toml --gateway.kept_versions 1",
            r"gateway\.kept_versions: requires gateway\.serve; got '1, with gateway\.serve = false'; cure: set --gateway\.serve true"),
    Mistake("agents from outside of a synchronous run", "train small.toml --run.sync true",
            r"run\.sync: a synchronous run starts all episodes at once, but agents from outside connect at any time; got 'tasks\.talk\.dataset = \"outside\"'.*cure: set --run\.sync false",
            edit("[run]", "[tasks.talk]\nsource = 'agent'\ndataset = 'outside'\noptions = { size = 60 }\n[run]")),
    Mistake("a gateway at an address that is none of this host's", "train small.toml --gateway.host 192.0.2.1",
            r"\[gateway\].*192\.0\.2\.1",
            edit("[run]", "[tasks.talk]\nsource = 'agent'\ndataset = 'outside'\noptions = { size = 60 }\n[run]")),
    Mistake("answers of one turn under a regime of episodes", "train small.toml --sharing.regime prefix",
            r"sharing\.regime: prefix continues after a peer's first turns, but answers of sums have one turn; got 'tasks\.sums\.source = jsonl'.*wanted tasks that have an environment.*cure: use --sharing\.regime sgt"),
    Mistake("agents under a regime that plays turns again", "train small.toml --sharing.regime prefix",
            r"sharing\.regime: prefix replays a peer's turns, and the agents of sums cannot be replayed; got 'tasks\.sums\.source = agent'.*cure: use --sharing\.regime sgt",
            edit('source = "jsonl"\ndataset = "sums.jsonl"', "source = 'agent'\ndataset = 'outside'\noptions = { size = 60 }")),
    Mistake("episodes of one turn under a regime of episodes", "train small.toml --sharing.regime prefix",
            r"answers of sums have one turn; got 'tasks\.sums\.max_turns = 1'",
            edit('source = "jsonl"\ndataset = "sums.jsonl"', "source = 'environment'\ndataset = 'higher_lower'\nmax_turns = 1")),
    Mistake("an environment that does not say the same again", "train small.toml --sharing.regime prefix",
            r"tasks\.sums\.dataset.*prefix replays the turns of peers.*got .*my_dice:Dice, with deterministic = False.*cure: set --sharing\.regime sgt",
            both(edit('source = "jsonl"\ndataset = "sums.jsonl"', "source = 'environment'\ndataset = 'my_dice:Dice'"),
                 lambda folder: (folder / "my_dice.py").write_text(DICE))),
    Mistake("a conversation for a model without a template", "train small.toml",
            r"tasks\.sums: a prompt is a conversation, but the model has no chat template; got '2 messages'",
            data(rows(60) + rows(1, prompt=SYSTEM_FIRST))),
    Mistake("a model that chats, without its template", "train small.toml",
            r"the model is a chat model, but its folder has no chat template; got .*<\|im_start\|> opens a turn"
            r".*cure: hf download NAME --include chat_template\.jinja --include tokenizer_config\.json --local-dir models/qwen, or choose",
            both(described(eos_token_id=0),
                 settings(eos_token="<|im_end|>", added_tokens_decoder={"1": {"content": "<|im_start|>"}}))),
    Mistake("no GPU", "train small.toml --policies.qwen.device cuda", r"policies\.qwen\.device: no GPU is visible on this host.*device = \"cpu\""),
    Mistake("no environment of vLLM", "train small.toml --policies.qwen.rollout.engine vllm",
            r"policies\.qwen\.rollout\.engine = 'vllm': the environment of vllm is missing.*cure: mrl engine-env vllm --cpu"),
]  # fmt: skip

CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if long is defined %}!{% endif %}{% endfor %}"


def asked(line: str, template: str | None = CHAT) -> Callable[[Path], object]:
    """A line in the first policy's table of prompts, and a chat template in its folder."""
    table = edit("[policies.llama]", f"[policies.qwen.prompt]\n{line}\n[policies.llama]")
    return both(table, settings(bos_token="<|bos|>"), model("chat_template.jinja", template))


HAS_RENDERERS = importlib.util.find_spec("renderers") is not None
FAMILY = r"policies\.qwen\.prompt\.family = 'qwen9': the renderers package " + (
    r"does not know this family; wanted deepseek-r1, .*qwen3\.5"
    if HAS_RENDERERS
    else r"is not installed; cure: pip install 'mrl\[renderers\]'"
)
PROMPTS = [
    Mistake("a system message without a template", "check small.toml",
            r"policies\.qwen\.prompt\.system: "
            r"needs a chat template, and the model has none.*wanted chat_template\.jinja.*cure: set policies\.qwen\.prompt\.chat_template to a file",
            asked('system = "Be brief."', None)),
    Mistake("a family without a template", "check small.toml",
            r"policies\.qwen\.prompt\.family = 'glm-5': no chat template to compare prompt.family with", asked('family = "glm-5"', None)),
    Mistake("no such family", "check small.toml", FAMILY,
            asked('family = "qwen9"')),
    Mistake("a template that leaves the system message out", "check small.toml",
            r"models/qwen/chat_template\.jinja: policies\.qwen\.prompt\.system: the chat template leaves out the system message.*got .*Be brief",
            asked('system = "Be brief."', "{{ messages[-1].content }}")),
    Mistake("a template that refuses the system message", "check small.toml",
            r"policies\.qwen: models/qwen/chat_template\.jinja: the chat template cannot render a prompt; got 'no system here",
            asked('system = "Be brief."', "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}x")),
    Mistake("an option that the template does not read", "check small.toml",
            r"models/qwen/chat_template\.jinja: policies\.qwen\.prompt\.template_options\.enable_thinking: the chat template does not use this option.*got 'enable_thinking = False'",
            asked("template_options = { long = true, enable_thinking = false }")),
    Mistake("no such template", "check small.toml", r"policies\.qwen\.prompt\.chat_template: cannot read the file \(No such file or directory\) \(relative to",
            asked('chat_template = "nowhere.jinja"')),
    Mistake("a template that is none", "check small.toml", r"policies\.qwen\.prompt\.chat_template: the file contains no Jinja template",
            asked('chat_template = "sums.jsonl"')),
    Mistake("a template of one's own with a mistake", "check small.toml",
            r"policies\.qwen: prompt\.chat_template:1: the chat template is not valid.*cure: fix the template", asked('chat_template = "{% for %}"')),
    Mistake("an example that is none", "check small.toml", r"sums\.jsonl:1: policies\.qwen\.prompt\.few_shot_file: invalid few-shot example.*wanted .*assistant",
            asked('few_shot_file = "sums.jsonl"')),
    Mistake("a template with two BOS", "check small.toml", r"policies\.qwen: a prompt would begin with two BOS tokens.*cure: remove one of them from the template",
            asked("stop = ['x']", "{{ bos_token }}" + CHAT)),
    Mistake("prompts that bring a BOS", "check small.toml",
            r"a prompt would begin with two BOS tokens.*one <\|bos\|>, which the template adds; cure: remove <\|bos\|> from the beginning of the prompts of sums",
            both(asked("stop = ['x']"), data(rows(60) + rows(1, prompt="<|bos|>1 + 1")))),
    Mistake("a system message that brings a BOS", "check small.toml", r"two BOS.*cure: remove <\|bos\|> from the beginning of policies\.qwen\.prompt\.system",
            asked('system = "<|bos|>Be brief."')),
    Mistake("an empty stop string", "check small.toml", r"policies\.qwen\.prompt\.stop\.0: invalid value; wanted at least 1 character", asked('stop = [""]')),
]  # fmt: skip

LEARNING = [
    Mistake("answers longer than the context", "train small.toml --policies.qwen.rollout.max_new_tokens 512",
            r"policies\.qwen\.rollout\.max_new_tokens: 60 of 60 prompts leave too little room for their answers; got 'a prompt of "
            r"sums with \d+ tokens and max_new_tokens = 512'; wanted at most 512 together, the context length of the model; cure: set policies\.qwen\.rollout\.max_new_tokens = \d+",
            edit('model = "models/llama"', 'model = "models/llama"\nrollout = {max_new_tokens = 8}')),
    Mistake("prompts longer than the context", "train small.toml", r"3 of 63 prompts exceed this limit by themselves",
            data(rows(60) + "".join(rows(1, prompt=f"{n}" * 1700) for n in (1, 2, 3)))),
    Mistake("a group of one", "train small.toml --sharing.regime independent --policies.qwen.rollout.group_size 1",
            r"group_size: a single answer always has advantage 0, so nothing is learned; .*cure: set --policies\.qwen\.rollout\.group_size 8"),
    Mistake("a made policy for prompts of one's own", "train small.toml",
            r"small\.toml: policies\.qwen\.make: no task has an operation .*cure: set policies\.qwen\.model to a folder, .*`mrl policies make quickstart`",
            edit('[policies.qwen]\nmodel = "models/qwen"', '[policies.qwen.make]\narchitecture = "qwen3"\ntokenizer = "byte_level"')),
    Mistake("hosts that do not divide the ranks", "check small.toml --policies.qwen.learner.processes 3 --policies.qwen.learner.hosts 2",
            r"command line: policies\.qwen\.learner\.hosts: does not divide learner\.processes; got '2 hosts for processes = 3'; .*processes = 4$"),
    Mistake("weights in the memory of a learner over hosts",
            "check small.toml --policies.qwen.learner.processes 2 --policies.qwen.learner.hosts 2 --policies.qwen.rollout.weights_in memory",
            r"policies\.qwen\.rollout\.weights_in: engines cannot open the memory of a learner on 2 hosts; got 'memory'; wanted policies\.qwen\.rollout\.weights_in = \"disk\""),
    Mistake("shards on parts of hosts",
            "check small.toml --policies.qwen.learner.processes 12 --policies.qwen.learner.hosts 2 --policies.qwen.learner.sharding shard --policies.qwen.learner.shard_size 4",
            r"learner\.shard_size: the ranks of a copy would span parts of hosts; got '4 for 6 ranks on each host'; wanted a divisor or a multiple of 6, or 0 for 6"),
    Mistake("nobody to share with", "train small.toml", r"qwen is the only policy, so there is no peer to share with; .*regime independent",
            edit('[policies.llama]\nmodel = "models/llama"\n', "")),
]  # fmt: skip

REPLAYS = [
    Mistake("a replay of no run", "train small.toml --sharing.replay.run nowhere", r"nowhere: sharing\.replay\.run: not a run folder"),
    Mistake("a replay without its run", "train small.toml --sharing.replay.prefix old", r"sharing\.replay\.run: "),
    Mistake("a misspelt key of a replay", "train small.toml --sharing.replay.folder nowhere", r"sharing\.replay\.folder: unknown key; .*wanted one of run, policies"),
    Mistake("a replay of oneself", "train small.toml --resume --sharing.replay.run runs/small", r"sharing\.replay\.run: this is the run itself; .*wanted the folder of another run",
            run_exists),
    Mistake("a replay of a run without a store", "train small.toml --run.name next --sharing.replay.run runs/small", r"runs/small/exchange/exchange\.sqlite: no exchange file found", run_exists),
]  # fmt: skip

RUNS = [
    Mistake("the run exists", "train small.toml", r"runs/small: the run already exists; cure: use --resume, --clean \(deletes it\), or another --run",
            run_exists),
    Mistake("nothing to resume", "train small.toml --resume", r"there is no run to resume; cure: leave out --resume"),
    Mistake("resumed under another regime", "train small.toml --resume --sharing.regime prp", r"sharing\.regime: .*got 'prp'; wanted 'sgt'",
            run_exists),
    Mistake("resumed with another model", "train small.toml --resume --policies.qwen.model models/other", r"policies\.qwen\.model: .*other",
            both(run_exists, lambda folder: write_whole(folder / "models" / "other"))),
    Mistake("a learner over more hosts than this one", "train small.toml --policies.qwen.learner.processes 2 --policies.qwen.learner.hosts 2",
            r"policies\.qwen\.learner\.hosts: the run has fewer hosts for policies; got 2; wanted <= 1; cure: name more hosts with `mrl launch CONFIG --hosts a,b`"),
    Mistake("a learner over more hosts than the run has",
            "launch small.toml --hosts a,b --exchange.host 0.0.0.0 --launch.hosts_join true --policies.qwen.learner.processes 3 --policies.qwen.learner.hosts 3",
            r"policies\.qwen\.learner\.hosts: the run has fewer hosts for policies; got 3; wanted <= 2$"),
    Mistake("the runs' folder is a file", "train small.toml --run.folder sums.jsonl", r"sums\.jsonl: the path is a file, but a folder is needed"),
    Mistake("too small a disk", "train small.toml --run.min_free_mib 999999999", r"not enough free disk space; .*cure: free some"),
    Mistake("an export of no run", "export nowhere --policy qwen --to out", r"nowhere: not a run folder"),
    Mistake("a report of no run", "report nowhere", r"nowhere: not a run folder .*runs/<name>"),
]  # fmt: skip

TRACKERS = [
    Mistake("an unknown tracker", "train small.toml", r"trackers\.0\.kind: no such tracker; got 'wanbd'; wanted swanlab, tensorboard, trackio, wandb, \"module:name\" or .*cure: did you mean wandb\?",
            tracked("kind = 'wanbd'")),
    Mistake("a misspelt key of a tracker", "train small.toml", r"trackers\.0\.projekt: unknown key; .*did you mean", tracked("kind = 'wandb', projekt = 'x'")),
    Mistake("a tracker that is no list", "train small.toml", r"small\.toml: trackers: invalid value", edit("[run]", "trackers = { kind = 'wandb' }\n[run]")),
    Mistake("a misspelt option of a tracker", "train small.toml", r"trackers\.0\.options: wandb has no such option in mrl; got 'entiti'; .*did you mean entity\?",
            tracked("kind = 'wandb', options = { entiti = 'me' }")),
    Mistake("a tracker's key in the configuration", "train small.toml", r"got 'api_key'; .*cure: leave it out: give keys through the environment",
            tracked("kind = 'wandb', options = { api_key = 'x' }")),
    Mistake("an option of another type", "train small.toml", r"trackers\.0\.options\.private: invalid value; got 'yes'; wanted true or false",
            tracked("kind = 'trackio', options = { private = 'yes' }")),
    Mistake("samples of answers that are not kept", "train small.toml",
            r"trackers\.0\.samples: samples come from kept answers, but run\.rollouts_mib = 0 keeps none; got 4; cure: set --run.rollouts_mib 64",
            edit("[run]", "trackers = [{ kind = 'trackio', samples = 4 }]\n[run]\nrollouts_mib = 0")),
    Mistake("a report to an unknown tracker", "report nowhere --to wanbd", r"--to.* 'wanbd'"),
]  # fmt: skip

EVALUATIONS = [
    Mistake("nothing to evaluate", "eval", r"mrl eval: nothing to evaluate; wanted a run, a model folder, or a model of the hub"),
    Mistake("agents of an evaluation", "eval models/qwen --config small.toml",
            r"tasks\.talk: tasks of agents are evaluated only within a run; got .*cure: select other tasks with --tasks",
            edit("[run]", "[tasks.talk]\nsource = 'agent'\ndataset = 'outside'\noptions = { size = 60 }\n[run]")),
    Mistake("a run without checkpoints", "eval runs/small", r"checkpoints/qwen: no checkpoint found; cure: wait until the run has saved its first",
            run_exists),
    Mistake("a step that is no number", "eval runs/small@last", r"runs/small@last: not a step; got 'last'; wanted RUN@STEP with a whole number, or RUN alone", run_exists),
    Mistake("a policy that is not in the run", "eval runs/small --policy gwen", r"no learning policy of this name; got 'gwen'; wanted qwen or llama",
            run_exists),
    Mistake("a task that is not there", "eval runs/small --tasks sum", r"--tasks: no such task; got 'sum'; wanted sums; cure: did you mean sums\?",
            run_exists),
    Mistake("more drawn than sampled", "eval runs/small --samples 4 --k 1,8", r"--k: pass@k needs at least k answers.*got 'k = 8 with 4 answers'; wanted k from 1 to 4",
            run_exists),
    Mistake("a k that is a word", "eval runs/small --k one", r"--k: invalid value; got 'one'; wanted whole numbers, separated by commas", run_exists),
    Mistake("a k of nothing", "eval runs/small --k 0", r"got 'k = 0 with 1 answer'; wanted k from 1 to 1", run_exists),
    Mistake("a negative temperature", "eval runs/small --temperature=-1", r"--temperature: invalid value; got -1\.0; wanted 0 to 2", run_exists),
    Mistake("top-p of nothing", "eval runs/small --top-p 0", r"--top-p: invalid value; got 0\.0; wanted above 0, and at most 1", run_exists),
    Mistake("no tasks for a model", "eval models/qwen", r"no tasks to evaluate on; got 'models/qwen'; .*--config quickstart"),
    Mistake("no run to evaluate", "eval runs/nope", r"no tasks to evaluate on, and no folder runs/nope here; got 'runs/nope'"),
    Mistake("a folder that is no model", "eval models --config small.toml", r"mrl eval models = 'models': config\.json is missing"),
    Mistake("a misspelt run", "eval runs/smal --config small.toml", r"no such run, model folder, or model on the hub; got 'runs/smal'.*did you mean runs/small\?",
            run_exists),
    Mistake("two of one name", "eval models/qwen models/qwen --config small.toml", r"two policies have the same name in the table; got 'qwen'"),
    Mistake("a comparison with no file", "eval --compare a.json b.json", r"a\.json: No such file or directory; wanted a file written by `mrl eval`"),
    Mistake("a comparison with another file", "eval --compare small.toml small.toml", r"small\.toml: not a file written by `mrl eval`; got "),
    Mistake("k above samples, in a run", "train small.toml --evaluation.k [1,8]", r"evaluation\.k: pass@k needs at least k answers.*got 'k = 8 with 1 answer'; wanted k from 1 to 1"),
]  # fmt: skip

VERIFIERS = [
    Mistake("a verifier that raises", TRAIN_OWN, r"own_verifier:judge failed on the answer '\d+' to .*got 'raised: ValueError: no unit \(own_verifier\.py:2 in judge\)'", judged("raise ValueError('no unit')")),
    Mistake("a verifier that takes the answer alone", TRAIN_OWN, r"own_verifier:judge\(answer\) cannot be called as \(reference, answer\)", judged("return 1.0", takes="answer")),
    Mistake("a verifier that raises at garbage alone", TRAIN_OWN, r"failed on the answer '\}\{ .*got 'raised: ValueError: invalid literal for int\(\)",
            judged("return float(answer.strip() != '' and int(answer) == int(reference))")),
    Mistake("a verifier that raises at a blank answer alone", TRAIN_OWN, r"failed on the answer ' .n' .*got 'raised: IndexError: ",
            judged("return float(answer.split()[-1] == reference)")),
    Mistake("a verifier that returns nothing", TRAIN_OWN, r"no_number: returned None, which is not a number \(own_verifier\.py:1 in judge\)", judged("pass")),
    Mistake("a verifier that returns text", TRAIN_OWN, r"no_number: returned 'right', which is not a number", judged("return 'right'")),
    Mistake("a verifier that returns no number", TRAIN_OWN, r"not_finite: returned nan .*cure: fix the verifier: the verifier returned NaN or an infinity", judged("return float('nan')")),
    Mistake("a verifier that ends its process", TRAIN_OWN, r"exited: the verifier's process ended with exit code 3", judged("import os; os._exit(3)")),
    Mistake("a verifier that hangs", f"{TRAIN_OWN} --tasks.sums.verifier_timeout_s 0.2", r"timeout: no reply within 0\.2 s of CPU time or 1\.2 s of wall-clock time \(own_verifier\.py:2 in judge\)", judged("while True: pass")),
]  # fmt: skip

NOTES = [
    Mistake("a verifier that gives half", CHECK_OWN, r"the verifier gave references and wrong answers the same reward: there is nothing to learn from", judged("return 0.5")),
    Mistake("a verifier that gives five", CHECK_OWN, r"rewards of own_verifier:judge .*reference: \d+ 5 .*wrong: \S.* 0 ", judged("return 5.0 * (answer == reference)")),
    Mistake("a verifier that punishes", CHECK_OWN, r"rewards of own_verifier:judge .*reference: \d+ 1 .*wrong: \S.* -1 ", judged("return 2.0 * (answer == reference) - 1.0")),
    Mistake("a verifier that reads only what its evaluator writes", f"{CHECK_OWN} --tasks.sums.evaluator json:dumps",
            r"garbage: .* 0 \(raised: .*own_verifier:judge failed on unevaluated texts: a fault only if json:dumps can return such texts",
            judged("import json; return float(json.loads(answer) == reference)")),
    Mistake("a large learning rate", "check large.toml --policies.qwen.learner.lr 3e-4",
            r"note: policies\.qwen\.learner\.lr = 0\.0003 is high and may ruin the model.*1e-06 is usual for all weights of 0\.2B"),
    Mistake("short answers of a released model", "check large.toml --policies.qwen.rollout.max_new_tokens 32",
            r"note: policies\.qwen\.rollout\.max_new_tokens = 32 is short for a released model"),
    Mistake("adapters merged in 16 bits", "check small.toml --policies.qwen.learner.lora.rank 4 --policies.qwen.rollout.embedded_dtype bfloat16",
            r"note: policies\.qwen\.rollout\.weights = 'files' merges the adapters into bfloat16 weights, whose rounding"),
    Mistake("inputs offloaded without a GPU", "check small.toml --policies.qwen.learner.activation_checkpointing true --policies.qwen.learner.activation_offload true",
            r'note: policies\.qwen\.learner\.activation_offload saves no memory on "cpu"'),
    Mistake("a group of one that shares", "check small.toml --policies.qwen.rollout.group_size 1",
            r"note: policies\.qwen\.rollout\.group_size = 1: the policy's own answer is compared only with what sgt takes from peers"),
    Mistake("trackers", "check small.toml", r"tracker trackio: project games tracker wandb: project mrl, files in /.*runs/small/trackers/wandb prompts",
            edit("[run]", "trackers = [{ kind = 'trackio', project = 'games' }, { kind = 'wandb', options = { mode = 'offline' } }]\n[run]")),
    Mistake("no chat template", "check small.toml", r"note: policies\.qwen\.model = 'models/qwen': no chat template; every prompt is "
            r"sent as plain text followed by a line break"),
    Mistake("a history without a template", "check small.toml --pool.train_prompts 40 --pool.held_out_prompts 8", r"note: policies\.qwen\.prompt\.history: has no effect, because the model has no chat template",
            both(edit("[run]", "[tasks.game]\nsource = 'environment'\ndataset = 'higher_lower'\noptions = { size = 60 }\n[run]"), asked('history = "sampled"', None))),
    Mistake("a template that drops reasoning", "check small.toml --pool.train_prompts 40 --pool.held_out_prompts 8", r"note: policies\.qwen\.prompt\.history = 'template': the chat template drops the reasoning",
            both(edit("[run]", "[tasks.game]\nsource = 'environment'\ndataset = 'higher_lower'\noptions = { size = 60 }\n[run]"), asked("assistant_prefill = ''", FORGETFUL))),
    Mistake("a history without episodes", "check small.toml", r"note: policies\.qwen\.prompt\.history: has no effect, because no task has episodes",
            asked('history = "template"')),
    Mistake("a history under a template that keeps all", "check small.toml --pool.train_prompts 40 --pool.held_out_prompts 8", r"note: policies\.qwen\.prompt\.history: has no effect, because the chat template keeps the reasoning",
            both(edit("[run]", "[tasks.game]\nsource = 'environment'\ndataset = 'higher_lower'\noptions = { size = 60 }\n[run]"), asked('history = "template"'))),
    Mistake("no such folder, in a check", "check small.toml --policies.qwen.model ./far/Own",
            r"qwen \./far/Own \(no such folder\).*note: policies\.qwen: the model is not here yet, and its name does not tell its size"
            r".*still needed.*policies\.qwen\.model = '\./far/Own': no such folder"),
    Mistake("no folder of models, in a check", "check small.toml --policies.qwen.model model/qwen",
            r"still needed .*policies\.qwen\.model = 'model/qwen': no such folder here, and the model model/qwen of the hub is not on this machine mrl fetch small\.toml"),
    Mistake("how many prompts there are", "check small.toml --pool.train_prompts 0 --pool.held_out_prompts 0",
            r"prompts \d+ to train on, \d+ held out"),
    Mistake("several greedy answers", "check small.toml --evaluation.samples 4 --evaluation.temperature 0",
            r"note: evaluation\.temperature 0 gives the same answer 4 times: pass@k equals pass@1"),
    Mistake("a fall of the learning rate that is none", "check small.toml",
            r"lr_schedule constant \(linear to lr_final_share 1\)"),
    Mistake("a byte order mark", "check small.toml", r"small\.toml is valid", data(codecs.BOM_UTF8 + rows(60).encode())),
    Mistake("whole numbers as references", "check small.toml", r"small\.toml is valid", data(rows(60, reference=3))),
    Mistake("fewer prompts than the pool would take", "check small.toml", r"pool\.train_prompts +0 +uses all \d+ prompts of the files"),
    Mistake("no file of prompts, in a check", "check small.toml", r"still needed before `mrl train` can start:",
            lambda folder: (folder / "sums.jsonl").unlink()),
    Mistake("no environment of vLLM, in a check", "check small.toml --policies.qwen.rollout.engine vllm",
            r"policies\.qwen\.rollout\.engine = 'vllm': the environment of vllm is missing"),
    Mistake("a tokenizer without padding", "check small.toml", r"small\.toml is valid", settings(pad_token=None)),
]  # fmt: skip

SEEN_IN_RUNS = {
    "Ctrl-C, and the hint at --resume": "tests/cli/test_conclude.py",
    "resumed with another learning rate": "tests/config/test_run_folder.py",
    "resumed with fewer steps": "tests/config/test_run_folder.py",
    "the metrics' port is busy": "tests/cli/test_main.py",
    "the disk is full in the middle of a run": "tests/processes/test_supervisor.py",
    "kill -9 of a worker or of the supervisor": "tests/system/test_training.py",
}


def write_whole(folder: Path) -> Path:
    """A model folder in which nothing is wrong."""
    write_model(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "max_position_embeddings": 512}))
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where somebody starts mrl: a configuration, two models, sixty prompts, and nothing wrong with them."""
    (tmp_path / "small.toml").write_text(CONFIG)
    (tmp_path / "large.toml").write_text(CONFIG)
    (tmp_path / "sums.jsonl").write_text(rows(60))
    for name in ("qwen", "llama"):
        write_whole(tmp_path / "models" / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("MRL_ENGINE_HOME", str(tmp_path / "engines"))
    monkeypatch.setattr("mrl.cli.check.memory_plan", lambda *_: [])
    # On a busy machine the trial of a verifier takes long enough for a line of its own.
    monkeypatch.setattr("mrl.processes.preparation.wait_notice.TELL_EVERY_S", 600.0)
    # What roles would be forks of: it would import torch, for seconds, to be ended with the mistake.
    monkeypatch.setattr("mrl.cli.train._forks", lambda *_: None)
    return tmp_path


def files_in(folder: Path) -> set[Path]:
    """All below it, with folders, but what Python compiles."""
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


@pytest.mark.parametrize(
    "mistake",
    [*TYPING, *FILES, *MODELS, *PROMPTS, *LEARNING, *REPLAYS, *TRACKERS, *VERIFIERS, *RUNS, *EVALUATIONS],
    ids=lambda one: one.name,
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    mistake: Mistake, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, what is wrong and where, no traceback, and no regular expression or words of a library."""
    mistake.prepare(place)
    before = files_in(place)
    assert main(mistake.words.split()) == mistake.code
    line = capsys.readouterr().err
    assert line.startswith("mrl: error: ")
    assert line.count("\n") == 1
    assert re.search(mistake.shown, line), line
    assert not re.search(r"\^\[|\[A-Za-z|Input should|Traceback|Errno", line), line
    assert files_in(place) == before


def test_all_mistakes_of_a_file_are_told_at_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A line each: an unknown key, which goes first, hides none of the others."""
    edit("steps = 4", 'steps = "ten"\nlearning_rate = 1e-4')(place)
    edit('model = "models/llama"', 'model = "models/llama"\nlearner = {lr = -1}')(place)
    assert main(["check", "small.toml", "--run.seed", "one"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("mrl: error: ").split("; ")[0] for line in lines] == [
        "small.toml: run.learning_rate: unknown key",
        "command line: run.seed: invalid value",
        "small.toml: run.steps: invalid value",
        "small.toml: policies.llama.learner.lr: invalid value",
    ]


TOLD_BY_CHECK = [FILES[1:], MODELS[4:-2], LEARNING, TRACKERS[:-1]]
BESIDES = [one for table in TOLD_BY_CHECK for one in table[1:-1]]


@pytest.mark.parametrize(
    "mistake",
    [
        *(pytest.param(one, id=one.name) for table in TOLD_BY_CHECK for one in (table[0], table[-1])),
        *(pytest.param(one, id=one.name, marks=pytest.mark.thorough) for one in BESIDES),
    ],
)
def test_the_check_says_the_same(mistake: Mistake, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever checks before training learns of all that."""
    mistake.prepare(place)
    assert main(["check", *mistake.words.split()[1:]]) == mistake.code
    assert re.search(mistake.shown, capsys.readouterr().err)


@pytest.mark.parametrize("mistake", NOTES, ids=lambda one: one.name)
def test_what_is_allowed_and_seldom_meant_is_said(
    mistake: Mistake, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check passes, and says it."""
    if "large.toml" in mistake.words:
        write_weights(place / "models/qwen/model.safetensors", num_elements=200_000_000)
        # Keys are fitted to memory by plans of a whole model, again and again.
        monkeypatch.setattr("mrl.cli.check.fitted_to_memory", lambda config, *_: Resolved(config, ()))
    mistake.prepare(place)
    assert main(mistake.words.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(mistake.shown.replace(" +", " ?"), out), out


@pytest.mark.parametrize(
    ("words", "needed"), [([], "--clean deletes it"), (["--resume"], "mrl stop"), (["--clean"], "mrl stop")]
)
def test_nothing_is_done_beside_a_live_run(
    words: list[str], needed: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain `mrl train` used to name two options, both of which were then refused."""
    run_exists(place)
    folder = create_run_folder(complete(load_config(place / "small.toml")).config, clean=True)
    before = files_in(place)
    release = lock_run_folder(folder)
    try:
        assert main(["train", "small.toml", *words]) == 2
    finally:
        release()
    line = capsys.readouterr().err
    assert f"runs/small: the run is still running; got 'supervisor pid {os.getpid()}'; cure: run `mrl stop " in line
    assert files_in(place) - before <= {folder.path / "lock"}


def test_a_busy_port_is_said_before_anything_is_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of the page for Prometheus."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (
            main(["train", "small.toml", "--exchange.metrics_host=127.0.0.1", f"--exchange.metrics_port={port}"]) == 2
        )
    assert "the port is already in use" in capsys.readouterr().err
    assert not (place / "runs").exists()


def test_a_folder_that_is_started_from_elsewhere_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Relative paths begin where mrl is started, not where the configuration lies."""
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    assert main(["train", "../small.toml", "--policies.qwen.model", "./models/qwen"]) == 2
    assert f"no such folder (relative to the working directory {elsewhere})" in capsys.readouterr().err


def test_defaults_follow_from_the_model(place: Path) -> None:
    """A released model learns in small steps and answers at length; adapters take larger ones; given keys stay."""
    write_weights(place / "models/qwen/model.safetensors", num_elements=200_000_000)
    text = (place / "small.toml").read_text()
    (place / "lora.toml").write_text(text.replace("[policies.llama]", "learner = {lora = {}}\n[policies.llama]"))
    (place / "given.toml").write_text(text.replace("[policies.llama]", "learner = {lr = 3e-4}\n[policies.llama]"))

    def chosen(name: str) -> list[tuple[PolicyTable, float, int]]:
        policies = complete(load_config(place / name)).config.policies
        return [(one.learner.lr, one.rollout.max_new_tokens) for one in policies.values()]  # type: ignore[misc]

    assert chosen("small.toml") == [(1e-6, 256), (3e-4, 32)], "half of a context of 512 tokens; a small model as ever"
    assert chosen("lora.toml")[0] == (1e-5, 256)
    assert chosen("given.toml")[0] == (3e-4, 256)


def test_the_check_marks_what_is_a_default(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of everything that decides what is learned."""
    assert main(["check", "small.toml", "--policies.qwen.learner.lr", "2e-4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = dict(line.strip().split(maxsplit=1) for line in lines if re.match(r" *(learner|rollout|objective)\.", line))
    assert told["learner.lr"].split() == ["0.0002", "0.0003", "*"]
    assert told["rollout.group_size"].split() == ["8", "*", "8", "*"]
    assert told["objective.clip_high"].split() == ["0.2", "*", "0.2", "*"], "what the method fills in"


@pytest.mark.parametrize(
    ("name", "eos", "opening", "chats"),
    [("Qwen3-1.7B-Base", "<|endoftext|>", "<|im_start|>", False), ("Qwen3-1.7B", "<|im_end|>", "<|im_start|>", True),
     ("Llama-3.2-1B", "<|end_of_text|>", "<|start_header_id|>", False), ("Mistral-7B-Instruct-v0.3", "</s>", "", True),
     ("gemma-3-1b-it", "<eos>", "", True), ("gemma-3-1b-pt", "<eos>", "<start_of_turn>", False)],
)  # fmt: skip
def test_models_that_chat_are_told_from_those_that_do_not(
    name: str, eos: str, opening: str, chats: bool, tmp_path: Path
) -> None:
    """A base model has the tokens of its family, and ends its texts with another one."""
    known = {"eos_token": eos, "added_tokens_decoder": {"7": {"content": opening}} if opening else {}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(known))
    assert bool(chat_sign(tmp_path, f"maker/{name}")) == chats


def test_reading_a_folder_loads_no_heavy_library(place: Path) -> None:
    """A check of folders takes no seconds."""
    import subprocess

    code = (
        "import sys; from pathlib import Path; from mrl.processes.preparation.model_folder import check_model_folder;"
        "check_model_folder(Path('models/qwen'), key='k'); sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, cwd=place).returncode == 0


def test_a_whole_folder_passes(place: Path) -> None:
    """So that the rows above are about what they change."""
    check_model_folder(place / "models" / "qwen", key="policies.qwen.model")


def test_a_teacher_may_have_what_no_learner_packs(place: Path) -> None:
    """And what was quantized, of which transformers or a server makes numbers; `mrl eval` measures all of these.

    The embedded engine keeps no states. A kind of model that often has such layers may be one without them.
    """
    folder = place / "models" / "qwen"
    described(model_type="qwen3_next")(place)
    check_model_folder(folder, key="policies.qwen.model", is_trained=False)
    with pytest.raises(ModelFolderError, match=r"the embedded engine cannot run.* state.*got .*'qwen3_next'.*\"vllm\""):
        check_model_folder(folder, key="policies.qwen.model", is_trained=False, is_embedded=True)
    described(model_type="granitemoehybrid", layer_types=["attention", "attention"])(place)
    check_model_folder(folder, key="policies.qwen.model")
    check_model_folder(folder, key="policies.qwen.model", is_trained=False, is_embedded=True)
    described(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})(place)
    check_model_folder(folder, key="policies.qwen.model", is_trained=False)


def test_every_kind_with_states_that_transformers_has_is_known() -> None:
    """A new release brings new ones."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = set()
    has_none = (AttributeError, TypeError, ValueError, StrictDataclassError)
    """What kinds raise that have no configuration without words of its own."""
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            layers = getattr(AutoConfig.for_model(kind).get_text_config(), "layer_types", None) or ()
        except has_none:
            continue
        if {"linear_attention", "hybrid", "conv"} & set(layers):
            found.add(kind)
    assert sorted(found - STATEFUL) == []


@pytest.mark.parametrize(
    ("rope", "longest"),
    [({"type": "longrope"}, 128), ({"type": "yarn"}, 512), ({"type": "yarn", "short_factor": [1.0]}, 128)],
)
def test_a_model_with_frequencies_for_long_rows_reads_no_longer_ones(
    place: Path, rope: dict[str, object], longest: int
) -> None:
    """As a server of it is told. Of Phi 3 with factors for short rows "yarn" is another word for "longrope"."""
    described(original_max_position_embeddings=128, rope_scaling={"factor": 4.0} | rope)(place)
    assert context_tokens(place / "models" / "qwen") == longest


def test_mistakes_in_runs_have_their_tests() -> None:
    """Every file that the table names is there."""
    assert [file for file in SEEN_IN_RUNS.values() if not (ROOT / file).is_file()] == []
