"""A LoRA adapter as a folder in PEFT's format, which vLLM (and anyone else) loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_adapter(
    folder: str | Path, tensors: Mapping[str, tuple[Tensor, Tensor]], *, rank: int, alpha: float, base: str = ""
) -> str:
    """Write an adapter; returns the folder.

    Args:
        tensors: for each module by its Hugging Face name ("model.layers.0.self_attn.q_proj") the matrices A (shape:
            (rank, inputs)) and B (shape: (outputs, rank)); its output gains ``alpha / rank * B @ A @ x``.
        base: the base model's folder, for the reader's information.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {}
    for module, (a, b) in tensors.items():
        for name, matrix in (("lora_A", a), ("lora_B", b)):
            weights[f"base_model.model.{module}.{name}.weight"] = matrix.detach().cpu().contiguous().clone()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in tensors}),
        "bias": "none",
        "base_model_name_or_path": base,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return str(folder)
