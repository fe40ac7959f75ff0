"""Writes the policy as a Hugging Face folder that any tool loads.

Weights in the compute dtype, one safetensors file, beside a copy of everything in the source folder that is not
a weight (configuration, tokenizer, chat template). Called by the learner process at the end of a run and by
`asyncrl.learner.sft`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from asyncrl.learner.update import Trainer

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.index.json")


def export(trainer: Trainer, source: Path, target: Path) -> None:
    """Writes `target`, replacing what is there only when the new folder is complete. Collective; rank 0 writes.

    Args:
        trainer: whose policy is written.
        source: Hugging Face folder that the policy was loaded from.
        target: folder to write.
    """
    first = trainer.ranks.rank == 0
    held = {name: tensor.to("cpu", copy=True) for name, tensor in trainer.weights() if first}
    if not first:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (target.with_name(target.name + suffix) for suffix in (".tmp", ".old"))
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    shutil.copytree(source, fresh, ignore=lambda folder, names: _skipped(Path(folder), names))
    save_file(held, fresh / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((fresh / "config.json").read_text())
    settings.pop("torch_dtype", None)
    settings["dtype"] = trainer.config.model.dtype
    (fresh / "config.json").write_text(json.dumps(settings, indent=2) + "\n")
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _skipped(folder: Path, names: list[str]) -> set[str]:
    """Weights, subfolders and hidden files are not copied."""
    weights = shutil.ignore_patterns(*WEIGHT_FILES)(str(folder), names)
    return set(weights) | {name for name in names if (folder / name).is_dir() or name.startswith(".")}
