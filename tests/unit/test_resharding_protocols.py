"""The protocols that need no Ray, end to end in one process: Megatron's layouts in, a vLLM rank's parameters out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hybridflow.errors import ConfigError, NumericsError, ResourceError, WorkerError
from workers.resharding import segments, shared_memory
from workers.resharding.boxes import Box, Piece
from workers.resharding.planner import plan
from workers.resharding.protocol import Channel, ReshardingProtocol, choose_resharding, register_resharding
from workers.resharding.publish import Publisher
from workers.resharding.receive import Receiver


def cut(parts: int, axis: int, size: int = 8) -> list[list[Piece]]:
    maps = []
    for part in range(parts):
        start, stop = [0, 0], [size, size]
        start[axis], stop[axis] = part * size // parts, (part + 1) * size // parts
        maps.append([Piece(Box("w", tuple(start), tuple(stop)), "local", (0, 0))])
    return maps


def send(channel: Channel, whole: torch.Tensor, *, sources: int, targets: int, dtype: torch.dtype) -> list:
    made = plan(cut(sources, 0), cut(targets, 1))
    publishers = [Publisher(channel, share) for share in made.shares]
    receivers = [Receiver(channel, intake) for intake in made.intakes]
    got = [{"local": torch.zeros(8, 8 // targets, dtype=dtype)} for _ in receivers]
    for version in (0, 1):  # files and mappings are used again
        values = (whole + version).chunk(sources)
        handles = [p.publish({"local": value}, version) for p, value in zip(publishers, values, strict=True)]
        for receiver, parameters in zip(receivers, got, strict=True):
            receiver.receive(handles, parameters, version)
    for end in [*publishers, *receivers]:
        end.close()
    return [parameters["local"] for parameters in got]


@pytest.mark.parametrize("protocol", ["shared_memory", "checkpoint"])
@pytest.mark.parametrize("sources", [1, 2])
@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_arrive_bitwise_and_cast_once(tmp_path, protocol, sources, targets, dtype):
    whole = torch.randn(8, 8)
    kind = getattr(torch, dtype)
    got = send(Channel(protocol, dtype, str(tmp_path)), whole, sources=sources, targets=targets, dtype=kind)
    assert torch.equal(torch.cat(got, dim=1), (whole + 1).to(kind))
    assert not list(segments.SHARED_MEMORY.glob(segments.segment_name("weights*")))
    assert not list(tmp_path.iterdir())


def test_shared_memory_tells_a_version_that_was_overwritten():
    made = plan(cut(1, 0), cut(1, 0))
    channel = Channel("shared_memory", "float32")
    publisher, receiver = Publisher(channel, made.shares[0]), Receiver(channel, made.intakes[0])
    first = publisher.publish({"local": torch.zeros(8, 8)}, 0)
    publisher.publish({"local": torch.zeros(8, 8)}, 1)
    with pytest.raises(NumericsError, match="are of version 1, version 0 was to be received"):
        receiver.receive([first], {"local": torch.zeros(8, 8)}, 0)
    publisher.close()


def test_an_engine_of_another_type_is_refused():
    made = plan(cut(1, 0), cut(1, 0))
    channel = Channel("shared_memory", "bfloat16")
    publisher = Publisher(channel, made.shares[0])
    handle = publisher.publish({"local": torch.zeros(8, 8)}, 0)
    with pytest.raises(WorkerError, match=r"keeps local as torch.float32, the weights come as torch.bfloat16"):
        Receiver(channel, made.intakes[0]).receive([handle], {"local": torch.zeros(8, 8)}, 0)
    publisher.close()


def test_too_little_shared_memory_is_an_error_before_anything_is_written(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    publisher = Publisher(Channel("shared_memory", "float32"), plan(cut(1, 0), cut(1, 0)).shares[0])
    with pytest.raises(ResourceError, match="no room for 0 MB of weights: No space left"):
        publisher.publish({"local": torch.zeros(8, 8)}, 0)
    assert not list(segments.SHARED_MEMORY.glob(segments.segment_name("weights*")))


def test_segments_of_the_dead_are_swept_and_those_of_the_living_are_not():
    code = (
        "from workers.resharding.segments import SHARED_MEMORY, segment_name; path = SHARED_MEMORY / segment_name('x');"
        "path.touch(); print(path)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment())
    dead, living = segments.Path(child.stdout.strip()), segments.SHARED_MEMORY / segments.segment_name("x")
    living.touch()
    assert dead.exists()
    removed = segments.sweep()
    assert dead.name in removed
    assert living.exists()
    living.unlink()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


class Handover(ReshardingProtocol):
    """A user's protocol: within one process the handle can be the tensors themselves."""

    def publish(self, share, parameters, version):
        return [parameters[piece.parameter][piece.slices] for piece, _ in share.pieces]

    def receive(self, intake, handles, parameters, version):
        for copy in intake.copies:
            (block,) = handles[copy.source]
            parameters[copy.piece.parameter][copy.piece.slices] = block[copy.slices]


def test_a_protocol_of_the_users_own():
    register_resharding("handover", Handover)
    register_resharding("handover", Handover)  # the file that holds it may be imported again
    with pytest.raises(ConfigError, match="already registered"):
        register_resharding("handover", ReshardingProtocol)
    whole = torch.randn(8, 8)
    got = send(Channel("handover", "float32"), whole, sources=2, targets=2, dtype=torch.float32)
    assert torch.equal(torch.cat(got, dim=1), whole + 1)


def test_names_are_checked_and_auto_goes_by_hosts():
    assert choose_resharding("auto", one_host=True) == "shared_memory"
    assert choose_resharding("auto", one_host=False) == "object_store"
    assert choose_resharding("checkpoint", one_host=True) == "checkpoint"
    with pytest.raises(
        ConfigError, match=r"unknown resharding protocol 'shm'\n +hint: registered are auto, checkpoint"
    ):
        choose_resharding("shm", one_host=True)
