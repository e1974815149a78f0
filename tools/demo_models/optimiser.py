"""Muon for the weight matrices and AdamW for the rest, with one warm-up, stable, decay schedule.

torch.optim.Muon takes only single matrices and orthogonalises in bfloat16, which is ten times
slower on CPUs without bfloat16 units. This one takes stacks of experts and uses float32 on CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from tools.demo_models.workers import Workers

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5

WARMUP, DECAY = 0.02, 0.6
"""Shares of a run in which the learning rate rises and in which it falls."""


def orthogonalise(matrices: Tensor) -> Tensor:
    """Approximates the nearest orthogonal matrices by Newton-Schulz; [..., rows, columns].

    From Muon (Keller Jordan, 2024). The result's singular values are between about 0.7 and 1.2.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum, for parameters of two or three dimensions."""

    def __init__(
        self,
        parameters: list[nn.Parameter],
        workers: Workers,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        self._workers = workers
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Applies one update; `closure` is not supported."""
        assert closure is None
        for group in self.param_groups:
            parameters = cast(list[nn.Parameter], group["params"])
            with_gradient = [p for p in parameters if p.grad is not None]
            self._workers.map(partial(self._update, group), with_gradient)

    @torch.no_grad()
    def _update(self, group: dict[str, Any], parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum = state["momentum"]
        momentum.lerp_(parameter.grad, 1 - group["momentum"])
        update = orthogonalise(parameter.grad.lerp(momentum, group["momentum"]))
        rows, columns = parameter.shape[-2:]
        scale = max(1.0, rows / columns) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * scale)


class Optimiser:
    """Muon and AdamW as one optimiser with one state."""

    def __init__(self, model: nn.Module, workers: Workers) -> None:
        matrices, embeddings, heads, vectors = _split(model)
        adam_groups = [
            {"params": embeddings, "lr": 0.008},
            {"params": heads, "lr": 0.002},
            {"params": vectors, "lr": 0.002},
        ]
        self._parts: list[torch.optim.Optimizer] = [
            Muon(matrices, workers, lr=0.01, momentum=0.95, weight_decay=0.02),
            torch.optim.AdamW(
                [g for g in adam_groups if g["params"]],
                betas=(0.9, 0.98),
                eps=1e-10,
                weight_decay=0.0,
                fused=True,
            ),
        ]
        for part in self._parts:
            for group in part.param_groups:
                group["peak_lr"] = group["lr"]

    def step(self, lr_factor: float) -> None:
        """Updates with every learning rate at `lr_factor` times its peak; clears the gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * lr_factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        """The state of both optimisers, for a checkpoint."""
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restores a state that `state_dict` returned."""
        for part, part_state in zip(self._parts, state, strict=True):
            part.load_state_dict(part_state)


Parameters = list[nn.Parameter]


def _split(model: nn.Module) -> tuple[Parameters, Parameters, Parameters, Parameters]:
    """Matrices for Muon; embeddings, heads and vectors (with the routers) for AdamW."""
    matrices: Parameters = []
    embeddings: Parameters = []
    heads: Parameters = []
    vectors: Parameters = []
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            embeddings.append(parameter)
        elif "lm_head" in name:
            heads.append(parameter)
        elif parameter.ndim < 2 or "mlp.gate.weight" in name:
            vectors.append(parameter)
        else:
            matrices.append(parameter)
    return matrices, embeddings, heads, vectors


def lr_factor(progress: float) -> float:
    """The learning rate relative to its peak at `progress` (0..1): warm-up, stable, decay."""
    if progress < WARMUP:
        return (progress + 1e-3) / (WARMUP + 1e-3)
    if progress > 1 - DECAY:
        return max(0.02, (1 - progress) / DECAY)
    return 1.0
