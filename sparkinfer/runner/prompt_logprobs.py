"""Log-probabilities of prompt tokens: what a pass already computes for them, put through the output matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparkinfer.models.qwen3_5 import Batch
from sparkinfer.scheduling.types import Request, StepPlan, TokenLogprobs

Report = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""(logprob [n], rank [n], top ids [n, k], top logprobs [n, k]) as the operation `logprobs` gives them."""
CHUNK = 256
"""Positions that go through the output matrix at once: the logits of a long prompt would not fit in memory."""


@dataclass(slots=True)
class Share:
    """The positions [start, start + count) of one request's prompt whose logprobs a pass yields.

    `first` is where the token before `start` lies among the pass's tokens: a token's row predicts the next one.
    """

    request: Request
    start: int
    count: int
    first: int


def shares(plan: StepPlan, batch: Batch) -> list[Share]:
    """What the pass of a plan contributes, in the order of its tokens; empty for nearly every pass."""
    if batch.prefill is None:
        return []
    wanted = {
        row.slot: row
        for row in plan.prefill
        if row.request.sampling.prompt_logprobs is not None and not row.request.output
    }
    if not wanted:
        return []
    found = []
    for slot, span in zip(batch.prefill.slots.tolist(), batch.prefill.spans, strict=True):
        row = wanted.get(slot)
        if row is not None:
            # The last token's row predicts the first output, which is reported as such.
            count = min(row.length, len(row.request.prompt) - 1 - row.start)
            if count > 0:
                found.append(Share(row.request, row.start + 1, count, batch.num_decode + span.first))
    return found


def places(found: list[Share], device: torch.device) -> torch.Tensor:
    """Indices among the pass's tokens of the rows that `score` needs, [n] int64."""
    return torch.cat([torch.arange(share.first, share.first + share.count) for share in found]).to(device)


def score(
    found: list[Share],
    hidden: torch.Tensor,
    logits: Callable[[torch.Tensor], torch.Tensor],
    report: Callable[[torch.Tensor, torch.Tensor, int], Report],
) -> list[Report]:
    """Reports on the rows of `places`, in chunks.

    Args:
        found: the pass's shares.
        hidden: [n, H] final hidden states at `places`.
        logits: the output matrix, [m, H] to [m, V] fp32.
        report: the operation `logprobs`.
    """
    targets = [token for share in found for token in share.request.prompt[share.start : share.start + share.count]]
    tokens = torch.tensor(targets, device=hidden.device)
    top = max(share.request.sampling.prompt_logprobs or 0 for share in found)
    return [
        report(logits(hidden[at : at + CHUNK]), tokens[at : at + CHUNK], top) for at in range(0, len(targets), CHUNK)
    ]


def store(found: list[Share], reports: list[Report]) -> None:
    """Bring the reports to the host and write them into the requests. A position computed again is overwritten."""
    chosen, rank, ids, values = (torch.cat(parts).tolist() for parts in zip(*reports, strict=True))
    place = 0
    for share in found:
        request = share.request
        if request.prompt_logprobs is None:
            request.prompt_logprobs = [None] * len(request.prompt)
        top = request.sampling.prompt_logprobs or 0
        for position in range(share.start, share.start + share.count):
            entry = TokenLogprobs(chosen[place], rank[place], ids[place][:top], values[place][:top])
            request.prompt_logprobs[position] = entry
            place += 1
