"""Everything of vLLM's insides that we touch, and nothing else: a contract test pins each by its value.

Written for vLLM 0.32 (CPU) and 0.26 (CUDA). Import this module before vllm: it sets environment variables that vLLM
reads when it is imported. What is touched, and why:

* in-process engine: weights are copied straight into its parameters, and no second process has to be kept alive;
* plain weights on CPU: oneDNN and AMX repack a linear layer's weight into an opaque buffer and leave an empty
  parameter behind, so that a later update would change nothing. Both are switched off;
* the executor: the engine joins the process group that already exists, and gives its shared memory a name of its own
  (vLLM's external launcher gives every engine of a host the same one, and the second one to start dies);
* the KV cache's memory on CPU, where vLLM's sleep mode frees nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import uuid
import warnings
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Two harmless remarks of the import, which every user would read and wonder about.
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message="`torch.distributed.reduce_op` is deprecated", category=FutureWarning)

import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
from vllm import LLMEngine, SamplingParams, _custom_ops  # noqa: E402
from vllm.distributed.parallel_state import destroy_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402
from vllm.model_executor.layers import utils as _layer_utils  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402
from vllm.sampling_params import RequestOutputKind  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher  # noqa: E402

from workers.resharding.segments import segment_name, sweep  # noqa: E402

__all__ = ["LLMEngine", "LoRARequest", "RequestOutputKind", "SamplingParams"]


class GroupExecutor(ExecutorWithExternalLauncher):
    """Runs the worker in this process, as a rank of the ``torch.distributed`` group that exists: opens no port."""

    def _distributed_args(self) -> tuple[str, int, int]:
        rank = dist.get_rank()
        idents = [segment_name(f"vllm-{uuid.uuid4().hex[:8]}")]
        dist.broadcast_object_list(idents, src=0)
        self.shared_memory_ident = idents[0]
        # Never opened, for the group exists; on CPU the last part names vLLM's shared memory (VLLM_DIST_IDENT).
        return f"existing:{idents[0]}", rank, 0


def is_cpu() -> bool:
    return current_platform.is_cpu()


def supported_head_sizes() -> list[int]:
    """Sizes of an attention head that vLLM's CPU kernels take; it fails deep within its start on others."""
    return CPUAttentionBackend.get_supported_head_sizes()


def start(arguments: dict[str, Any], *, tensor_parallel_size: int) -> LLMEngine:
    """Build an engine in this process, as one rank of the existing group of ``tensor_parallel_size`` ranks."""
    if is_cpu():
        _keep_plain_weights()
        # Compiling a few sampler helpers would take 18 s, and not make the small models that run on CPU faster.
        torch._dynamo.config.disable = True
    config = EngineArgs(
        **arguments, tensor_parallel_size=tensor_parallel_size, distributed_executor_backend="external_launcher"
    ).create_engine_config()
    sweep()
    engine = LLMEngine(config, GroupExecutor, log_stats=False, multiprocess_mode=False)
    dist.barrier()  # all ranks have mapped the shared memory: its names can go, so nothing stays after a crash
    for path in Path("/dev/shm").glob(f"{engine.model_executor.shared_memory_ident}-*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return engine


def stop(engine: LLMEngine) -> None:
    """End the engine and its own groups. The default process group stays: vLLM's own way would destroy it too."""
    client = engine.engine_core
    client._finalizer.detach()
    client.engine_core.model_executor.shutdown()
    client.engine_core.scheduler.shutdown()
    destroy_model_parallel()
    gc.unfreeze()  # vLLM froze what it made at start; the weights could not be collected


def _keep_plain_weights() -> None:
    _custom_ops._supports_onednn = False
    _layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def _runner(engine: LLMEngine) -> Any:
    return engine.model_executor.driver_worker.worker.model_runner


def live_parameters(engine: LLMEngine) -> dict[str, torch.Tensor]:
    """The engine's own tensors by vLLM's names: what is copied into them is what it generates with."""
    return {name: parameter.data for name, parameter in _runner(engine).model.named_parameters()}


def kv_storages(engine: LLMEngine) -> list[torch.UntypedStorage]:
    """The storages behind the KV cache (on CPU the layers share one), each once."""
    unique = {cache.untyped_storage().data_ptr(): cache.untyped_storage() for cache in _runner(engine).kv_caches}
    return list(unique.values())


def discard_kv_pages(engine: LLMEngine) -> None:
    """On CPU: give the pages of the KV cache back to the system. They read as zeros, and come back when written to."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for storage in kv_storages(engine):
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (storage.data_ptr() + storage.nbytes() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        if size > 0 and madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise cannot free the KV cache")
