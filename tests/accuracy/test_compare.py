"""The figures against hand-made distributions and against the whole vocabulary's KL."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from sparkinfer_eval.accuracy.cli import rows
from sparkinfer_eval.accuracy.compare import Limits, divergence, figures, gap
from sparkinfer_eval.accuracy.held_out import Task
from sparkinfer_eval.accuracy.scores import (
    GreedyAnswer,
    NotFinite,
    Position,
    Scores,
    read_scores,
    require_finite,
    write_scores,
)

from sparkinfer.errors import ConfigError

TASK = Task("0" * 64, {"w": [1, 2, 3]}, {"w": [1]}, 2)


def position(place: int, target: float | None, **top: float) -> Position:
    return Position(place, target, {int(name[1:]): math.log(p) for name, p in top.items()})


def scores(*positions: Position, answer: GreedyAnswer | None = None) -> Scores:
    result = Scores({"kind": "hand"}, "by hand", {"w": list(positions)})
    if answer is not None:
        result.answers["w"] = answer
    return result


def test_kl_of_known_distributions() -> None:
    a, b = position(1, None, t1=0.5, t2=0.3), position(1, None, t1=0.4, t3=0.4)
    # Only token 1 is reported by both: the partition is {1} and the rest.
    kl, mass = divergence(a, b)
    assert kl == pytest.approx(0.5 * math.log(0.5 / 0.4) + 0.5 * math.log(0.5 / 0.6))
    assert mass == pytest.approx(0.5)
    assert divergence(a, a)[0] == pytest.approx(0.0, abs=1e-12)


def test_kl_is_a_lower_bound_that_more_alternatives_close() -> None:
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.randn(500, generator=generator).mul(2).log_softmax(-1) for _ in range(2))
    full = (p.exp() * (p - q)).sum().item()

    def top(values: torch.Tensor, count: int) -> Position:
        best = values.topk(count)
        return Position(1, None, dict(zip(best.indices.tolist(), best.values.tolist(), strict=True)))

    found = [divergence(top(p, count), top(q, count))[0] for count in (5, 50, 500)]
    assert found[0] <= found[1] <= found[2] + 1e-6
    assert found[2] == pytest.approx(full, rel=1e-4)
    assert found[1] < full


def test_top1_gap_loss_and_answers() -> None:
    a = scores(
        position(1, math.log(0.5), t1=0.5, t2=0.4),
        position(2, math.log(0.2), t1=0.6, t2=0.3),
        answer=GreedyAnswer([1, 2], [{1: -0.1}, {2: -0.5, 3: -0.6}]),
    )
    b = scores(
        position(1, math.log(0.4), t1=0.4, t2=0.5),
        position(2, math.log(0.2), t1=0.6, t2=0.3),
        answer=GreedyAnswer([1, 3], [{1: -0.1}, {3: -0.5, 2: -0.6}]),
    )
    found = figures(a, b, TASK, near_tie=0.3)
    assert (found.positions, found.differing, found.near_ties, found.top1) == (2, 1, 1, 0.5)
    assert found.gap == pytest.approx(math.log(0.5 / 0.4))
    assert found.loss_difference == pytest.approx(math.log(0.5 / 0.4) / 2)
    assert (found.answers, found.answers_equal, found.parted_at) == (1, 0, 1)
    assert found.answer_gap == pytest.approx(0.1)
    strict = figures(a, b, TASK, near_tie=0.05)
    assert (strict.beyond, strict.parted) == (0.5, 1.0)
    assert [row.ok for row in rows(strict, Limits())][-2:] == [False, False]
    ok = {row.name: row.ok for row in rows(found, Limits())}
    assert ok == {
        "top-1 agreement, exact ties aside": False,
        "top-1 agreement, ties counted": False,
        "KL, mean (nats)": False,
        "loss difference (nats)": False,
        "top-1 differences beyond near-ties": True,
        "answers that part beyond near-ties": True,
    }


def test_equal_likeliest_tokens_are_no_difference() -> None:
    """16-bit logits are often exactly equal; which of two equal ones comes first says nothing."""
    tied = position(1, math.log(0.4), t2=0.4, t1=0.4)
    found = figures(scores(tied), scores(position(1, math.log(0.4), t1=0.41, t2=0.4)), TASK, near_tie=0.5)
    assert (found.differing, found.ties) == (0, 1)
    # Nothing can hide in them, all the same: they are judged by a limit of their own.
    ok = {row.name: row.ok for row in rows(found, Limits())}
    assert ok["top-1 agreement, exact ties aside"]
    assert not ok["top-1 agreement, ties counted"]


def test_a_choice_that_the_other_does_not_list_is_no_near_tie() -> None:
    a, b = position(1, None, t9=0.9), position(1, None, t1=0.99, t2=0.001)
    assert gap(a, b) == pytest.approx(math.log(990))


def test_unreported_targets_give_no_perplexity() -> None:
    a, b = scores(position(1, None, t1=0.5)), scores(position(1, -1.0, t1=0.5))
    found = figures(a, b, TASK, near_tie=0.5)
    assert found.loss_a is None
    assert found.loss_difference is None
    assert "loss" not in " ".join(row.name for row in rows(found, Limits()))


def test_nothing_in_common_is_refused() -> None:
    with pytest.raises(ConfigError, match="share no scored position"):
        figures(scores(position(1, None, t1=0.5)), scores(position(2, None, t1=0.5)), TASK, near_tie=0.5)


def test_records_come_back(tmp_path) -> None:
    answer = GreedyAnswer([1, 2], [{1: -0.25}, {2: -0.5, 3: -0.75}])
    written = scores(position(1, -0.5, t1=0.5, t2=0.25), answer=answer)
    write_scores(tmp_path / "r.xz", TASK, written)
    task, found = read_scores(tmp_path / "r.xz")
    assert task == TASK
    assert found.answers == written.answers
    assert dataclasses.asdict(figures(found, written, TASK, 0.5))["kl"] == pytest.approx(0.0, abs=1e-6)
    (tmp_path / "r.xz").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="not a record of scores"):
        read_scores(tmp_path / "r.xz")


def test_a_record_keeps_the_last_bit(tmp_path) -> None:
    """A gap of one unit in the last place is no tie, in a record as in memory."""
    first = np.float32(-0.7)
    top = {7: float(first), 3: float(np.nextafter(first, np.float32(-9))), 5: -20.0, 8: float(np.float32(-1e-9))}
    written = scores(Position(1, top[3], top), answer=GreedyAnswer([7], [top]))
    write_scores(tmp_path / "r.xz", TASK, written)
    _, found = read_scores(tmp_path / "r.xz")
    assert (found.windows, found.answers) == (written.windows, written.answers)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_what_is_no_number_is_named_by_text_and_position(value: float) -> None:
    good = position(1, -1.0, t1=0.5)
    require_finite("E", scores(good, Position(2, None, {1: -0.1})))
    for wrong in (Position(2, value, {1: -0.1}), Position(2, None, {1: -0.1, 2: value})):
        with pytest.raises(NotFinite, match=rf"E gives a log-probability of {value} at position 2 of w and at 0 other"):
            require_finite("E", scores(good, wrong))
    with pytest.raises(NotFinite, match="token 1 of the answer to w"):
        require_finite("E", scores(good, answer=GreedyAnswer([1, 1], [{1: -0.1}, {1: value}])))
