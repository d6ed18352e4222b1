"""Weights in and out of Hugging Face folders, by the shard map alone: each rank reads only the slices that it holds,
and an export gathers the pieces of each tensor at the one rank that writes it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hybridflow.errors import ConfigError
from workers.megatron.hf_config import INDEX_FILE, WEIGHTS_FILE, check_complete
from workers.resharding.boxes import Piece, ShardMap

FILE_BYTES = 4 << 30
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def stored_tensors(folder: str | Path) -> dict[str, Path]:
    """Which file of a model folder holds each tensor."""
    found = {}
    for file in check_complete(folder):
        with safe_open(file, framework="pt") as opened:
            found.update(dict.fromkeys(opened.keys(), file))
    return found


@torch.no_grad()
def read(folder: str | Path, pieces: ShardMap, parameters: Mapping[str, Tensor]) -> None:
    """Copy the pieces out of a folder's safetensors into the parameters; rows that no piece names become 0.

    Raises:
        ConfigError: a tensor is missing, or is smaller than config.json says.
    """
    files = stored_tensors(folder)
    missing = sorted({piece.box.tensor for piece in pieces} - files.keys())
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ConfigError(
            f"the weights in {str(folder)!r} lack {', '.join(missing[:3])}{more}",
            hint="the folder's config.json and its safetensors files belong to different models",
            where="model.path",
        )
    by_file: dict[Path, list[Piece]] = defaultdict(list)
    covered: dict[str, int] = defaultdict(int)
    for piece in pieces:
        by_file[files[piece.box.tensor]].append(piece)
        covered[piece.parameter] += piece.box.numel
    for name, parameter in parameters.items():
        if covered[name] < parameter.numel():
            parameter.zero_()
    for file, wanted in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for piece in wanted:
                stored = opened.get_slice(piece.box.tensor)
                _check_shape(stored.get_shape(), piece, folder)
                parameters[piece.parameter][piece.slices].copy_(stored[piece.box.slices])


def _check_shape(shape: list[int], piece: Piece, folder: str | Path) -> None:
    if len(shape) != len(piece.box.stop) or any(have < need for have, need in zip(shape, piece.box.stop, strict=True)):
        raise ConfigError(
            f"{piece.box.tensor} in {str(folder)!r} has shape {shape}, config.json asks for {list(piece.box.stop)}",
            hint="the folder's config.json and its safetensors files belong to different models",
            where="model.path",
        )


@torch.no_grad()
def gather(pieces: ShardMap, local: Mapping[str, Tensor], *, spread: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Put whole tensors together from the pieces of all ranks. Collective over the world: exhaust it on every rank.

    Args:
        pieces: this rank's; replicas (other DP ranks) give an empty map and only take part.
        local: the tensors that the pieces lie in.
        spread: write each tensor at the lowest rank that holds a piece of it (one writer per pipeline stage), instead
            of all at rank 0.

    Yields:
        (tensor name, whole tensor on the CPU), on the rank that writes it.
    """
    maps: list[ShardMap] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(maps, pieces)
    me = dist.get_rank()
    for name, owned in _by_tensor(maps).items():
        writer = min(rank for rank, _ in owned) if spread else 0
        whole = None
        if me == writer:
            shape = [max(sizes) for sizes in zip(*(piece.box.stop for _, piece in owned), strict=True)]
            whole = torch.empty(shape, dtype=_dtype(local, me, owned))
        for rank, piece in owned:
            part = _transfer(local, piece, rank, writer, me)
            if whole is not None and part is not None:
                whole[piece.box.slices] = part.cpu()
        if whole is not None:
            yield name, whole


def _by_tensor(maps: list[ShardMap]) -> dict[str, list[tuple[int, Piece]]]:
    """Owners of each tensor's boxes; of equal boxes (replicated or tied) the lowest rank's."""
    owners: dict[str, dict[tuple, tuple[int, Piece]]] = defaultdict(dict)
    for rank, pieces in enumerate(maps):
        for piece in pieces:
            owners[piece.box.tensor].setdefault((piece.box.start, piece.box.stop), (rank, piece))
    return {name: list(boxes.values()) for name, boxes in owners.items()}


def _dtype(local: Mapping[str, Tensor], me: int, owned: list[tuple[int, Piece]]) -> torch.dtype:
    """All tensors of a model have one type; a rank that holds nothing of this one learns it from its others."""
    mine = [piece.parameter for rank, piece in owned if rank == me]
    return (local[mine[0]] if mine else next(iter(local.values()))).dtype


def _transfer(local: Mapping[str, Tensor], piece: Piece, rank: int, writer: int, me: int) -> Tensor | None:
    if me == rank:
        part = local[piece.parameter][piece.slices].contiguous()
        if rank == writer:
            return part
        dist.send(part, writer)
    elif me == writer:
        some = next(iter(local.values()))
        part = torch.empty(piece.box.shape, dtype=some.dtype, device=some.device)
        dist.recv(part, rank)
        return part
    return None


def export(pieces: ShardMap, local: Mapping[str, Tensor], source: str | Path, folder: str | Path) -> None:
    """Write a Hugging Face folder: weights, and config and tokenizer files as in ``source``. Collective.

    Written aside and put in place by one rename, so that ``folder`` is whole whenever it exists.
    """
    source, folder = Path(source), Path(folder)
    aside = folder.with_name(f".{folder.name}.partial")
    me = dist.get_rank()
    if me == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    dist.barrier()
    written = _write_parts(gather(pieces, local, spread=True), aside)
    everyone: list[list[tuple[str, list[str], int]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, written)
    if me == 0:
        _name_parts([part for parts in everyone for part in parts], aside)
        _copy_companions(source, aside, str(next(iter(local.values())).dtype).removeprefix("torch."))
        _replace(folder, aside)
    dist.barrier()


def _write_parts(tensors: Iterator[tuple[str, Tensor]], aside: Path) -> list[tuple[str, list[str], int]]:
    """Write this rank's tensors in files of at most ``FILE_BYTES`` or one tensor: (file, tensor names, bytes)."""
    written: list[tuple[str, list[str], int]] = []
    held: dict[str, Tensor] = {}

    def flush() -> None:
        if held:
            file = f"part-{dist.get_rank():05d}-{len(written):05d}.safetensors"
            save_file(held, aside / file, metadata={"format": "pt"})
            written.append((file, list(held), sum(tensor.nbytes for tensor in held.values())))
            held.clear()

    for name, tensor in tensors:
        if sum(other.nbytes for other in held.values()) + tensor.nbytes > FILE_BYTES:
            flush()
        held[name] = tensor
    flush()
    return written


def _name_parts(parts: list[tuple[str, list[str], int]], aside: Path) -> None:
    if len(parts) == 1:
        (aside / parts[0][0]).rename(aside / WEIGHTS_FILE)
        return
    weight_map = {}
    for number, (file, names, _) in enumerate(parts, start=1):
        final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (aside / file).rename(aside / final)
        weight_map.update(dict.fromkeys(names, final))
    index = {"metadata": {"total_size": sum(size for _, _, size in parts)}, "weight_map": weight_map}
    (aside / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True))


def _copy_companions(source: Path, aside: Path, dtype: str) -> None:
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.startswith(".") and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, aside / file.name)
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    (aside / "config.json").write_text(json.dumps(config, indent=2))


def _replace(folder: Path, aside: Path) -> None:
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(aside, folder)
    shutil.rmtree(old, ignore_errors=True)
