"""KL divergence of the policy from the reference: per-token estimators, and controllers of its coefficient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hybridflow.config.schema import KLControlConfig
from hybridflow.errors import ConfigError, NumericsError

LOG_RATIO_LIMIT = 20.0  # exp(20) = 5e8 is far from overflow, and no policy that still learns is that far away
K3_LIMIT = 10.0

_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}
ESTIMATORS = ("k1", "abs", "k2", "k3")


def kl_estimate(log_probs: np.ndarray, reference_log_probs: np.ndarray, kind: str) -> np.ndarray:
    """Estimate KL(policy || reference) at each token, from the token that the policy drew.

    With x = log_probs - reference_log_probs (Schulman, "Approximating KL divergence", 2020):

        k1 ("kl")          x                 unbiased; a single token's may be negative
        abs                |x|               no KL, but a symmetric distance
        k2 ("mse")         x^2 / 2           biased, never negative
        k3 ("low_var_kl")  exp(-x) - 1 + x   unbiased, never negative, heavy-tailed: clamped at 10

    Args:
        log_probs, reference_log_probs: (T,), of the same tokens, in this order.
        kind: one of the names above.

    Returns:
        (T,), float32.
    """
    x = log_probs.astype(np.float64) - reference_log_probs.astype(np.float64)
    kind = _ALIASES.get(kind, kind)
    if kind == "k1":
        estimate = x
    elif kind == "abs":
        estimate = np.abs(x)
    elif kind == "k2":
        estimate = 0.5 * x * x
    elif kind == "k3":
        x = np.clip(x, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        estimate = np.minimum(np.expm1(-x) + x, K3_LIMIT)
    else:
        raise ConfigError(
            f"there is no KL estimator {kind!r}",
            hint=f"known: {', '.join((*ESTIMATORS, *_ALIASES))}",
            where="algorithm.kl_penalty",
        )
    return estimate.astype(np.float32)


class KLController(Protocol):
    """Sets the coefficient of the KL penalty, and changes it after each step if it adapts."""

    @property
    def coef(self) -> float: ...
    def update(self, kl: float, samples: int) -> None: ...
    def state_dict(self) -> dict[str, float]: ...
    def load_state_dict(self, state: dict[str, float]) -> None: ...


@dataclass
class FixedKL:
    """The coefficient stays what the config says; a resumed run takes the config's, too."""

    coef: float

    def update(self, kl: float, samples: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing was adapted, so there is nothing to restore."""


@dataclass
class AdaptiveKL:
    """Steers the measured KL towards a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    error = clip(kl / target - 1, -0.2, 0.2);   coef <- coef * (1 + error * samples / horizon)

    Args:
        coef: at the start.
        target: KL per token, in nats, by the estimator that the penalty uses.
        horizon: samples in which an error of 1 would change the coefficient by its own size.
    """

    coef: float
    target: float
    horizon: float

    def update(self, kl: float, samples: int) -> None:
        """Args: ``kl``: mean over all response tokens of the step; ``samples``: sequences in the step."""
        if not np.isfinite(kl):
            raise NumericsError(f"the KL from the reference is {kl}", hint="did every sample fail?", where="kl")
        error = float(np.clip(kl / self.target - 1.0, -0.2, 0.2))
        self.coef *= 1.0 + error * samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = state["coef"]


def make_kl_controller(config: KLControlConfig) -> KLController:
    """The controller that ``algorithm.kl_ctrl`` asks for."""
    if config.type == "fixed":
        return FixedKL(config.kl_coef)
    if config.type == "adaptive":
        return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
    raise ConfigError(
        f"there is no KL controller {config.type!r}", hint="use fixed or adaptive", where="algorithm.kl_ctrl.type"
    )
