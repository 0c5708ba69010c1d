"""This project's engine in this process: scheduler, runner and sampler as the server drives them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from sparkinfer import __version__
from sparkinfer.engine.build import build_engine
from sparkinfer.engine.ipc import EngineOptions
from sparkinfer.identity import engine_digest, model_digest
from sparkinfer.scheduling.types import Request, SamplingParams, TokenLogprobs, TokenUpdate
from sparkinfer.settings import resolve
from sparkinfer_eval.progress import progress

from .engines import describe
from .held_out import Task
from .scores import GreedyAnswer, Position, Scores

TOP = 256
"""Alternatives per position: no wire limits them here, though a GPU's kernels do."""
ANSWER_TOP = 20
AT_ONCE = 16


class LocalEngine:
    """Loads a model folder; `settings` are texts by field name. Raises SparkinferError when it cannot."""

    def __init__(
        self,
        folder: Path,
        context: int,
        dtype: str = "auto",
        device: str = "cpu",
        load_format: str = "auto",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        given = dict(settings or {})
        chosen = resolve({}, {"max_model_len": str(context), "max_num_seqs": str(AT_ONCE), **given})
        options = EngineOptions(str(folder), chosen, dtype=dtype, device=device, load_format=load_format)
        self._engine = build_engine(options)
        self.context: int | None = context
        self.vocab_size = int(self._engine.info["limits"]["vocab_size"])
        self.about = describe(
            "sparkinfer",
            version=__version__,
            engine_digest=engine_digest(),
            model=folder.name,
            model_digest=model_digest(folder.resolve()),
            dtype=self._engine.info.get("dtype"),
            device=self._engine.info.get("device"),
            torch=self._engine.info.get("torch"),
            settings=" ".join(f"{name}={value}" for name, value in given.items()) or None,
        )

    def score(self, task: Task) -> Scores:
        """All windows in one batch, then all answers: chunks, packing and mixing are the engine's own."""
        top = min(most_alternatives(str(self.about.get("device", "cpu"))), self.vocab_size)
        scores = Scores(self.about, f"prompt log-probabilities, {top} alternatives")
        for name, ids in task.windows.items():
            sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=top)
            self._engine.core.add(Request(name, ids, sampling, use_cache=False))
        for update in progress(self._updates(), len(task.windows), "windows"):
            found = update.request.prompt_logprobs or []
            entries = [(place, entry) for place, entry in enumerate(found) if entry is not None]
            scores.windows[update.request.id] = [Position(p, e.logprob, _top(e)) for p, e in entries]
            update.request.prompt_logprobs = None
        scores.answers = self._answers(task)
        return scores

    def _answers(self, task: Task) -> dict[str, GreedyAnswer]:
        answers: dict[str, GreedyAnswer] = {}
        for name, ids in task.prompts.items():
            sampling = SamplingParams(
                max_tokens=task.answer_tokens,
                temperature=0.0,
                ignore_eos=True,
                logprobs=min(ANSWER_TOP, self.vocab_size),
            )
            self._engine.core.add(Request(name, ids, sampling))
            answers[name] = GreedyAnswer([], [])
        for update in progress(self._updates(), len(task.prompts) * task.answer_tokens, "answer tokens"):
            assert update.token is not None
            assert update.logprobs is not None
            answer = answers[update.request.id]
            answer.tokens.append(update.token)
            answer.tops.append(_top(update.logprobs))
        return answers

    def _updates(self) -> Iterable[TokenUpdate]:
        while self._engine.core.has_work:
            yield from self._engine.core.step()


def most_alternatives(device: str) -> int:
    """How many alternatives the engine reports for a position: as many as asked for on a CPU, few on a GPU."""
    if device.partition(":")[0] == "cpu":
        return TOP
    from sparkinfer_kernels.sampler.gpu import MAX_TOP

    return min(TOP, MAX_TOP)


def _top(entry: TokenLogprobs) -> dict[int, float]:
    return dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
