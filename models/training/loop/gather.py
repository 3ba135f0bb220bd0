"""Embeddings of every process, with gradients: the batch that negatives come from.

Why the gradients are right. Process r of W computes the loss L_r of its own n rows against all W n
gathered ones; the loss of the joint batch is L = (1/W) sum_r L_r. What all these losses say of
process q's embeddings e_q is sum_r dL_r/de_q = W dL/de_q, and the backward pass here adds it up.
DistributedDataParallel then averages weights' gradients over processes:
(1/W) sum_q (W dL/de_q) de_q/dw = dL/dw, which is what one process with the whole batch computes.
A weight that is used behind the gathering, such as a temperature, has dL_r/dw on process r, and so
the same on average.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(rows: Tensor) -> Tensor:
    """(n, ...) of each process to (W n, ...), in the processes' order; itself where there is one.

    Every process must give the same shape and must run backward through it where another does.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    if rows.is_floating_point():
        gathered: Tensor = _Gathered.apply(rows)  # type: ignore[no-untyped-call]
        return gathered
    return _all(rows)


def _all(rows: Tensor) -> Tensor:
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.count = len(rows)
        return _all(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed)
        first = dist.get_rank() * ctx.count
        return summed[first : first + ctx.count]
