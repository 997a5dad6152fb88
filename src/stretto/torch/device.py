"""Where a worker computes, and how it reaches the others."""

from __future__ import annotations

import os

import torch


def own_device() -> torch.device:
    """The GPU that a launcher like torchrun has in mind for this process, or the only one it can see."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """Of a process group whose workers have such a device."""
    return os.environ.get("STRETTO_BACKEND") or ("nccl" if device.type == "cuda" else "gloo")
