"""The figure of the cards' samples: loops and repeated n-grams, on lists whose counts are plain."""

from __future__ import annotations

from pathlib import Path

import pytest
from sparkinfer_models.repetition import (
    MARK,
    Repetition,
    ends_in_loop,
    read_line,
    repeated_grams,
    repetition,
    write_line,
)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], False),
        ([1, 2, 3, 4, 5, 6], False),
        ([9, 1, 1, 1], True),
        ([9, 1, 1], False),
        ([9, 1, 2, 1, 2, 1, 2], True),
        ([1, 2, 1, 2, 1, 2, 9], False),
        ([0, *range(48), *range(48), *range(48)], True),
        ([0, *range(49), *range(49), *range(49)], False),
    ],
)
def test_loops(tokens: list[int], expected: bool) -> None:
    assert ends_in_loop(tokens) is expected


def test_repeated_grams_and_the_sentence() -> None:
    assert repeated_grams([1, 2, 3, 4, 1, 2, 3, 4]) == (1, 5)
    assert repeated_grams([1, 2, 3]) == (0, 0)
    found = repetition([[1, 2, 3, 4, 1, 2, 3, 4], [7] * 6], [[1, 2, 3, 4, 5]])
    assert found == Repetition(answers=2, loops=1, grams=8, repeated=3, text_grams=2, text_repeated=0)
    assert "1 end in a phrase" in found.sentence()
    assert "37.5% of their 4-grams" in found.sentence()
    assert "0.0% in the text" in found.sentence()


def test_the_line_in_samples(tmp_path: Path) -> None:
    path = tmp_path / "samples.md"
    assert read_line(path) == ""
    path.write_text("# Samples\n\nWords.\n\n## Seed 0\ntext\n")
    write_line(path, "one")
    write_line(path, "two")
    assert path.read_text() == f"# Samples\n\nWords.\n\n{MARK}two\n\n## Seed 0\ntext\n"
    assert read_line(path) == "two"
