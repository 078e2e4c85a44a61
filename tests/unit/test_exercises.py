"""Every exercise: its solution passes, an empty stub gets the task, a wrong attempt hears why."""

import pytest

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
