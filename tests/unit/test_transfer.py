"""Transfer protocols over layouts, and the coordinates that they are written in."""

import itertools

import pytest

from hybridflow.errors import ConfigError
from hybridflow.transfer import ALL, PROTOCOLS, Transfer, TransferProtocol, get_protocol, register_protocol, transfer
from placement.layout import Layout

LAYOUTS = [Layout(tp, pp, cp, dp) for tp, pp, cp, dp in itertools.product((1, 2), (1, 2), (1, 2), (1, 3))]
LAYOUTS += [Layout(tp=2, dp=2, micro_dp=2), Layout(tp=1, pp=2, dp=2, micro_dp=4)]


def check_protocol(protocol: TransferProtocol, layout: Layout) -> None:
    """The contract of any protocol: shards are numbered from 0 without gaps, and some rank answers."""
    shards = [protocol.distribute(coord, layout) for coord in layout.coords()]
    assert set(shards) == {ALL} or sorted(set(shards)) == list(range(protocol.shards(layout)))
    collected = protocol.collected(layout)
    assert collected and len(set(collected)) == len(collected)
    if set(shards) != {ALL}:
        answered = [shards[rank] for rank in collected]
        assert set(answered) == set(shards), "every shard has somebody who answers for it"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", sorted(PROTOCOLS))
def test_contract(name, layout):
    check_protocol(get_protocol(name), layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_3d_proto_answers_once_for_each_shard_from_the_last_stage(layout):
    protocol = get_protocol("3D_PROTO")
    coords = [layout.coord(rank) for rank in protocol.collected(layout)]
    if layout.micro_dp == 1:
        assert [coord.dp for coord in coords] == list(range(layout.dp)), "in the order of the shards"
    assert all(coord.pp == layout.pp - 1 and coord.tp == 0 for coord in coords)


def test_what_the_paper_says_of_each():
    layout = Layout(tp=2, pp=2, dp=2)
    shards = {name: [p.distribute(c, layout) for c in layout.coords()] for name, p in PROTOCOLS.items()}
    assert shards["ONE_TO_ALL"] == shards["3D_PP_ONLY"] == [ALL] * 8
    assert shards["3D_PROTO"] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert shards["DP_PROTO"] == shards["ALL_TO_ALL"] == list(range(8))
    collected = {name: protocol.collected(layout) for name, protocol in PROTOCOLS.items()}
    assert collected["ONE_TO_ALL"] == collected["DP_PROTO"] == collected["ALL_TO_ALL"] == list(range(8))
    assert collected["3D_PROTO"] == [4, 6] and collected["3D_PP_ONLY"] == [0, 4]
    micro = Layout(tp=1, dp=2, micro_dp=2)
    assert [PROTOCOLS["3D_ALL_MICRO_DP"].distribute(c, micro) for c in micro.coords()] == [0, 1, 2, 3]
    assert PROTOCOLS["3D_ALL_MICRO_DP"].collected(micro) == [0, 1, 2, 3]


def test_users_register_their_own():
    last = TransferProtocol("TEST_LAST_STAGE", lambda c, l: ALL, lambda c, l: c.pp == l.pp - 1)
    try:
        register_protocol(last)
        check_protocol(get_protocol("TEST_LAST_STAGE"), Layout(tp=2, pp=2))
        assert last.collected(Layout(tp=2, pp=2)) == [2, 3]
        with pytest.raises(ValueError, match="already registered"):
            register_protocol(last)
    finally:
        PROTOCOLS.pop("TEST_LAST_STAGE", None)
    with pytest.raises(KeyError, match="3D_PROTO"):
        get_protocol("TEST_LAST_STAGE")


def test_a_method_carries_its_declaration():
    @transfer("3D_PROTO", reads=("values",), writes=("returns",))
    def method(self, batch):
        """Doc."""

    assert method.transfer == Transfer("3D_PROTO", ("values",), ("returns",)) and method.__doc__ == "Doc."


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_coordinates_cover_the_layout(layout):
    coords = layout.coords()
    assert [coord.rank for coord in coords] == list(range(layout.world_size))
    assert len({(c.tp, c.pp, c.cp, c.dp, c.micro_dp) for c in coords}) == layout.world_size


def test_rank_order_is_megatrons():
    """tp-cp-dp-pp, the first fastest (Megatron-Core's default "tp-cp-ep-dp-pp")."""
    layout = Layout(tp=2, cp=2, dp=2, pp=2)
    for coord in layout.coords():
        assert coord.rank == coord.tp + 2 * (coord.cp + 2 * (coord.dp + 2 * coord.pp))
    with pytest.raises(ValueError, match="outside a world of 16"):
        layout.coord(16)


def test_for_world_fills_the_devices():
    assert Layout.for_world(8, tp=2, pp=2) == Layout(tp=2, pp=2, dp=2)
    with pytest.raises(ConfigError, match="6 devices cannot be cut into model copies of TP 2 x PP 2") as error:
        Layout.for_world(6, tp=2, pp=2, where="actor")
    assert error.value.where == "actor" and error.value.hint
    with pytest.raises(ConfigError, match="0 devices"):
        Layout.for_world(0)
