"""`mixed_conc_check` passes on the real server, and fails on one whose mixed steps have a fault."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest
from sparkinfer_eval import launch, mixed_conc
from sparkinfer_eval.agreement import Answer, differences
from sparkinfer_eval.check_program import parser
from sparkinfer_eval.mixed_conc import Launched, Tolerance
from sparkinfer_eval.toy_model import ToySize, generate

from sparkinfer.errors import EnvironmentProblem
from sparkinfer.models.config import load_config

sys.path.insert(0, str(Path(__file__).parent))
from planted_server import FAULTS

PLANTED = Path(__file__).with_name("planted_server.py")
LEAST = mixed_conc.Least(mixed_steps=1, cached=24)
"""Of launches that are made up."""
TRAINED = Path(__file__).parents[2] / "models" / "spark-tiny-dense"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "dense"
    size = ToySize(
        hidden=64, heads=2, head_dim=32, linear_key_heads=1, linear_value_heads=2, linear_head_dim=32, ffn=96,
        vocab=1024, max_positions=800,
    )  # fmt: skip
    generate("dense", folder, size=size)
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tests share two cores: threads that wait for each other would take minutes."""
    inner = launch.environment
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "environment", lambda settings: {**inner(settings), "SPARKINFER_THREADS": "1"})
        yield


def test_mixing_changes_no_token(model, tmp_path, capsys):
    out = tmp_path / "check.json"
    assert mixed_conc.main([str(model), "--dtype", "float32", "--json", str(out)]) == 0, capsys.readouterr().out
    document = json.loads(out.read_text())
    assert (document["check"], document["dtype"], document["ok"]) == ("mixed_conc_check", "float32", True)
    rows = {row["name"]: row["value"] for row in document["rows"]}
    assert rows["mixing on: mixed steps (at least)"] >= 9
    assert rows["mixing off: mixed steps"] == 0
    assert "warm logprobs: answers that differ of 8" in rows


def test_tokens_are_compared_that_are_likely_or_near_the_likeliest():
    flat = [{b"a": -7.0, b"b": -7.5, b"c": -8.5}], [{b"a": -7.1, b"b": -7.3, b"c": -8.9}]
    one, other = (Answer([b"a"], tops) for tops in flat)
    assert sorted(differences(one, other)) == pytest.approx([0.1, 0.2])
    peaked = [{b"a": -0.1, b"b": -4.0, b"c": -5.0}], [{b"a": -0.1, b"b": -4.3, b"c": -5.6}]
    one, other = (Answer([b"a"], tops) for tops in peaked)
    assert sorted(differences(one, other)) == pytest.approx([0.0, 0.3])
    assert differences(Answer([b"a"], [{}]), Answer([b"a"], [{}])) == []


def options_for(model, dtype):
    return parser(mixed_conc.CHECK, None).parse_args([str(model), "--dtype", dtype])


def of_dtype(model, dtype):
    """In 16 bits a trained model: a random one's answers say little about its context, and rounding hides that."""
    return model if dtype == "float32" else TRAINED


@pytest.fixture(scope="module")
def unmixed(model):
    """By dtype: request bodies, the launch without mixing, and the limits."""

    @functools.cache
    def made(dtype):
        folder, exact = of_dtype(model, dtype), dtype == "float32"
        options = options_for(folder, dtype)
        bodies = mixed_conc.chats(folder, load_config(folder), exact)
        off = mixed_conc.launched(options, mixed_conc.OFF, bodies, exact)
        if exact:
            return bodies, off, mixed_conc.EXACT
        others = [
            mixed_conc.launched(options, mixed_conc.OFF | each.settings, bodies, exact, each.reverse)
            for each in mixed_conc.CALIBRATIONS
        ]
        return bodies, off, mixed_conc.calibrated(off, others)[0]

    return made


CASES = [("bfloat16", None), *(("bfloat16", fault) for fault in FAULTS)]
SLOW_CASES = [pytest.param("float32", fault, marks=pytest.mark.slow) for fault in FAULTS]


@pytest.mark.parametrize(("dtype", "fault"), [*CASES, *SLOW_CASES])
def test_faults_of_mixed_steps_are_caught(model, unmixed, monkeypatch, dtype, fault):
    """In 16 bits too, where rounding has to be excused; without a fault nothing differs."""
    bodies, off, limits = unmixed(dtype)
    if fault is not None:
        monkeypatch.setattr(launch, "COMMAND", (sys.executable, str(PLANTED), "serve"))
        monkeypatch.setenv("PLANTED_FAULT", fault)
    folder = of_dtype(model, dtype)
    on = mixed_conc.launched(options_for(folder, dtype), mixed_conc.ON, bodies, dtype == "float32")
    rows = mixed_conc.rows_of(off, on, limits, mixed_conc.least(load_config(folder).max_positions))
    differing = [row.name for row in rows if not row.ok]
    assert not any("mixed steps" in name or "cached tokens" in name for name in differing), differing
    assert bool(differing) == (fault is not None), "\n".join(
        f"{row.name} {row.value:.4g} {row.limit:.4g}" for row in rows
    )


def test_limits_follow_what_was_measured():
    """Quantiles of all launches together, with a floor; a calibration that mixed is refused."""

    def shifted(by: float, mixed: int = 0) -> Launched:
        return launched([{b"a": -0.5 - by, b"b": -2.0}], [b"a"], mixed)

    off = shifted(0.0)
    limits, rows = mixed_conc.calibrated(off, [shifted(0.0), shifted(0.0)])
    assert limits == Tolerance(mixed_conc.LEAST_TOLERANCE, (mixed_conc.LEAST_TOLERANCE,) * 2)
    limits, rows = mixed_conc.calibrated(off, [shifted(0.1), shifted(0.2)])
    assert limits.largest == pytest.approx(mixed_conc.SAFETY * 0.2)
    assert [row.value for row in rows] == [pytest.approx(0.1), pytest.approx(0.2)]
    with pytest.raises(EnvironmentProblem, match="3 steps were mixed"):
        mixed_conc.calibrated(off, [shifted(0.1, mixed=3), shifted(0.2)])
    assert [mixed_conc.quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.25, 0.5, 0.99, 1.0)] == [1, 2, 4, 4]
    assert mixed_conc.quantile([], 0.5) == 0.0


def launched(tops: list[dict[bytes, float]], tokens: list[bytes], mixed: int = 1) -> Launched:
    """24 equal answers in both waves."""
    return Launched([[Answer(tokens, tops)] * mixed_conc.CHATS] * 2, mixed, 100.0)


def test_many_small_shifts_are_seen_although_none_is_large():
    """A fault that moves every distribution a little is no rounding, whatever the largest difference may be."""
    limits = Tolerance(0.5, (0.05, 0.2))
    off, on = launched([{b"a": -0.5, b"b": -2.0}], [b"a"], 0), launched([{b"a": -0.6, b"b": -2.1}], [b"a"])
    failed = [row.name for row in mixed_conc.rows_of(off, on, limits, LEAST) if not row.ok]
    assert failed == ["99.0% of 96 logprob differences"]


def test_near_ties_may_part_in_16_bits_only():
    off = launched([{b"a": -0.70, b"b": -0.71}], [b"a"], 0)
    on = launched([{b"a": -0.71, b"b": -0.70}], [b"b"])
    assert all(row.ok for row in mixed_conc.rows_of(off, on, Tolerance(0.02, (0.02, 0.02)), LEAST))
    failed = [row.name for row in mixed_conc.rows_of(off, on, mixed_conc.EXACT, LEAST) if not row.ok]
    assert "cold greedy: answers that differ of 8" in failed
    assert "warm seeded: answers that differ of 8" in failed
    assert any("logprob" in name for name in failed)


def test_launches_that_did_not_do_their_part_are_no_pass():
    same = launched([{b"a": -0.1}], [b"a"], 0)
    assert [row.name for row in mixed_conc.rows_of(same, same, Tolerance(0.02, (0.02, 0.02)), LEAST) if not row.ok] == [
        "mixing on: mixed steps (at least)"
    ]


def test_what_launches_must_have_done_follows_the_context():
    assert mixed_conc.least(16384) == mixed_conc.Least(mixed_steps=22, cached=4000)
    few = Launched([[Answer([b"a"], [{b"a": -0.1}])] * mixed_conc.CHATS] * 2, 21, 3999.0)
    off = Launched(few.answers, 0, 4000.0)
    failed = [row.name for row in mixed_conc.rows_of(off, few, mixed_conc.EXACT, mixed_conc.least(16384)) if not row.ok]
    assert failed == ["mixing on: mixed steps (at least)", "mixing on: cached tokens (at least)"]


def test_turns_scale_to_the_context():
    system, turns = mixed_conc.turn_lengths(16384)
    assert (system, min(turns), max(turns), len(turns)) == (200, 4, 1500, 24)
    system, turns = mixed_conc.turn_lengths(800)
    assert system + max(turns) + mixed_conc.OUTPUT < 800
    with pytest.raises(mixed_conc.NotApplicable):
        mixed_conc.turn_lengths(100)


def test_bad_input(models, tmp_path, capsys):
    assert mixed_conc.main([str(tmp_path / "absent")]) == 2
    assert mixed_conc.main([str(models / "dense")]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_a_server_that_does_not_start_says_why(model, capsys):
    assert mixed_conc.main([str(model), "--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
