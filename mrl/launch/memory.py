"""A rough estimate of the memory that a plan needs, before anything is started."""

import math
import re
from pathlib import Path

from mrl.config.policy_tables import MakeTable, PolicyTable
from mrl.launch.plan import ProcessSpec

MIB = 1024 * 1024
DAEMON_MIB = 60.0
TORCH_MIB = 350.0
"""Allowance for a process that has imported torch and transformers and shares their pages with others."""
FLOAT_BYTES = 4
ADAMW_COPIES = 4
"""Parameters, gradients and two moments."""


def num_parameters(policy: PolicyTable) -> int:
    """Parameters of a policy: from its recipe, or from the size of its weights at two bytes each; 0 when unknown.

    Before the weights are there, the name of their source says it ("Qwen/Qwen3-1.7B").
    """
    if policy.make is not None:
        return _of_recipe(policy.make)
    files = list(Path(policy.model).glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) // 2 if files else _named(policy.source)


def estimate_mib(spec: ProcessSpec, policy: PolicyTable | None) -> float:
    """Main memory of one process of the plan in MiB; device memory counts where the policy is on the CPU."""
    if policy is None:
        return TORCH_MIB if spec.role == "evaluator" else DAEMON_MIB
    parameters = num_parameters(policy)
    if spec.role == "learner":
        ranks = policy.learner.processes
        copies = ADAMW_COPIES + bool(policy.objective.kl_coefficient)  # the policy at the start of the run
        # Before the parameters are shared out, every rank reads them whole.
        held = max(copies / policy.learner.num_shards, 1.0) * FLOAT_BYTES * parameters / MIB
        return DAEMON_MIB + ranks * (TORCH_MIB + held + _activations_mib(policy))
    return TORCH_MIB + FLOAT_BYTES * parameters / MIB


def _activations_mib(policy: PolicyTable) -> float:
    """Activations of one microbatch: 34 bytes per token, layer and unit at 16 bits (arXiv 2205.05198), twice at 32."""
    if policy.make is None:
        hidden, layers = math.sqrt(num_parameters(policy) / 12 / 24), 24  # a middling transformer of that size
    else:
        hidden, layers = float(policy.make.hidden_size), policy.make.num_layers
    return 34 * FLOAT_BYTES / 2 * policy.learner.microbatch_tokens * hidden * layers / MIB


def _named(source: str) -> int:
    found = re.search(r"(\d+(?:\.\d+)?)B\b", source)
    return int(float(found[1]) * 1e9) if found else 0


def _of_recipe(make: MakeTable) -> int:
    return make.hidden_size * (make.vocab_size + 16 * make.hidden_size * make.num_layers)
