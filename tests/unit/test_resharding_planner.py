"""The planner against brute force: every element that a target wants arrives, from exactly one source."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from hybridflow.errors import WorkerError
from workers.resharding.boxes import Box, Piece, ShardMap
from workers.resharding.planner import ReshardingPlan, plan


def whole(tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """Elements that tell where they come from."""
    seed = sum(map(ord, tensor)) * 1000
    return (seed + np.arange(np.prod(shape))).reshape(shape)


def local(shards: ShardMap, tensors: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """A rank's parameters, just large enough; -1 where no piece names an element, or everywhere without tensors."""
    extents: dict[str, np.ndarray] = {}
    for piece in shards:
        end = np.add(piece.offset, piece.box.shape)
        extents[piece.parameter] = np.maximum(extents.get(piece.parameter, end), end)
    parameters = {name: np.full(extent, -1) for name, extent in extents.items()}
    for piece in shards if tensors is not None else []:
        parameters[piece.parameter][piece.slices] = tensors[piece.box.tensor][piece.box.slices]
    return parameters


def carry_out(made: ReshardingPlan, sources: list[dict], targets: list[dict]) -> None:
    buffers = []
    for share, source in zip(made.shares, sources, strict=True):
        buffer = np.full(share.numel, -2)
        for piece, offset in share.pieces:
            place = buffer[offset : offset + piece.box.numel]
            assert (place == -2).all(), "two blocks overlap in the buffer"
            place[:] = source[piece.parameter][piece.slices].ravel()
        assert (buffer != -2).all(), "the buffer has gaps"
        buffers.append(buffer)
    for intake, target in zip(made.intakes, targets, strict=True):
        for copy in intake.copies:
            region = copy.region
            block = buffers[copy.source][region.offset : region.offset + region.box.numel].reshape(region.box.shape)
            target[copy.piece.parameter][copy.piece.slices] = block[copy.slices]


def check(sources: list[ShardMap], targets: list[ShardMap], shapes: dict[str, tuple[int, ...]]) -> ReshardingPlan:
    made = plan(sources, targets)
    tensors = {name: whole(name, shape) for name, shape in shapes.items()}
    got = [local(target, None) for target in targets]
    carry_out(made, [local(source, tensors) for source in sources], got)
    for target, parameters in zip(targets, got, strict=True):
        for name, expected in local(target, tensors).items():
            np.testing.assert_array_equal(parameters[name], expected)
    published = [(p.box.tensor, *index) for share in made.shares for p, _ in share.pieces for index in _indices(p.box)]
    assert len(published) == len(set(published)), "an element is published twice"
    return made


def _indices(box: Box):
    return itertools.product(*(range(start, stop) for start, stop in zip(box.start, box.stop, strict=True)))


def row_cut(tensor: str, shape: tuple[int, int], parts: int) -> list[ShardMap]:
    rows = shape[0] // parts
    return [[Piece(Box(tensor, (r * rows, 0), ((r + 1) * rows, shape[1])), "w", (0, 0))] for r in range(parts)]


def column_cut(tensor: str, shape: tuple[int, int], parts: int) -> list[ShardMap]:
    columns = shape[1] // parts
    boxes = [Box(tensor, (0, c * columns), (shape[0], (c + 1) * columns)) for c in range(parts)]
    return [[Piece(box, "w", (0, 0))] for box in boxes]


@pytest.mark.parametrize("cut", [row_cut, column_cut])
@pytest.mark.parametrize("sources", [1, 2, 4])
@pytest.mark.parametrize("targets", [1, 2, 4])
def test_every_cut_into_every_cut(cut, sources, targets):
    made = check(cut("t", (8, 8), sources), row_cut("t", (8, 8), targets), {"t": (8, 8)})
    assert made.published == made.copied == 64


def test_replicas_publish_once_and_share_the_load():
    shapes = {f"t{i}": (4, 4) for i in range(6)}
    source = [Piece(Box(name, (0, 0), shape), name, (0, 0)) for name, shape in shapes.items()]
    made = check([source] * 3, [source] * 2, shapes)
    assert [share.numel for share in made.shares] == [32, 32, 32]
    assert (made.published, made.copied) == (96, 192)


def test_interleaved_groups_become_one_region():
    """QKV as Megatron keeps it: what lies apart in the parameter lies together in the buffer, and is copied at once."""
    pieces = []
    for group in range(4):
        for part, name in enumerate("qkv"):
            pieces.append(Piece(Box(name, (group * 2, 0), (group * 2 + 2, 3)), "qkv", ((group * 3 + part) * 2, 0)))
    fused = [Piece(Box(name, (0, 0), (8, 3)), "fused", (8 * i, 0)) for i, name in enumerate("qkv")]
    made = check([pieces], [fused], dict.fromkeys("qkv", (8, 3)))
    assert len(made.shares[0].pieces) == 12
    assert len(made.intakes[0].copies) == 3


def test_overlapping_sources_are_carved():
    boxes = [Box("t", (0, 0), (5, 4)), Box("t", (3, 1), (6, 4)), Box("t", (4, 0), (8, 2)), Box("t", (5, 1), (8, 4))]
    sources = [[Piece(box, "w", (0, 0))] for box in boxes]
    made = check(sources, row_cut("t", (8, 4), 2), {"t": (8, 4)})
    assert made.copied == made.published == 32


def test_random_maps_against_brute_force():
    """Tensors cut at random into a grid; blocks held by random ranks, some by several, at random places."""
    random = np.random.default_rng(0)
    for _ in range(60):
        ranks, shapes = int(random.integers(1, 5)), {f"t{i}": tuple(random.integers(2, 9, size=2)) for i in range(3)}
        check(_random_side(random, shapes, ranks), _random_side(random, shapes, ranks), shapes)


def _random_side(random, shapes, ranks: int) -> list[ShardMap]:
    maps: list[ShardMap] = [[] for _ in range(ranks)]
    for name, (rows, columns) in shapes.items():
        row_cuts = sorted({0, rows, *random.integers(0, rows, size=2).tolist()})
        column_cuts = sorted({0, columns, int(random.integers(0, columns))})
        for (a, b), (c, d) in itertools.product(itertools.pairwise(row_cuts), itertools.pairwise(column_cuts)):
            holders = random.choice(ranks, size=int(random.integers(1, ranks + 1)), replace=False)
            for rank in holders:
                offset = tuple(random.integers(0, 3, size=2).tolist())
                maps[rank].append(Piece(Box(name, (a, c), (b, d)), f"{name}.{a}.{c}", offset))
    return maps


def test_what_no_source_holds_is_listed():
    target = row_cut("t", (8, 4), 1)
    with pytest.raises(WorkerError, match=r"no source holds lm_head\.weight"):
        plan(target, [[*target[0], Piece(Box("lm_head.weight", (0, 0), (2, 2)), "h", (0, 0))]])
    with pytest.raises(WorkerError, match=r"no target takes lm_head\.weight"):
        plan([[*target[0], Piece(Box("lm_head.weight", (0, 0), (2, 2)), "h", (0, 0))]], target)
    with pytest.raises(WorkerError, match=r"sources hold 16 of 32 numbers of t for w on rank 0"):
        plan(row_cut("t", (8, 4), 2)[:1], target)


def test_a_large_model_is_planned_at_once():
    """A 7B shape, TP 8 x DP 4 into TP 4 x 8 replicas, 32 KV heads: well under a second."""
    sources = []
    for rank in range(8):
        pieces = []
        for layer, group, part in itertools.product(range(32), range(4), "qkv"):
            row = (rank * 4 + group) * 128
            pieces.append(Piece(Box(f"{layer}.{part}", (row, 0), (row + 128, 4096)), f"{layer}.qkv", (0, 0)))
        sources.append(pieces)
    targets = []
    for rank in range(4):
        parts = itertools.product(range(32), "qkv")
        boxes = [Box(f"{layer}.{part}", (rank * 1024, 0), ((rank + 1) * 1024, 4096)) for layer, part in parts]
        targets.append([Piece(box, box.tensor, (0, 0)) for box in boxes])
    started = time.perf_counter()
    made = plan(sources * 4, targets * 8)
    assert time.perf_counter() - started < 2
    assert made.published == 96 * 4096 * 4096
