"""Megatron-Core 0.16 on a machine without CUDA: an import hook that points ``torch.cuda.*`` at ``torch.cpu.*``.

Megatron-Core names CUDA in a few dozen places (current device, streams, RNG), while everything it computes and every
collective it uses also exists on CPU with gloo. So its source is rewritten while it is imported, by the rules below,
and nothing is patched afterwards. With CUDA the hook is not installed.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
import sys
import warnings
from types import CodeType

import torch

_RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # Device handles: torch.cpu has the same accessors, and its current_device() is "cpu".
        (r"torch\.cuda\.(current_device|synchronize|Stream|current_stream|stream|Event)\b", r"torch.cpu.\1"),
        (r"torch\.cuda\.default_stream\(\)", r"torch.cpu.current_stream()"),
        (r"""f(['"])cuda:\{torch\.cpu\.current_device\(\)\}\1""", r"'cpu'"),
        (r"(?<![\w./])(['\"])cuda\1", r"\1cpu\1"),
        # Names of tensor types, which the optimizers compare as strings.
        (r"'torch\.cuda\.(Float|Half|BFloat16)Tensor", r"'torch.\1Tensor"),
        (r"\.cuda\((?:non_blocking=True|torch\.cpu\.current_device\(\))?\)", r".cpu()"),
        (r"torch\.cuda\.(get_rng_state|manual_seed)\(", r"torch.\1("),
        # NCCL's argument of barrier, and pinned memory, need an accelerator.
        (r"device_ids=\[torch\.cpu\.current_device\(\)\],?", r""),
        (r",\s*pin_memory=True", r""),
        (r"torch\.cuda\.empty_cache\(\)", r"None"),
        # Optional packages that we do not use through Megatron-Core, and fusing by torch.compile: naming the compiler
        # already imports all of it, which is half of the start-up time.
        (
            r"(?m)^    (import wandb|from torch\.utils\.tensorboard import SummaryWriter)(?! as).*$",
            r"    raise ImportError",
        ),
        (r"jit_fuser = torch\.compile", r"jit_fuser = noop_decorator"),
    )
]
# The RNG module keeps one state per device; on CPU there is one state, and recomputation must not find it "changed".
_RNG_MODULE = "megatron.core.tensor_parallel.random"
_RNG_ANCHOR = "# RNG tracker object.\n_CUDA_RNG_STATE_TRACKER = None"
_RNG_FUNCTIONS = """
def _get_cuda_rng_state(device="cpu", clone=False, graph_safe=False):
    return torch.get_rng_state()


def _set_cuda_rng_state(new_state, device=-1, graph_safe=False):
    torch.set_rng_state(new_state)


"""


def rewrite(name: str, source: str) -> str:
    """The source of Megatron-Core's module ``name`` for a machine without CUDA."""
    for pattern, replacement in _RULES:
        source = pattern.sub(replacement, source)
    if name == _RNG_MODULE:
        if _RNG_ANCHOR not in source:
            raise ImportError(f"{_RNG_MODULE} is not the version that the CPU shim knows (megatron-core 0.16)")
        source = source.replace(_RNG_ANCHOR, _RNG_FUNCTIONS + _RNG_ANCHOR, 1)
        source = source.replace("if not torch.all(cpu_rng_state == torch.get_rng_state()).item():", "if False:")
    return source


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compile the rewritten source; never read or write a cached .pyc, which would hold the original."""
        path = self.get_filename(fullname)
        source = importlib.util.decode_source(self.get_data(path))
        return self.source_to_code(rewrite(fullname, source).encode(), path)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if not name.startswith("megatron.core"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Prepare this process for ``import megatron.core``; with CUDA, or when called again, it only quiets warnings."""
    # Said by torch 2.13 at every collective that Megatron-Core calls by its old name.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    if torch.cuda.is_available() or _Finder in sys.meta_path:
        return
    if "megatron.core" in sys.modules:
        raise ImportError("megatron.core was imported before workers.megatron: it cannot run without CUDA then")
    torch.cpu.Stream.record_event = lambda self, event=None: event or torch.cpu.Event()  # torch's own returns None
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", message=r".*(Transformer Engine|Apex|transformer_engine|apex).*")
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
