"""The training engine on Megatron-Core. Importing anything below prepares Megatron-Core for a machine without CUDA."""

from workers.megatron import shim

shim.install()
