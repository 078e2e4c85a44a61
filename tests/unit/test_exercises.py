"""Every exercise: its solution passes, an empty stub gets the task, a wrong attempt hears why."""

import math
import sys
from contextlib import suppress

import pytest
import torch

from labkit import exercises
from labkit.exercises.exercise import is_unfilled

IDS = list(exercises.EXERCISES)


@pytest.mark.parametrize("exercise_id", IDS)
def test_the_solution_passes(exercise_id):
    exercise = exercises.get(exercise_id)
    report = exercise.check(exercise.solution)
    assert report.passed, str(report)


@pytest.mark.parametrize("exercise_id", IDS)
def test_a_wrong_attempt_fails_in_words(exercise_id):
    def wrong(*args, **kwargs):
        return "wrong"

    report = exercises.check(exercise_id, wrong)
    assert report.state == "not yet"
    assert report.words and "Traceback" not in report.words


@pytest.mark.parametrize("exercise_id", IDS)
def test_text_is_complete(exercise_id):
    exercise = exercises.get(exercise_id)
    assert exercise.id == exercise_id and exercise_id[:2].isdigit()
    assert len(set(exercise.hints)) == 3
    assert exercise.solution.__doc__


def test_an_empty_stub_gets_the_task():
    def stub(num_layers, num_kv_heads, head_dim, bytes_per_value):
        """What I will write."""
        ...

    report = exercises.check("01-bytes-per-token", stub)
    assert report.state == "open" and "bytes_per_token(" in report.words


def test_a_class_with_an_empty_method_is_unfilled():
    class Half:
        def add(self):
            return 1

        def result(self): ...

    class Whole:
        def add(self):
            return 1

    assert is_unfilled(Half) and not is_unfilled(Whole)


def test_the_smallest_case_is_shown():
    report = exercises.check("01-bytes-in-blocks", lambda lengths, size, width: -(-sum(lengths) // size) * size * width)
    assert "Smallest case: ([1, 1], 8, 1)" in report.words


def test_an_exception_in_an_attempt_is_reported():
    report = exercises.check("01-bytes-per-token", lambda *sizes: 1 // 0)
    assert report.state == "not yet" and "ZeroDivisionError" in report.words


def test_the_readers_line_is_named():
    report = exercises.check("01-bytes-per-token", lambda *sizes: sizes[7])
    assert "IndexError" in report.words and "sizes[7]" in report.words and "Smallest case" in report.words


@pytest.mark.parametrize("exercise_id", IDS)
@pytest.mark.parametrize("answer", [None, [object()], math.nan, torch.zeros(3)], ids=lambda a: type(a).__name__)
def test_an_answer_of_the_wrong_kind_is_told_apart(exercise_id, answer):
    def attempt(*args, **kwargs):
        return answer if args or kwargs else None

    report = exercises.check(exercise_id, attempt)
    assert report.state == "not yet" and "truth" not in report.words and "ambiguous" not in report.words
    assert not (answer is None and "object is not iterable" in report.words)


@pytest.mark.parametrize("exercise_id", ["01-bytes-in-blocks", "04-priority", "05-gqa", "02-free-list"])
def test_an_attempt_that_never_ends_is_stopped(exercise_id, monkeypatch):
    def attempt(*args):
        while True:
            with suppress(Exception):
                sum(range(1000))

    monkeypatch.setattr("labkit.exercises.exercise.TIME_LIMIT", 0.5)
    report = exercises.check(exercise_id, attempt)
    assert report.state == "not yet" and "does a loop never end?" in report.words
    assert ("Smallest case" in report.words) == (exercise_id in ("01-bytes-in-blocks", "05-gqa"))
    assert sum(range(10**6)) == 499999500000, "nothing is raised later"


def test_an_attempt_that_leaves_python_is_reported():
    report = exercises.check("07-steps", lambda *_: sys.exit("enough"))
    assert report.state == "not yet" and "SystemExit: enough" in report.words


def test_what_is_printed_is_shown_for_the_smallest_case_only(capsys):
    def busy_share(lens):
        print("lengths", lens)
        return 1.0

    report = exercises.check("04-busy-share", busy_share)
    assert report.words.endswith("Smallest case: [1, 2]\n\nIt printed: lengths [1, 2]")
    assert capsys.readouterr().out == ""


def test_changing_an_argument_changes_no_case():
    def share_budget(budget, num_running, prompt_lens):
        prompt_lens.clear()
        return [1] * num_running

    assert (
        "should be [1], got []\n\nSmallest case: (1, 0, [1])" in exercises.check("04-share-budget", share_budget).words
    )


def test_what_cannot_be_called_is_refused():
    assert "pass the function or class itself, not 3" in exercises.check("03-slot", 3).words


def test_a_half_written_class_hears_what_is_empty():
    class Softmax:
        def add(self, scores, values):
            self.seen = scores

        def result(self): ...

    report = exercises.check("03-online-softmax", Softmax)
    assert report.state == "open" and report.words.endswith("Still empty: result.")


def test_hints_say_more_each_time():
    exercise_id = "03-merge"
    first, second = exercises.hint(exercise_id), exercises.hint(exercise_id)
    assert first != second and first.startswith("Hint 1 of 3")
    assert exercises.hint(exercise_id, 3).startswith("Hint 3 of 3")
    with pytest.raises(ValueError, match="level must be within 1 to 3, got 4"):
        exercises.hint(exercise_id, 4)


def test_an_unknown_exercise_names_those_of_the_lesson():
    with pytest.raises(ValueError, match="01-bytes-per-token"):
        exercises.check("01-bytes", None)


def test_a_report_is_shown_as_html_and_as_text():
    report = exercises.check("03-slot", lambda *_: 0)
    assert "✗" in report._repr_html_() and str(report).startswith("[not yet] 03-slot")


def test_a_solution_is_shown_as_source():
    assert "def slot_of" in exercises.solution("03-slot").data


class Careless:
    """A free list that forgets to take blocks off when it hands them out."""

    def __init__(self, num_blocks):
        self.free_ids = list(range(num_blocks))

    def allocate(self, count):
        return self.free_ids[:count]

    def free(self, block_ids):
        self.free_ids += block_ids


class Leaking(Careless):
    def allocate(self, count):
        return [self.free_ids.pop() for _ in range(count)]

    def free(self, block_ids):
        self.lost = block_ids


class LosingOne(Leaking):
    def free(self, block_ids):
        self.free_ids += block_ids[:-1]


def test_a_wrong_free_list_is_shown_at_the_step_where_it_goes_wrong():
    from labkit.widgets import BlockTable

    report = exercises.check("02-free-list", Careless)
    assert report.state == "not yet" and "which somebody still holds" in report.words
    assert "step" in report.words
    for attempt in (Leaking, LosingOne):
        report = exercises.check("02-free-list", attempt)
        assert report.state == "not yet" and isinstance(report.picture, BlockTable)
