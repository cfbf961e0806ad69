"""Numbers, tokens, gaps and refusals: properties of the pure decisions, without any I/O."""

import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill_contracts import limits
from gristmill_contracts import operations as ops
from gristmill_contracts.admission import SequenceConflictError
from gristmill_contracts.errors import (
    ConflictError,
    GristmillError,
    InvalidRequestError,
    LogFullError,
    OverloadedError,
)
from gristmill_contracts.http import Problem, Submit
from gristmill_meter import frames
from gristmill_meter.decisions import (
    Accept,
    Duplicate,
    gap_overdue,
    next_train,
    resolve_adapter,
)
from gristmill_meter.records import SessionState
from gristmill_meter.state import apply
from gristmill_testing.meter_book import ROOM, UID, Book
from gristmill_testing.meter_world import (
    checkpoint,
    compute_logprobs,
    forward_backward,
    make_submit,
    optim_step,
    sample,
)


@given(st.permutations(range(1, 13)), st.integers(0, 2**32))
def test_any_order_of_arrival_runs_in_number_order_once(order: list[int], seed: int) -> None:
    book, chance, ran = Book(), random.Random(seed), []
    for number in order:
        book.train(number)
        if chance.random() < 0.5:
            assert isinstance(book.train(number), Duplicate)
        if chance.random() < 0.5:
            ran += book.runs()
        expected = next(n for n in range(1, 15) if ("train", n) not in book.state.records)
        assert book.state.next_number == expected
        assert (book.state.missing_number is None) == (expected > book.state.last_received_number)
    ran += book.runs()
    assert ran == list(range(1, 13))
    assert book.state.missing_number is None


@given(st.lists(st.tuples(st.sampled_from("srfeE"), st.integers(1, 9)), max_size=40))
def test_the_state_is_a_function_of_the_log(steps: list[tuple[str, int]]) -> None:
    """Whatever happens, reading the frames again gives the same state, and the books stay balanced."""
    book = Book()
    for verb, number in steps:
        try:
            if verb == "s":
                book.train(number, optim_step() if number % 3 == 0 else None)
            elif verb == "r":
                book.refuse(number)
            elif verb == "f":
                book.submit(make_submit(None, sample(seed=number)))
            elif decision := next_train(book.state, book.state.frames):
                book.end(decision.record.number, failed=verb == "E")
        except GristmillError:
            continue
    again = SessionState(uid=UID)
    for frame in book.frames:
        apply(again, frames.decode_frame(frames.encode_frame(frame)))
    assert again == book.state
    open_records = [r for r in book.state.records.values() if not r.terminal]
    assert [r.key for r in open_records] == sorted(
        book.state.open_keys, key=list(book.state.records).index
    )
    assert book.state.open_bytes == 100 * len(open_records)
    assert book.state.room_bytes == sum(r.room_bytes for r in open_records)
    assert [e.producer_seq for _, e in book.state.events] == list(range(1, book.state.head_seq + 1))


def test_a_resubmit_is_the_same_operation_even_without_a_token() -> None:
    book = Book()
    assert isinstance(book.train(1), Accept)
    again = book.train(1)
    assert isinstance(again, Duplicate)
    assert again.record.number == 1
    book.runs()
    assert isinstance(book.train(1), Duplicate)
    assert book.runs() == []


def test_another_body_under_a_number_is_a_conflict_that_names_the_last_number() -> None:
    book = Book()
    for number in (1, 2, 3):
        book.train(number)
    with pytest.raises(SequenceConflictError, match="last received number is 3") as caught:
        book.train(2, forward_backward(9, 99))
    assert caught.value.last_number == 3


def test_a_token_names_one_request() -> None:
    book = Book()
    first = make_submit(1, forward_backward(), token="a")
    book.submit(first)
    assert isinstance(book.submit(first), Duplicate)
    with pytest.raises(InvalidRequestError, match="clientToken 'a'"):
        book.submit(make_submit(1, forward_backward(8), token="a"))
    with pytest.raises(InvalidRequestError, match="clientToken 'a'"):
        book.submit(make_submit(2, forward_backward(), token="a"))
    keyless = make_submit(None, sample(), token="b")
    book.submit(keyless)
    again = book.submit(keyless)
    assert isinstance(again, Duplicate)
    assert again.record.key == ("log", 1)


def test_keyless_operations_are_new_ones_every_time() -> None:
    book = Book()
    numbers = [book.submit(make_submit(None, sample())) for _ in range(3)]
    assert [n.number for n in numbers if isinstance(n, Accept)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        pytest.param(make_submit(0, optim_step()), "start at 1", id="number 0"),
        pytest.param(make_submit(2**53, optim_step()), "outside", id="number too large"),
        pytest.param(
            msgspec.structs.replace(make_submit(None, sample()), stream="train", number=1),
            "belongs to stream 'log'",
            id="sample in the train stream",
        ),
        pytest.param(
            msgspec.structs.replace(make_submit(1, optim_step()), stream="log"),
            "belongs to stream 'train'",
            id="training in the log stream",
        ),
        pytest.param(
            msgspec.structs.replace(make_submit(None, sample()), number=4),
            "numbers itself",
            id="number for a sample",
        ),
    ],
)
def test_bad_numbers_are_refused_and_nothing_changes(submit: Submit, message: str) -> None:
    book = Book()
    with pytest.raises(InvalidRequestError, match=message):
        book.submit(submit)
    assert len(book.frames) == 1


def test_a_number_too_far_ahead_is_a_conflict() -> None:
    book = Book()
    book.train(1 + limits.SEQUENCE_AHEAD_MAX)
    with pytest.raises(SequenceConflictError, match="above 1"):
        book.train(2 + limits.SEQUENCE_AHEAD_MAX)
    with pytest.raises(SequenceConflictError):
        book.refuse(2 + limits.SEQUENCE_AHEAD_MAX)


class TestRefusedNumbers:
    def test_leave_no_gap_and_run_nothing(self) -> None:
        book = Book()
        book.train(1)
        book.refuse(2, breaks=False)
        book.train(3)
        assert book.state.missing_number is None
        assert book.runs() == [1, 3]
        assert book.state.head_seq == 2

    def test_may_be_refused_again(self) -> None:
        book = Book()
        book.refuse(1)
        assert isinstance(book.refuse(1), Duplicate)

    def test_are_accepted_when_corrected_before_anything_after_them_has_started(self) -> None:
        book = Book()
        book.refuse(1)
        book.train(2)
        assert isinstance(book.train(1), Accept)
        assert book.runs() == [1, 2]

    @pytest.mark.parametrize("how", ["ended", "running"])
    def test_are_closed_for_good_once_something_after_them_has_started(self, how: str) -> None:
        book = Book()
        book.refuse(1)
        book.train(2)
        if how == "ended":
            book.runs()
        else:
            book.started.add(("train", 2))
        with pytest.raises(SequenceConflictError):
            book.train(1)

    def test_cannot_close_the_number_of_an_operation(self) -> None:
        book = Book()
        book.train(1)
        with pytest.raises(SequenceConflictError):
            book.refuse(1)

    def test_skip_the_step_directly_behind_them(self) -> None:
        book = Book()
        book.train(1)
        book.refuse(2)
        book.refuse(3, breaks=False)
        book.train(4, optim_step())
        book.train(5)
        book.train(6, optim_step())
        assert book.runs() == [1, 5, 6]
        assert book.state.records["train", 4].state == "Skipped"

    def test_skip_the_step_of_their_accumulation_with_good_chunks_between(self) -> None:
        book = Book()
        book.refuse(1)
        book.train(2)
        book.train(3)
        book.train(4, optim_step())
        book.train(5)
        book.train(6, optim_step())
        assert book.runs() == [2, 3, 5, 6]
        assert book.state.records["train", 4].state == "Skipped"

    def test_that_were_corrected_skip_nothing(self) -> None:
        book = Book()
        book.refuse(1)
        book.train(1)
        book.train(2)
        book.train(3, optim_step())
        assert book.runs() == [1, 2, 3]

    def test_that_were_no_chunk_skip_nothing(self) -> None:
        book = Book()
        book.train(1)
        book.refuse(2, breaks=False)
        book.train(3, optim_step())
        assert book.runs() == [1, 3]


class TestFailures:
    def test_skip_what_is_queued_behind_and_let_the_next_submit_run(self) -> None:
        book = Book()
        for number in (1, 2, 3):
            book.train(number)
        book.submit(make_submit(None, sample()))
        book.end(1, failed=True)
        states = [book.state.records["train", n].state for n in (1, 2, 3)]
        assert states == ["Failed", "Skipped", "Skipped"]
        assert book.state.records["log", 1].state == "Pending"
        book.train(4)
        assert book.runs() == [4]
        assert book.state.records["train", 4].index == 2

    def test_count_nothing(self) -> None:
        book = Book()
        book.train(1)
        book.end(1, failed=True)
        assert (book.state.head_seq, book.state.counts.total) == (0, 0)


class TestGaps:
    def test_are_overdue_after_the_timeout_and_never_before_the_meter_was_there_to_hear(
        self,
    ) -> None:
        book = Book()
        book.now_us = 5_000_000
        book.train(3)
        assert gap_overdue(book.state, 7_900_000, 0, 3.0) is None
        assert gap_overdue(book.state, 8_000_000, 0, 3.0) == 1
        assert gap_overdue(book.state, 8_000_000, 6_000_000, 3.0) is None

    def test_begin_anew_when_another_number_is_the_missing_one(self) -> None:
        book = Book()
        book.now_us = 1_000_000
        book.train(2)
        book.train(4)
        book.now_us = 9_000_000
        book.train(1)
        assert book.state.missing_number == 3
        assert book.state.missing_since_us == 9_000_000
        book.train(3)
        assert (book.state.missing_number, book.state.missing_since_us) == (None, None)


class TestBounds:
    def test_operations(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "QUEUED_OPERATIONS_MAX", 2)
        book = Book()
        book.train(1)
        book.train(2)
        with pytest.raises(OverloadedError, match="2 operations"):
            book.train(3)
        assert isinstance(book.train(2), Duplicate)
        book.end(1)
        assert isinstance(book.train(3), Accept)

    def test_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "QUEUED_BYTES_MAX", 150)
        book = Book()
        book.train(1)
        book.train(2)
        with pytest.raises(OverloadedError, match="200 bytes"):
            book.train(3)

    def test_unclaimed_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(limits, "UNCLAIMED_TOKENS_MAX", 6)
        book = Book()
        book.submit(make_submit(None, compute_logprobs(prompt=6)))
        book.end(1, stream="log")
        with pytest.raises(OverloadedError, match="fetch the results"):
            book.submit(make_submit(None, sample()))
        assert isinstance(book.train(1), Accept)
        book.take(frames.Claim(number=1, at_us=1))
        assert isinstance(book.submit(make_submit(None, sample())), Accept)

    def test_room_on_the_volume_counts_what_accepted_operations_may_still_write(self) -> None:
        book = Book()
        room = replace(ROOM, free_bytes=limits.RESULT_ROOM_BYTES_MIN * 2 + 100)
        book.submit(make_submit(1, optim_step()), room)
        book.submit(make_submit(2, optim_step()), room)
        with pytest.raises(LogFullError):
            book.submit(make_submit(3, optim_step()), room)
        book.end(1)
        assert isinstance(book.submit(make_submit(3, optim_step()), room), Accept)

    def test_of_a_failed_session_still_answer_what_is_known(self) -> None:
        book = Book()
        book.train(1)
        error = Problem(code="operation_failed", message="number 7 is missing")
        book.take(frames.SessionFailed(error=error, skipped=[("train", 1)], at_us=1))
        assert isinstance(book.train(1), Duplicate)
        with pytest.raises(ConflictError, match="number 7 is missing"):
            book.train(2)


def test_a_sample_bound_to_nothing_takes_the_default_of_its_submit() -> None:
    state = SessionState(uid=UID)
    unbound = sample()
    assert resolve_adapter(state, unbound) is unbound
    state.default_adapter = checkpoint("newest")
    resolved = resolve_adapter(state, unbound)
    assert isinstance(resolved, ops.Sample)
    assert resolved.adapter == checkpoint("newest")
    bound = sample(adapter="older")
    assert resolve_adapter(state, bound) is bound
