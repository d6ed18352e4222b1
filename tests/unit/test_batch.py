"""The batch: ragged columns, checks against the table, and operations by id, against plain lists."""

import numpy as np
import pytest

from hybridflow.batch.batch import Batch, Ragged, match_ids
from hybridflow.batch.columns import COLUMNS, Column, Over, register_column

ROWS = [[5, 6, 7], [], [1], [2, 3, 4, 8, 9]]


def batch(ids=(10, 11, 12, 13), rows=ROWS) -> Batch:
    return Batch.of(
        ids,
        response_tokens=Ragged.of(rows, "int32"),
        reward=np.arange(len(rows), dtype=np.float32),
        prompt_text=[f"p{i}" for i in range(len(rows))],
    )


def lists(ragged: Ragged) -> list[list]:
    return [ragged[row].tolist() for row in range(len(ragged))]


class TestRagged:
    def test_offsets_are_cumulative_lengths(self):
        ragged = Ragged.of(ROWS, "int32")
        assert ragged.offsets.tolist() == [0, 3, 3, 4, 9] and ragged.offsets.dtype == np.int32
        assert ragged.lengths.tolist() == [3, 0, 1, 5]
        assert lists(ragged) == ROWS
        assert ragged.row_of.tolist() == [0, 0, 0, 2, 3, 3, 3, 3, 3]
        assert ragged.sums().tolist() == [18, 0, 1, 26]

    @pytest.mark.parametrize("rows", [[], [3, 1, 0, 2], [1, 1, 3], [0]])
    def test_select(self, rows):
        assert lists(Ragged.of(ROWS, "int32").select(np.asarray(rows, np.int64))) == [ROWS[row] for row in rows]

    def test_lengths_that_do_not_fit_are_refused(self):
        with pytest.raises(ValueError, match="4 values do not fill rows of 5"):
            Ragged.from_lengths(np.zeros(4), np.array([2, 3]))

    def test_empty(self):
        assert len(Ragged.of([], "float32")) == 0 and Ragged.of([], "float32").values.dtype == np.float32


class TestColumns:
    def test_what_goes_in_comes_out(self):
        made = batch()
        assert lists(made.ragged("response_tokens")) == ROWS
        assert made.scalar("reward").tolist() == [0, 1, 2, 3]
        assert made.text("prompt_text") == ["p0", "p1", "p2", "p3"]
        assert made.sample_ids.tolist() == [10, 11, 12, 13]
        assert len(made) == 4 and "reward" in made and "values" not in made

    def test_views_are_zero_copy(self):
        made = batch()
        array = made.table.column("response_tokens").chunk(0)
        view = made.ragged("response_tokens").values
        assert view.ctypes.data == array.values.buffers()[1].address

    def test_nan_survives(self):
        made = Batch.of([1, 2], reward=np.array([np.nan, 1], np.float32))
        assert np.isnan(made.scalar("reward")[0]) and made.scalar("reward").dtype == np.float32

    @pytest.mark.parametrize(
        "columns,error,message",
        [
            ({"rewrad": [1.0, 2.0]}, KeyError, "unknown column 'rewrad'"),
            ({"reward": np.zeros(3, np.float32)}, ValueError, "'reward' has 3 rows, the batch has 2"),
            ({"policy_version": np.array([0.5, 1.5])}, TypeError, "'policy_version' holds int64, got float64"),
            ({"values": Ragged.from_lengths(np.zeros(2), np.array([1, 1]))}, TypeError, "'values' holds float32"),
            (
                {"values": [[1.0], [2.0, 3.0]], "log_probs": [[1.0], [2.0]]},
                ValueError,
                "'values' and 'log_probs'.*row 1",
            ),
        ],
    )
    def test_wrong_columns_are_refused_by_name(self, columns, error, message):
        with pytest.raises(error, match=message):
            Batch.of([1, 2], **columns)

    def test_prompt_and_response_may_differ_in_length(self):
        made = Batch.of([1], prompt_tokens=[[1, 2, 3]], response_tokens=[[4]])
        assert made.ragged("prompt_tokens").lengths.tolist() == [3]

    def test_missing_column_is_named(self):
        with pytest.raises(KeyError, match="no column 'values'"):
            batch().ragged("values")

    def test_users_register_columns(self):
        column = Column("test_cost", Over.SAMPLE, "float32", "test", "what a safety critic says")
        try:
            register_column(column)
            register_column(column)
            assert Batch.of([1], test_cost=[0.5]).scalar("test_cost").tolist() == [0.5]
            with pytest.raises(ValueError, match="already registered"):
                register_column(Column("test_cost", Over.RESPONSE, "float32", "test", "another"))
        finally:
            COLUMNS.pop("test_cost", None)


class TestOperations:
    def test_select_rows_and_columns(self):
        chosen = batch().select(np.array([3, 0, 3]), ["response_tokens"])
        assert chosen.sample_ids.tolist() == [13, 10, 13] and chosen.columns == ["sample_id", "response_tokens"]
        assert lists(chosen.ragged("response_tokens")) == [ROWS[3], ROWS[0], ROWS[3]]

    def test_concat(self):
        first, second = batch(), batch(ids=(20, 21), rows=[[1], [2, 2]])
        both = Batch.concat([first, second])
        assert both.sample_ids.tolist() == [10, 11, 12, 13, 20, 21]
        assert lists(both.ragged("response_tokens")) == [*ROWS, [1], [2, 2]]
        with pytest.raises(ValueError, match="different columns"):
            Batch.concat([first, first.select(np.arange(4), ["reward"])])
        with pytest.raises(ValueError, match="nothing to concatenate"):
            Batch.concat([])

    def test_concat_with_an_empty_share(self):
        empty = batch().select(np.empty(0, np.int64))
        assert lists(Batch.concat([empty, batch(), empty]).ragged("response_tokens")) == ROWS
        assert len(Batch.concat([empty, empty]).ragged("response_tokens")) == 0

    def test_join_matches_by_id_not_by_position(self):
        other = Batch.of([13, 11, 10, 12], values=[[1.0] * 5, [], [2.0] * 3, [3.0]])
        joined = batch().join(other)
        assert lists(joined.ragged("values")) == [[2.0] * 3, [], [3.0], [1.0] * 5]
        assert joined.sample_ids.tolist() == [10, 11, 12, 13]

    def test_join_of_other_samples_names_them(self):
        with pytest.raises(ValueError, match=r"missing ids \[13\], unexpected ids \[99\]"):
            batch().join(Batch.of([10, 11, 12, 99], reward_failure=["", "", "", ""]))

    def test_with_columns_adds_and_replaces(self):
        changed = batch().with_columns(reward=np.full(4, 7, np.float32), values=[[0.0] * len(row) for row in ROWS])
        assert changed.scalar("reward").tolist() == [7] * 4 and lists(changed.ragged("values"))[3] == [0.0] * 5
        assert batch().scalar("reward").tolist() == [0, 1, 2, 3]

    def test_ids_given_twice_are_refused(self):
        with pytest.raises(ValueError, match="twice"):
            match_ids(np.array([1, 2, 2]), np.array([1, 1, 2]))

    @pytest.mark.parametrize("seed", range(5))
    def test_match_ids_equals_a_dictionary(self, seed):
        rng = np.random.default_rng(seed)
        have = rng.permutation(1000)[:100]
        wanted = rng.permutation(have)
        place = {int(value): position for position, value in enumerate(have)}
        assert match_ids(wanted, have).tolist() == [place[int(value)] for value in wanted]

    def test_empty_keeps_types(self):
        empty = Batch.empty(["response_tokens", "reward", "prompt_text"])
        assert len(empty) == 0 and Batch.concat([batch(), empty.select(np.empty(0), batch().columns)]).columns
        assert empty.ragged("response_tokens").values.dtype == np.int32

    def test_lengths_must_agree_in_every_way_of_making(self):
        with pytest.raises(ValueError, match="row 2 has 1 and 2"):
            batch().with_columns(values=[[0.0] * 3, [], [0.0] * 2, [0.0] * 5])
        with pytest.raises(ValueError, match="row 2 has 1 and 2"):
            batch().join(Batch.of([10, 11, 12, 13], values=[[0.0] * 3, [], [0.0] * 2, [0.0] * 5]))
