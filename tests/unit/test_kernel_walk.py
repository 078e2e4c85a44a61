"""The kernel walk: what it draws and says of a work list."""

from xml.etree import ElementTree

import pytest

from labkit.widgets import KernelWalk

TABLE = [[7, 2, 9, 0], [5, 0, 0, 0], [1, 3, 4, 6]]


def walk(**options) -> KernelWalk:
    return KernelWalk(TABLE, [37, 5, 64], 2, **options)


def test_every_part_and_block_is_drawn():
    shown = walk(num_programs=5)
    svg = ElementTree.fromstring(shown.to_svg())
    ids = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in ids if text and text.isdigit()] == [*"729729", *"55", *"13461346"]
    titles = [title.text for title in svg.findall("{*}g/{*}title")]
    assert len(titles) == len(shown.parts) and "program 0: sequence 0, head 0" in str(titles[0])


def test_the_sliders_divide_anew():
    shown = walk(num_programs=1)
    assert "1 of 1 programs have work: 212 to 212 keys each; 0 of 6 pairs are cut" in repr(shown)
    shown.num_programs.value = 4
    assert max(part.program for part in shown.parts) == 3
    assert "4 of 4 programs have work" in shown.words.value
    shown.program.value = 1
    assert "program 1 reads" in shown.words.value and "slot" in shown.words.value
    assert 'opacity="0.15"' in shown.picture.value
    shown.num_programs.value = 1
    assert shown.program.value == -1, "a program that is gone is not shown"


def test_a_still_picture_stands_beside_the_widget():
    bundle = walk()._repr_mimebundle_()
    assert bundle["text/plain"].startswith("KernelWalk(") and bundle["image/svg+xml"].startswith("<svg")


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="num_programs must be >= 1, got 0"):
        walk(num_programs=0)
