"""An OpenAI-compatible server over HTTP.

Windows are scored in one request each where the server reports log-probabilities of prompt tokens (`prompt_logprobs`:
this project's server and vLLM). Elsewhere a fixed sample of positions is asked for one by one: the tokens before it as
the prompt, one greedy token, its alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import httpx

from sparkinfer.errors import ConfigError, EnvironmentProblem
from sparkinfer_eval.progress import progress

from .engines import describe
from .held_out import Task
from .scores import GreedyAnswer, Position, Scores

TOP = 20
"""The most that vLLM and this project's server give by default."""
STRIDE = 16
"""Every so many positions are asked for where prompts are not scored at once."""
AT_ONCE = 4
TIMEOUT_S = 600.0
METHODS = ("auto", "prompt", "next")
TOKEN_PREFIX = "token_id:"

Item = TypeVar("Item")
Result = TypeVar("Result")


class ServerEngine:
    """One running server.

    Raises:
        EnvironmentProblem: it does not answer.
        ConfigError: it has no such model.
    """

    def __init__(self, url: str, model: str | None, method: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False)
        self.url, self._method = url, method
        listed = self._get("/v1/models").get("data") or []
        names = [entry.get("id") for entry in listed]
        if model is not None and model not in names:
            raise ConfigError(f"{url} has no model {model!r}: it lists {', '.join(map(str, names)) or 'none'}")
        if not listed:
            raise ConfigError(f"{url} lists no model: name one with --model-a or --model-b")
        entry = listed[names.index(model)] if model is not None else listed[0]
        self.model = str(entry["id"])
        self.context: int | None = entry.get("max_model_len")
        self.about = describe("server", model=self.model, **self._version())

    def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = self._client.get(path)
            answer.raise_for_status()
            return dict(answer.json())
        except (httpx.HTTPError, ValueError) as error:
            raise EnvironmentProblem(f"{self.url}{path} does not answer as it should ({error}): is it up?") from error

    def _version(self) -> dict[str, Any]:
        """Which server it is, by the two endpoints that are known."""
        try:
            info = self._client.get("/v1/info")
            if info.status_code == 200:
                facts = info.json()
                engine = facts.get("engine", {})
                return {
                    "name": "sparkinfer",
                    **{key: facts.get(key) for key in ("version", "engine_digest", "model_digest")},
                    **{key: engine.get(key) for key in ("dtype", "device", "torch")},
                }
            version = self._client.get("/version")
            listed = self._client.get("/metrics")
            name = "vLLM" if listed.status_code == 200 and "vllm:" in listed.text else None
            return {"name": name, "version": version.json().get("version") if version.status_code == 200 else None}
        except (httpx.HTTPError, ValueError) as error:
            raise EnvironmentProblem(f"{self.url} does not answer as it should ({error}): is it up?") from error

    def _post(self, body: dict[str, Any]) -> httpx.Response:
        try:
            return self._client.post("/v1/completions", json={"model": self.model, "temperature": 0, **body})
        except httpx.HTTPError as error:
            raise EnvironmentProblem(f"{self.url}/v1/completions failed: {error or type(error).__name__}") from error

    def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        """The only choice of an answer. Raises EnvironmentProblem for any other answer."""
        answer = self._post(body)
        if answer.status_code != 200:
            raise EnvironmentProblem(f"{self.url}/v1/completions answered {answer.status_code}: {answer.text[:300]}")
        try:
            return dict(answer.json()["choices"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise EnvironmentProblem(f"{self.url}/v1/completions: not a completion: {answer.text[:200]}") from error

    def score(self, task: Task) -> Scores:
        """Score all windows, then answer all prompts."""
        if self._scores_prompts(next(iter(task.windows.values()))):
            scores = Scores(self.about, f"prompt_logprobs, {TOP} alternatives")
            rows = self._map(self._window, task.windows.values(), len(task.windows), "windows")
            scores.windows = dict(zip(task.windows, rows, strict=True))
        else:
            scores = Scores(self.about, f"next token at every position that 16 divides, {TOP} alternatives")
            asked = [(n, ids, p) for n, ids in task.windows.items() for p in range(STRIDE, len(ids), STRIDE)]
            found = self._map(lambda a: self._next(a[1], a[2]), asked, len(asked), "positions")
            for (name, _, _), position in zip(asked, found, strict=True):
                scores.windows.setdefault(name, []).append(position)
        answers = self._map(
            lambda ids: self._ask(ids, task.answer_tokens), task.prompts.values(), len(task.prompts), "answers"
        )
        scores.answers = dict(zip(task.prompts, answers, strict=True))
        return scores

    def _map(self, call: Callable[[Item], Result], items: Iterable[Item], total: int, what: str) -> list[Result]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(progress(pool.map(call, items), total, what))

    def _scores_prompts(self, ids: list[int]) -> bool:
        """Whether prompts are to be scored at once. Raises ConfigError when that was asked for and is not there."""
        if self._method == "next":
            return False
        answer = self._post({"prompt": ids[:8], "max_tokens": 1, "prompt_logprobs": 1})
        works = answer.status_code == 200 and bool(answer.json()["choices"][0].get("prompt_logprobs"))
        if not works and self._method == "prompt":
            raise ConfigError(
                f"{self.url} does not report prompt_logprobs ({answer.status_code}: {answer.text[:200]}): "
                "use --method next"
            )
        return works

    def _window(self, ids: list[int]) -> list[Position]:
        choice = self._choice({"prompt": ids, "max_tokens": 1, "prompt_logprobs": TOP})
        rows = choice["prompt_logprobs"]
        if len(rows) != len(ids):
            raise EnvironmentProblem(f"{self.url} scored {len(rows)} of {len(ids)} prompt tokens")
        positions = []
        for place, row in enumerate(rows[1:], 1):
            values = {int(token): _logprob(entry["logprob"]) for token, entry in row.items()}
            ranked = dict(sorted(values.items(), key=lambda item: -item[1]))
            positions.append(Position(place, values[ids[place]], ranked))
        return positions

    def _next(self, ids: list[int], place: int) -> Position:
        answer = self._ask(ids[:place], 1)
        top = answer.tops[0]
        return Position(place, top.get(ids[place]), top)

    def _ask(self, prompt: list[int], count: int) -> GreedyAnswer:
        """A greedy answer with its alternatives. Raises EnvironmentProblem when tokens are not named by id."""
        body = {"prompt": prompt, "max_tokens": count, "logprobs": TOP, "return_tokens_as_token_ids": True}
        choice = self._choice({**body, "ignore_eos": True})
        logprobs = choice.get("logprobs") or {}
        tokens = [_token(self.url, name) for name in logprobs.get("tokens") or []]
        tops = [
            dict(sorted(((_token(self.url, n), _logprob(v)) for n, v in top.items()), key=lambda item: -item[1]))
            for top in logprobs.get("top_logprobs") or []
        ]
        if not tokens or len(tokens) != len(tops):
            raise EnvironmentProblem(f"{self.url} answered without log-probabilities: {str(choice)[:200]}")
        return GreedyAnswer(tokens, tops)


def _token(url: str, name: str) -> int:
    if not name.startswith(TOKEN_PREFIX):
        raise EnvironmentProblem(
            f"{url} names tokens by text ({name!r}), which is not unique: it has to know return_tokens_as_token_ids"
        )
    return int(name.removeprefix(TOKEN_PREFIX))


def _logprob(value: float | None) -> float:
    """A reported log-probability: servers write NaN, which JSON lacks, as null."""
    return math.nan if value is None else float(value)
