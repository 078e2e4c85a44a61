"""The fault lab: every bug shows its symptom, only while it is switched on, and guesses are answered."""

import pytest

from labkit.exercises import faults
from labkit.exercises.faults_list import FAULTS, Edit, Fault, switched_on
from labkit.exercises.faults_scenario import KINDS, play
from labkit.observe import BlocksShared

NUMBERS = range(1, len(FAULTS) + 1)


@pytest.fixture(scope="module")
def runs():
    """One run of each bug, by its name."""
    return {faults._fault(number).name: faults.run(number) for number in NUMBERS}


def wrong(run: faults.FaultRun) -> set[str]:
    return {name for name, tokens in run.expected.items() if run.outputs.get(name) != tokens}


def test_eight_faults_whose_numbers_do_not_give_them_away():
    names = [faults._fault(number).name for number in NUMBERS]
    assert sorted(names) == sorted(faults.NAMES) and len(set(names)) == 8
    assert all(name != listed for name, listed in zip(names, faults.NAMES, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_fault_nothing_is_wrong(kind: str):
    outcome = play(kind)
    assert not outcome.check and not outcome.error
    assert play(kind).outputs == outcome.outputs and all(outcome.outputs.values())


def test_a_lost_reference_is_seen_when_blocks_are_shared(runs: dict):
    run = runs["lost reference"]
    assert "ref_cnt 1, in 2 tables" in run.check
    step = int(run.check.split()[1].rstrip(":"))
    assert any(isinstance(event, BlocksShared) for event in run.trace.steps[step - 1].events)
    assert "freed more often" in run.error


def test_a_double_free_is_seen_when_a_block_is_copied(runs: dict):
    run = runs["double free"]
    assert "ref_cnt 0, in 1 tables" in run.check
    step = int(run.check.split()[1].rstrip(":"))
    assert any(type(event).__name__ == "BlockCopied" for event in run.trace.steps[step - 1].events)
    assert "b#1" in wrong(run)


def test_a_wrong_slot_hurts_prompts_in_pieces_only(runs: dict):
    run = runs["wrong slot"]
    assert {"a", "c", "d", "e"} <= wrong(run) and not {"b", "b#1", "g"} & wrong(run)
    assert not run.check and not run.error


def test_a_missing_salt_shows_only_in_who_shares(runs: dict):
    run = runs["missing salt"]
    assert not wrong(run) and not run.check and not run.error
    takes_over = {row[0]: row[2] for row in run._rows()}
    assert takes_over["d"] == takes_over["c"] != ""


def test_without_a_token_check_one_request_takes_over_strange_blocks(runs: dict):
    run = runs["hash without token check"]
    assert wrong(run) == {"f"} and run.outputs["f"][0] != run.expected["f"][0]
    assert not run.check and not run.error


def test_a_scale_left_behind_hurts_the_copy_only(runs: dict):
    run = runs["scale left behind"]
    assert wrong(run) == {"b"} and run.outputs["b"][0] == run.expected["b"][0]
    assert not run.check and not run.error


def test_an_off_by_one_starves_the_prompt_of_whole_blocks(runs: dict):
    run = runs["off-by-one at a block edge"]
    assert wrong(run) == {"e"} and run.outputs["e"] == []
    assert "e never ended" in run.error and not run.check


def test_a_stale_nan_turns_most_tokens_to_0(runs: dict):
    run = runs["stale NaN"]
    assert len(wrong(run)) > 5 and not run.check
    assert all(token == 0 for token in run.outputs["a"][1:])


def test_nothing_stays_patched(runs: dict):
    for fault in FAULTS:
        functions = [edit.function for edit in fault.edits]
        with pytest.raises(KeyError), switched_on(fault):
            assert all(edit.function is not before for edit, before in zip(fault.edits, functions, strict=True))
            raise KeyError
        assert [edit.function for edit in fault.edits] == functions
        assert all("with a fault" not in function.__code__.co_filename for function in functions)


def test_an_edit_that_the_source_outgrew_is_an_error():
    edit = Edit("labkit.memory.block_pool:BlockPool.share", "no such line", "")
    with (
        pytest.raises(RuntimeError, match="0 times, not once"),
        switched_on(Fault("x", "simulated", (edit,), "", "", "")),
    ):
        pass


@pytest.mark.parametrize("number", NUMBERS)
def test_guesses(number: int):
    fault = faults._fault(number)
    for name in faults.NAMES:
        report = faults.guess(number, name)
        assert report.passed == (name == fault.name)
        assert (fault.name in report.words) == report.passed, "a wrong guess must not give the name away"
    right = faults.guess(number, fault.name)
    assert fault.edits[0].right in right.words and "def " in str(right.picture)
    assert faults.guess(number, ...).state == "open"


def test_what_is_no_number_or_name_is_refused():
    with pytest.raises(ValueError, match="number must be within 1 to 8, got 9"):
        faults.run(9)
    with pytest.raises(ValueError, match="name must be one of lost reference.* got 'nothing'"):
        faults.guess(1, "nothing")


def test_a_run_is_shown_as_text_and_html(runs: dict):
    run = runs["hash without token check"]
    assert "expected" in str(run) and "check(): no complaint" in str(run)
    assert "✗" in run._repr_html_() and run.table.num_blocks == 20
