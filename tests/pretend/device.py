"""A pretend CUDA device for machines without one: what a GPU would refuse or wait for is found while a CPU computes.

What it pretends. A process has one H100, and NCCL between processes. Tensors say that they are on it, `torch.cuda`
answers, and DeepSpeed runs by its real CUDA accelerator. Numbers are real: every tensor is a CPU's, and gloo carries
what is meant for NCCL, so training, evaluation and generation give what they give on a CPU.

How. A note says for each piece of memory whether it lies on the host, in the host's pinned memory or on the device
(`places`). Methods and functions of torch that make, move or look at a tensor are replaced by ones that heed it
(`stand_ins`, `cuda`). A dispatch mode sees every operation, those of backward passes and collectives too, hands the
notes on, and writes down (`watch`): operations that mix host and device, beyond the numbers that torch lets pass;
tensors of the host in a collective, which NCCL refuses; and whatever makes the host wait for the device: copies that
block, reading a number, shapes that depend on values, synchronizing. Nothing of it raises, so one run shows all.

What it cannot see. Time, memory, races between streams, kernels that only a GPU has (flash attention, Triton and what
torch.compile makes of a block), NCCL's own failures, work of other threads, and waits inside a library's C++ that
torch's dispatcher does not see. Operations are named as in torch 2.13; one that waits for the device without
standing in `watch.WAITING` goes unseen.

It changes the whole process, for good: only processes of `tests.pretend.worker` call `install`.
"""

from __future__ import annotations

import os

os.environ |= {"DS_ACCELERATOR": "cuda", "USE_TORCH_XLA": "0"}

import torch
import torch._dynamo  # which looks for CUDA when it is imported

from tests.pretend.cuda import patch_collectives, patch_cuda
from tests.pretend.stand_ins import patch_tensors
from tests.pretend.watch import Watch


def install() -> Watch:
    """Give this process its device, before anything else imports DeepSpeed; what it notes, from now on."""
    watch = Watch()
    torch.compile = lambda function=None, **_: function or (lambda each: each)  # type: ignore[assignment]
    patch_tensors(watch)
    patch_cuda(watch)
    patch_collectives(watch)
    watch.__enter__()
    return watch
