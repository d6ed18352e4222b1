"""Every error of HybridFlow under one name (the classes live in ``placement.errors``, the lowest package)."""

from placement.errors import ConfigError, HybridFlowError, NumericsError, ResourceError, WorkerError

__all__ = ["ConfigError", "HybridFlowError", "NumericsError", "ResourceError", "WorkerError"]
