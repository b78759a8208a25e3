"""Digests of the adapters that a vLLM worker computes with; seen in 0.32 on a CPU, read in 0.33."""

import json
from pathlib import Path
from typing import Any

import torch
from broadcast_member import digest  # type: ignore[import-not-found]
from safetensors.torch import load_file


def held_adapters(manager: Any, folder: Path) -> dict[str, str]:
    """Name of each tensor in `folder` -> its digest, if vLLM's kernels have its numbers, else that of their numbers.

    vLLM rounds to its own number format, and multiplies B by alpha / rank when it loads. Empty unless exactly one
    adapter is active.
    """
    active = [index for index, adapter_id in enumerate(manager.lora_index_to_id) if adapter_id is not None]
    if len(active) != 1:
        return {}
    described = json.loads((folder / "adapter_config.json").read_text())
    tensors, found = load_file(folder / "adapter_model.safetensors"), {}
    for name, layer in manager.modules.items():
        for number, part in enumerate(manager.packed_modules.get(name, [name])):
            for factor, stacked in (("lora_A", layer.lora_a_stacked), ("lora_B", layer.lora_b_stacked)):
                tensor = tensors.get(f"base_model.model.{part}.{factor}.weight")
                if tensor is None:
                    continue
                rows, columns = tensor.shape
                held = stacked[number][active[0], 0, :rows, :columns].cpu().contiguous()
                scale = described["lora_alpha"] / described["r"] if factor == "lora_B" else 1
                is_same = torch.equal(held, tensor.to(held.dtype) * scale)
                found[f"base_model.model.{part}.{factor}.weight"] = digest(tensor if is_same else held)
    return found
