"""Decides what the config leaves open; adjusts (a line of the run card for each) or refuses what cannot be.

The rules are those of the table in the tutorial's specification; each lives in a file by subject and is listed here.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridflow.config import layout_rules, model_rules, training_rules
from hybridflow.config.draft import Adjustment, Draft
from hybridflow.config.model_folder import ModelInfo
from hybridflow.config.problems import InvalidConfigError
from hybridflow.config.schema import Config

RULES: tuple[Callable[[Draft], None], ...] = (
    layout_rules.launcher,
    model_rules.run_folder,
    model_rules.model,
    model_rules.lora,
    layout_rules.device_map,
    layout_rules.layouts,
    layout_rules.model_fits,
    model_rules.algorithm,
    model_rules.reward,
    model_rules.data,
    training_rules.run_length,
    training_rules.batches,
    training_rules.lengths,
    training_rules.clipping,
    training_rules.generation,
    model_rules.wandb,
    model_rules.without_effect,
)


def resolve_draft(draft: Draft) -> Draft:
    """Apply every rule; the draft then holds the config, the adjustments and all problems."""
    for rule in RULES:
        rule(draft)
    return draft


def resolve(
    config: Config,
    devices: int | None,
    device_type: str | None,
    model_info: ModelInfo | None,
    *,
    critic_info: ModelInfo | None = None,
    given: frozenset[str] | None = None,
    memory_gb: float | None = None,
) -> tuple[Config, list[Adjustment]]:
    """The config with nothing left open, and what was changed.

    Args:
        devices: devices of the run's machines (``launcher.devices`` overrules it).
        device_type: "cpu" or "cuda". Either may be None where only a cluster will tell; resolve again then.
        model_info: facts of ``model.path``; None skips the checks that need them.
        critic_info: of ``critic.path``, if it is another folder.
        given: keys that the user set; a default that gives way needs no line. None: every change is said.
        memory_gb: memory of one GPU, for advice.

    Raises:
        InvalidConfigError: with every problem.
    """
    draft = resolve_draft(Draft(config, devices, device_type, model_info, critic_info, given, memory_gb))
    if draft.problems:
        raise InvalidConfigError(draft.problems)
    return draft.config, draft.adjustments
