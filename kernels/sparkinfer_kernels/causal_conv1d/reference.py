"""Plain torch depthwise causal convolution of width W followed by SiLU, channels last.

A sequence's window is its last W-1 inputs, oldest first; an all-zero window starts a sequence. The result of a position
is sum over j of weight[j] * input[position - (W-1) + j], so weight[W-1] meets the position itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sparkinfer_kernels.linear.reference import bfloat16_instructions

ONE_PASS_FROM = 256
"""Tokens from which oneDNN's convolution takes bfloat16 on a CPU; its call costs more than it saves for fewer."""


def causal_conv1d_varlen(
    x: torch.Tensor,
    windows: torch.Tensor,
    weight: torch.Tensor,
    lengths: Sequence[int],
    saves: Sequence[tuple[int, int, torch.Tensor]] = (),
    steady: bool = False,
) -> torch.Tensor:
    """Convolve packed sequences, each from its own window; the windows are updated in place.

    Args:
        x: [T, C], the sequences one after another.
        windows: [R, W-1, C], overwritten by each sequence's last W-1 inputs.
        weight: [W, C] fp32.
        lengths: R lengths, each at least 1, T in sum.
        saves: (r, n, destination [W-1, C]): the window of sequence r after its first n tokens is copied there.
        steady: one way for any number of tokens, in fp32.

    Returns:
        [T, C], fp32; bfloat16 when `x` is and the CPU has instructions for it, unless `steady`.
    """
    back = weight.shape[0] - 1
    pieces: list[torch.Tensor] = []
    for window, part in zip(windows, x.split(list(lengths)), strict=True):
        pieces += (window, part)
    padded = torch.cat(pieces)
    starts = []
    position = 0
    for length in lengths:
        starts.append(position)
        position += length + back
    y = F.silu(_convolve(padded, weight, steady), inplace=True)
    for row, count, destination in saves:
        destination.copy_(padded[starts[row] + count : starts[row] + count + back], non_blocking=True)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        windows[row].copy_(padded[start + length : start + length + back])
    if len(starts) == 1:
        return y
    return torch.cat([y[start : start + length] for start, length in zip(starts, lengths, strict=True)])


def _convolve(x: torch.Tensor, weight: torch.Tensor, steady: bool) -> torch.Tensor:
    """[T + W - 1, C] to [T, C]."""
    taps, channels = weight.shape
    low = _rounds(x, steady)
    if low and x.shape[0] >= ONE_PASS_FROM:
        # oneDNN's depthwise convolution: one pass instead of one for each tap.
        image = x.view(1, 1, -1, channels).permute(0, 3, 1, 2)
        kernel = weight.t().to(x.dtype).view(channels, 1, 1, taps)
        return F.conv2d(image, kernel, groups=channels).permute(0, 2, 3, 1).view(-1, channels)
    wide, total = x.float(), x.shape[0] - taps + 1
    y = wide[:total] * weight[0]
    for tap in range(1, taps):
        y.addcmul_(wide[tap : tap + total], weight[tap])
    # Rounded as above: a token's result does not depend on how many there are.
    return y.to(x.dtype) if low else y


def causal_conv1d_update(
    x: torch.Tensor,
    pool: torch.Tensor,
    weight: torch.Tensor,
    runs: Sequence[tuple[int, int, int]],
    steady: bool = False,
) -> torch.Tensor:
    """One token for each of n sequences; their windows in `pool` advance by one in place.

    Args:
        x: [n, C].
        pool: [slots, W-1, C], windows by slot.
        weight: [W, C] fp32.
        runs: (row, slot, count): rows row.. live in slots slot.., `count` of them; together all n rows, in order.
        steady: as in `causal_conv1d_varlen`, so that a token's result is the same whichever computed it.

    Returns:
        [n, C] fp32.
    """
    windows = [pool[slot : slot + count] for _, slot, count in runs]
    history = torch.cat((windows[0] if len(runs) == 1 else torch.cat(windows), x.unsqueeze(1)), dim=1)
    y = (history.float() * weight).sum(dim=1)
    for row, slot, count in runs:
        pool[slot : slot + count].copy_(history[row : row + count, 1:])
    if _rounds(x, steady):
        return F.silu(y.to(x.dtype), inplace=True).float()
    return F.silu(y, inplace=True)


def _rounds(x: torch.Tensor, steady: bool) -> bool:
    """Whether results are rounded to the inputs' bfloat16."""
    return not steady and x.dtype == torch.bfloat16 and x.device.type == "cpu" and bfloat16_instructions()
