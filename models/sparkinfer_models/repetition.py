"""How much a model's sampled answers repeat themselves: the figure behind a card's word on its samples.

Two measures: answers whose end is a phrase said several times in a row, and the share of n-grams that occurred before
in the same answer ("seq-rep-n", Welleck et al. 2019, arXiv 1908.04319), beside that of the text that people
wrote there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TOKENS = 160
"""Length of an answer at most, as in `samples.md`."""
PROMPT = 128
TEMPERATURE = 0.7
SEEDS = (0, 1)
ORDER = 4
TIMES = 3
"""A phrase said so often in a row is a loop."""
LONGEST = 48
"""Tokens of a phrase at most."""
MARK = "Repetition: "
"""Begins the line of `samples.md` that holds the sentence."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Counts over all answers; `text_*` over the held-out text that follows the prompts."""

    answers: int
    loops: int
    grams: int
    repeated: int
    text_grams: int
    text_repeated: int

    def sentence(self) -> str:
        """The figures in words."""
        share, usual = self.repeated / max(1, self.grams), self.text_repeated / max(1, self.text_grams)
        return (
            f"Of {self.answers} answers sampled to the held-out set's prompts (`eval/held_out/`; temperature"
            f" {TEMPERATURE}, {len(SEEDS)} seeds, at most {TOKENS} tokens), {self.loops} end in a phrase of at most"
            f" {LONGEST} tokens said {TIMES} times or more in a row; {share:.1%} of their {ORDER}-grams of tokens had"
            f" occurred before in the same answer, {usual:.1%} in the text that really follows."
        )


def ends_in_loop(tokens: Sequence[int], times: int = TIMES, longest: int = LONGEST) -> bool:
    """Whether the last tokens are one phrase of at most `longest` tokens, `times` in a row."""
    for length in range(1, min(longest, len(tokens) // times) + 1):
        end = list(tokens[len(tokens) - length * times :])
        if end == end[:length] * times:
            return True
    return False


def repeated_grams(tokens: Sequence[int], order: int = ORDER) -> tuple[int, int]:
    """(n-grams that occurred before, n-grams in all)."""
    grams = [tuple(tokens[start : start + order]) for start in range(len(tokens) - order + 1)]
    return len(grams) - len(set(grams)), len(grams)


def repetition(answers: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> Repetition:
    """The counts of these answers and of these texts."""
    ours, theirs = ([repeated_grams(one) for one in group] for group in (answers, texts))
    return Repetition(
        answers=len(answers),
        loops=sum(map(ends_in_loop, answers)),
        grams=sum(total for _, total in ours),
        repeated=sum(count for count, _ in ours),
        text_grams=sum(total for _, total in theirs),
        text_repeated=sum(count for count, _ in theirs),
    )


def measure(folder: Path) -> Repetition:
    """Sample answers of a model folder with this project's engine, bfloat16 as stored, and count.

    Raises:
        SparkinferError: the folder or the held-out set cannot be used.
    """
    from sparkinfer_eval.accuracy.held_out import make_task

    from sparkinfer.engine.build import build_engine
    from sparkinfer.engine.ipc import EngineOptions
    from sparkinfer.models.config import load_config
    from sparkinfer.scheduling.types import Request, SamplingParams
    from sparkinfer.settings import Settings

    task = make_task(folder, PROMPT + TOKENS, TOKENS)
    texts = [ids[PROMPT:] for ids in task.windows.values()]
    chats = {name: ids for name, ids in task.prompts.items() if name not in task.windows}
    prompts = {**{name: ids[:PROMPT] for name, ids in task.windows.items()}, **chats}
    settings = Settings(max_model_len=PROMPT + 2 * TOKENS, max_num_seqs=16)
    engine = build_engine(EngineOptions(str(folder), settings, dtype="auto", device="cpu", load_format="auto"))
    stop = frozenset(load_config(folder).eos_token_ids)
    answers: dict[str, list[int]] = {}
    for name, ids in prompts.items():
        for seed in SEEDS:
            sampling = SamplingParams(max_tokens=TOKENS, temperature=TEMPERATURE, seed=seed)
            engine.core.add(Request(f"{name}/{seed}", ids, sampling, eos_token_ids=stop))
            answers[f"{name}/{seed}"] = []
    while engine.core.has_work:
        for update in engine.core.step():
            if update.token is not None:
                answers[update.request.id].append(update.token)
    return repetition(list(answers.values()), texts)


def write_line(samples: Path, sentence: str) -> None:
    """Put the sentence into `samples.md`, in place of an earlier one."""
    lines = samples.read_text(encoding="utf-8").splitlines()
    old = next((number for number, line in enumerate(lines) if line.startswith(MARK)), None)
    if old is not None:
        lines[old] = MARK + sentence
    else:
        first = next((number for number, line in enumerate(lines) if line.startswith("## ")), len(lines))
        lines[first:first] = [MARK + sentence, ""]
    samples.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_line(samples: Path) -> str:
    """The sentence of `samples.md`, empty where it has none."""
    lines = samples.read_text(encoding="utf-8").splitlines() if samples.is_file() else []
    return next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), "")
