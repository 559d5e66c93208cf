"""What stands in for CUDA and for Transformer Engine: there inside, gone outside, and the arithmetic of torch."""

from __future__ import annotations

import threading

import pytest
import torch

from dovetail.backends.megatron.no_te import GroupStepAdam
from dovetail.backends.megatron.shim import _STAND_INS, cuda_to_cpu

pytestmark = pytest.mark.distributed

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where CUDA is")


@without_cuda
def test_inside_cuda_is_the_cpu_and_outside_nothing_has_changed() -> None:
    own = {name: getattr(torch.cuda, name) for name in _STAND_INS}
    with cuda_to_cpu(), cuda_to_cpu():
        made = torch.ones(2, device="cuda")
        assert made.device.type == "cpu"
        assert made.to("cuda").device.type == "cpu"
        assert made.cuda() is made
        assert made.type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
    assert {name: getattr(torch.cuda, name) for name in _STAND_INS} == own
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")


@without_cuda
def test_a_thread_that_leaves_does_not_take_the_shim_from_another() -> None:
    inside, leave = threading.Event(), threading.Event()
    compiled = []
    # A backend that only notes that it was asked: no compiler is called.
    double = torch.compile(lambda x: x + x, backend=lambda graph, _: compiled.append(graph) or graph.forward)

    def stay() -> None:
        with cuda_to_cpu():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=stay)
    with cuda_to_cpu():
        thread.start()
        assert inside.wait(30)
    # The other thread is still inside; this one sees the CPU only where it has entered itself.
    with pytest.raises((RuntimeError, AssertionError)):
        torch.ones(1, device="cuda")
    with cuda_to_cpu():
        assert torch.ones(1, device="cuda").device.type == "cpu"
        double(torch.ones(1))
        assert not compiled
    leave.set()
    thread.join()
    assert torch.cuda.current_device not in _STAND_INS.values()
    double(torch.ones(1))
    assert compiled, "what others compile is compiled again after Megatron"


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam_with_one_step_count_for_a_group_is_torchs_adam(decoupled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(size, generator=generator) for size in (3, 7)]
    ours, theirs = ([torch.nn.Parameter(tensor.clone()) for tensor in start] for _ in range(2))
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    mine = GroupStepAdam([{"params": ours}, {"params": []}], adam_w_mode=decoupled, **settings)
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, **settings)
    for _ in range(4):
        for left, right in zip(ours, theirs, strict=True):
            right.grad = torch.randn(left.shape, generator=generator)
            left.grad = right.grad.clone()
        mine.step()
        reference.step()
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, atol=0, rtol=0)
    assert [group["step"] for group in mine.param_groups] == [4, 4]
