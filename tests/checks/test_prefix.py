"""`prefix_check` passes on the real engine core and runner, and fails on planted faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sparkinfer_eval import prefix_check
from sparkinfer_eval.agreement import Answer, compare, excused

from sparkinfer.runner import batch as runner_batch
from sparkinfer.scheduling.invariants import IntegrityError
from sparkinfer.scheduling.prefix_cache import PrefixCache
from sparkinfer.scheduling.types import KV_BLOCK_TOKENS, Checkpoint

TRAINED = Path(__file__).parents[2] / "models" / "spark-tiny-dense"


@pytest.mark.parametrize(("name", "dtype"), [("dense", "float32"), ("moe", "float32"), ("trained", "bfloat16")])
def test_warm_equals_cold(models, tmp_path, name, dtype, capsys):
    out = tmp_path / "check.json"
    folder = TRAINED if name == "trained" else models / name
    code = prefix_check.main([str(folder), "--dtype", dtype, "--json", str(out)])
    printed = capsys.readouterr().out
    assert code == 0, "\n".join(line for line in printed.splitlines() if "DIFFERS" in line)
    document = json.loads(out.read_text())
    assert (document["check"], document["dtype"], document["ok"]) == ("prefix_check", dtype, True)
    names = [row["name"] for row in document["rows"]]
    for wanted in ("4 blocks + 17 tokens: cached", "1 tokens behind a checkpoint at 64", "warm crowd, 2 in flight",
                   "after one cancelled in its prompt", "third turn: cached"):  # fmt: skip
        assert any(wanted in name for name in names), wanted


def saved_a_block_early(monkeypatch):
    """The state of another position under a key: what the snapshot holds is one block off."""
    original = runner_batch.BatchBuilder.build

    def build(self, plan):
        right = [row.checkpoints for row in plan.rows]
        for row in plan.rows:
            row.checkpoints = tuple(
                Checkpoint(c.position - KV_BLOCK_TOKENS, c.snapshot)
                if c.position - KV_BLOCK_TOKENS > row.start and not row.is_decode
                else c
                for c in row.checkpoints
            )
        step = original(self, plan)
        for row, checkpoints in zip(plan.rows, right, strict=True):
            row.checkpoints = checkpoints
        return step

    monkeypatch.setattr(runner_batch.BatchBuilder, "build", build)


def not_restored(monkeypatch):
    """A hit goes on from whatever the slot held."""
    original = runner_batch.BatchBuilder.build

    def build(self, plan):
        step = original(self, plan)
        step.restores.clear()
        return step

    monkeypatch.setattr(runner_batch.BatchBuilder, "build", build)


def of_another_block_table(monkeypatch):
    """A hit reads the KV of its second block where the first one's should be."""
    original = runner_batch.BlockTables.update

    def update(self, row):
        original(self, row)
        if row.restore is not None and len(row.blocks) > 1:
            self.array[row.slot, 0] = self.array[row.slot, 1]

    monkeypatch.setattr(runner_batch.BlockTables, "update", update)


def resumed_with_old_state(monkeypatch):
    """A row that begins a sequence keeps what the slot's last user left."""
    original = runner_batch.BatchBuilder.build

    def build(self, plan):
        step = original(self, plan)
        if any(row.request.num_preemptions for row in plan.rows):
            step.fresh.clear()
        return step

    monkeypatch.setattr(runner_batch.BatchBuilder, "build", build)


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [
        (saved_a_block_early, "float32"),
        (saved_a_block_early, "bfloat16"),
        (not_restored, "float32"),
        (of_another_block_table, "float32"),
        (resumed_with_old_state, "float32"),
    ],
)
def test_a_planted_fault_is_caught(models, monkeypatch, capsys, fault, dtype):
    fault(monkeypatch)
    assert prefix_check.main([str(models / "dense"), "--dtype", dtype]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert any("answers that differ" in line or "logprobs" in line for line in lines)
    if fault is resumed_with_old_state:
        assert all("crowd" in line for line in lines)


@pytest.mark.parametrize("fault", ["drop_snapshot", "unpin"])
def test_books_of_interrupted_steps_are_checked(models, monkeypatch, fault):
    """Snapshots of a step whose request was cancelled, or whose cache was reset, are never given back."""
    bench = prefix_check.Bench(models / "dense", "cpu", "float32", 0)
    right, wrong = prefix_check.Judge("float32"), prefix_check.Judge("float32")
    prefix_check.check_in_flight(bench, right)
    assert all(row.ok for row in right.rows), [row.name for row in right.rows if not row.ok]
    assert sum("times" in row.name for row in right.rows) == 12
    monkeypatch.setattr(PrefixCache, fault, lambda *_: None)
    found = False
    try:
        prefix_check.check_in_flight(bench, wrong)
    except IntegrityError:  # Seen by the runs after the interrupted one.
        found = True
    assert found or any("books" in row.name for row in wrong.rows if not row.ok)


def test_a_cache_that_never_hits_is_no_pass(models, monkeypatch, capsys):
    monkeypatch.setattr(PrefixCache, "enabled", property(lambda self: False))
    assert prefix_check.main([str(models / "dense"), "--dtype", "float32"]) == 1
    differing = [line for line in capsys.readouterr().out.splitlines() if "DIFFERS" in line]
    assert differing
    # Not one answer differs: a restore that is to be interrupted never comes, and says so.
    others = [line for line in differing if "cache" not in line]
    assert all("interrupt" in line or "restor" in line for line in others), others


def test_bad_input(models, tmp_path, capsys):
    assert prefix_check.main([str(tmp_path / "absent")]) == 2
    assert prefix_check.main([str(models / "dense"), "--device", "abacus"]) == 2
    capsys.readouterr()


def test_answers_may_only_part_within_rounding():
    one = Answer([1, 2, 3], [{1: -0.1, 2: -3.0}, {2: -0.70, 5: -0.71}, {3: -0.2}])
    near = Answer([1, 5, 9], [{1: -0.11, 2: -3.0}, {2: -0.71, 5: -0.70}, {9: -0.2}])
    found = compare(one, near)
    assert (found.parted, round(found.logprob, 6), round(found.gap, 6)) == (1, 0.01, 0.01)
    assert excused(found, True, 0.02)
    assert not excused(found, True, 0.0), "nothing is excused in float32"
    assert not excused(found, True, 0.004), "the distributions before the parting differ"
    far = Answer([1, 5, 9], [{1: -0.1, 2: -3.0}, {2: -0.71, 5: -0.70}, {9: -0.2}])
    clear = Answer([1, 2, 3], [{1: -0.1}, {2: -0.10, 5: -2.71}, {3: -0.2}])
    assert not excused(compare(clear, far), True, 0.5), "the gap was wide"
    assert not excused(compare(one, Answer([1, 7, 9], near.tops)), True, 0.02), "not among the best"
    assert compare(one, Answer([1, 2], one.tops)).parted == 2
    assert compare(one, one).parted is None


def test_a_session_whose_memory_is_gone_refuses(models):
    bench = prefix_check.Bench(models / "dense", "cpu", "float32", 0)
    first = bench.session()
    bench.cold(bench.tokens(20), bench.sampling(2))
    with pytest.raises(RuntimeError, match="overwritten"):
        first.step()
