"""The model as `transformers` runs it, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sparkinfer.errors import EnvironmentProblem
from sparkinfer.identity import model_digest
from sparkinfer_eval.check_program import NotApplicable
from sparkinfer_eval.progress import progress

from .engines import describe
from .held_out import Task
from .scores import GreedyAnswer, Scores, positions_from

TOP = 256
ANSWER_TOP = 20


class TransformersModel:
    """Loads a model folder.

    Raises:
        NotApplicable: transformers does not read this checkpoint.
        EnvironmentProblem: the device is absent.
    """

    def __init__(self, folder: Path, dtype: str = "auto", device: str = "cpu") -> None:
        import transformers

        if device != "cpu" and not torch.cuda.is_available():
            raise EnvironmentProblem(f"device {device}: torch {torch.__version__} finds no CUDA device here; use cpu")
        transformers.utils.logging.set_verbosity_error()
        chosen = dtype if dtype == "auto" else getattr(torch, dtype)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=chosen, local_files_only=True)
        except (ImportError, ValueError, OSError, KeyError) as error:
            text = str(error).splitlines()[0]
            raise NotApplicable(f"transformers {transformers.__version__} does not load {folder}: {text}") from error
        self.model: Any = model.eval()
        self.model.to(device)
        self.device = device
        self.context: int | None = None
        self.about = describe(
            "transformers",
            version=transformers.__version__,
            model=folder.name,
            model_digest=model_digest(folder.resolve()),
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=device,
            torch=str(torch.__version__),
        )

    @torch.inference_mode()
    def score(self, task: Task) -> Scores:
        """Each window in one forward pass, answers token by token over the model's cache."""
        scores = Scores(self.about, f"one forward pass, {TOP} alternatives")
        for name, ids in progress(task.windows.items(), len(task.windows), "windows"):
            tokens = torch.tensor([ids], device=self.device)
            logprobs = self.model(tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            target = logprobs.gather(1, tokens[0, 1:, None])[:, 0]
            values, top = logprobs.topk(min(TOP, logprobs.shape[-1]), dim=-1)
            scores.windows[name] = positions_from(ids, target.cpu().numpy(), top.cpu().numpy(), values.cpu().numpy())
        for name, ids in progress(task.prompts.items(), len(task.prompts), "answers"):
            scores.answers[name] = self._answer(ids, task.answer_tokens)
        return scores

    def _answer(self, prompt: list[int], count: int) -> GreedyAnswer:
        answer, past, step = GreedyAnswer([], []), None, prompt
        for _ in range(count):
            out = self.model(torch.tensor([step], device=self.device), past_key_values=past, use_cache=True)
            past = out.past_key_values
            values, ids = out.logits[0, -1].float().log_softmax(-1).topk(min(ANSWER_TOP, out.logits.shape[-1]))
            answer.tops.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
            step = [int(ids[0])]
            answer.tokens.extend(step)
        return answer
