"""One TRL process of the training benchmark. Runs in TRL's own environment and imports nothing of mrl.

    python -m bench_training.trl_side JOB.json

TRL is set up as somebody would who knows it and has a CPU: float32, no gradient checkpointing, a key-value cache, no KL
term and so no reference model, one iteration per batch and so no second forward, one `generate` for all answers of a
step, passes of `rows_per_pass` rows, nothing logged or saved. The process prints a line of JSON when training begins
and at the end of each step, with the CPU seconds spent until then.

With `rollouts` it samples nothing and takes its steps on the answers of that file. Its results go to
`result.safetensors` in the output folder: [A] advantages, [T] log-probabilities of all answer tokens under the initial
weights, both in the order of the file, and the parameters afterwards.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench_training.verdict import is_right


@dataclass(frozen=True)
class Job:
    """The work of one TRL process, as `trl_run.write_job` writes it."""

    model: str
    prompts: str
    output: str
    steps: int
    prompts_per_step: int
    group_size: int
    limit_tokens: int
    lr: float
    rows_per_pass: int
    rollouts: str = ""


class MeasuredTrainer(GRPOTrainer):
    """Trainer that counts CPU seconds from prompts to scored answers, and answer tokens."""

    rollout_cpu_s = 0.0
    tokens = 0

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        began_s = time.process_time()
        outputs: dict[str, Any] = super()._generate_and_score_completions(inputs)
        self.rollout_cpu_s += time.process_time() - began_s
        self.tokens += int(outputs["completion_mask"].sum())
        return outputs


class GivenTrainer(MeasuredTrainer):
    """Trainer that takes given answers, and keeps their advantages and log-probabilities before the first update."""

    found: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        outputs = super()._generate_and_score_completions(inputs)
        ids = torch.cat([outputs["prompt_ids"], outputs["completion_ids"]], dim=1)
        mask = torch.cat([outputs["prompt_mask"], outputs["completion_mask"]], dim=1)
        answers = outputs["completion_mask"].bool()
        with torch.no_grad():
            logprobs, *_ = self._get_per_token_logps_and_entropies(self.model, ids, mask, answers.shape[1], 16)
        self.found = {"advantages": outputs["advantages"].clone(), "logprobs": logprobs[answers]}
        return outputs


class Teller(TrainerCallback):
    """Callback that prints the CPU seconds and tokens spent so far."""

    trainer: MeasuredTrainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Print a line when the model is loaded and nothing is sampled."""
        self._tell(step=0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Print a line when the parameters have been updated."""
        self._tell(step=state.global_step)

    def _tell(self, step: int) -> None:
        spent = {"step": step, "cpu_s": time.process_time()}
        print(
            json.dumps(spent | {"rollout_cpu_s": self.trainer.rollout_cpu_s, "tokens": self.trainer.tokens}), flush=True
        )


def given(path: str) -> Any:
    """Make a rollout function that returns the answers of a file: lists of ids, in the order of the prompts."""
    rollouts = json.loads(Path(path).read_text())
    return lambda prompts, trainer: {name: rollouts[name] for name in ("prompt_ids", "completion_ids", "logprobs")}


def config(job: Job) -> GRPOConfig:
    """Settings of TRL's trainer; those not named are off or have no effect on a CPU."""
    answers = job.prompts_per_step * job.group_size
    return GRPOConfig(
        output_dir=job.output,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=job.steps,
        per_device_train_batch_size=job.rows_per_pass,
        gradient_accumulation_steps=answers // job.rows_per_pass,
        num_generations=job.group_size,
        max_completion_length=job.limit_tokens,
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="grpo",
        scale_rewards="none",
        learning_rate=job.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=1,
    )


def main(job: Job) -> None:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(job.model, padding_side="left")
    rows = [json.loads(line) for line in Path(job.prompts).read_text().splitlines()]
    teller = Teller()
    kind = GivenTrainer if job.rollouts else MeasuredTrainer
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=is_right,
        args=config(job),
        train_dataset=Dataset.from_list(rows),
        callbacks=[teller],
        rollout_func=given(job.rollouts) if job.rollouts else None,
    )
    teller.trainer = trainer
    trainer.train()
    if job.rollouts:
        parameters = {f"parameters.{name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
        save_file(trainer.found | parameters, f"{job.output}/result.safetensors")


if __name__ == "__main__":
    main(Job(**json.loads(Path(sys.argv[1]).read_text())))
