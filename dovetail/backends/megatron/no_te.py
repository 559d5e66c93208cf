"""What megatron-core needs without Transformer Engine, on CUDA and on the CPU. Does nothing where it is installed.

Each change names the fault upstream; `tests/backends_megatron` fails when one of them is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def has_transformer_engine() -> bool:
    """Whether Megatron's own fast modules can be used."""
    return find_spec("transformer_engine") is not None


def work_without_transformer_engine() -> None:
    """Repair what Megatron leaves undefined or broken without it. Idempotent."""
    if has_transformer_engine():
        return
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    from dovetail.backends.megatron.torch_layers import TorchLinear

    if not hasattr(moe_utils, "te_general_gemm"):
        # Imported in a `try` that has no `except` branch for it: NameError in every router (moe_utils.py).
        moe_utils.te_general_gemm = None
    # MLA accepts a replicated down projection only if it is this very class, and None stands for a missing one.
    multi_latent_attention.TELinear = TorchLinear
    if optimizer.USING_PYTORCH_OPTIMIZER:
        # torch's AdamW counts steps for each parameter. The distributed optimizer keeps one count for each group, and
        # with AdamW its checkpoints fail (`len(steps) == 1` of a fresh one, KeyError 'step') or resume a step off.
        optimizer.Adam = distrib_optimizer.Adam = GroupStepAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


class GroupStepAdam(torch.optim.Optimizer):
    """Adam with its step count in the parameter group, as Transformer Engine's FusedAdam has it; torch's arithmetic."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyrefly: ignore[bad-override]
        """One step of every group; an empty group counts too, so that all ranks agree on the number."""
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._step_group(group, parameters)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
                self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
        on_cuda = all(parameter.is_cuda for parameter in parameters)
        # The kernel counts up by itself, from the steps taken before; the fused one wants its count on the device.
        device = parameters[0].device if on_cuda else None
        steps = list(torch.full((len(parameters),), float(group["step"] - 1), device=device).unbind())
        torch.optim._functional.adam(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [self.state[parameter]["exp_avg"] for parameter in parameters],
            [self.state[parameter]["exp_avg_sq"] for parameter in parameters],
            [],
            steps,
            foreach=not on_cuda,
            fused=on_cuda,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=self.adam_w_mode,
        )
