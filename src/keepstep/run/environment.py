"""What of the machine a step's bits depend on: device, threads, versions, kernels."""

import os
import platform
from typing import Any

import torch

from keepstep import __version__
from keepstep.distributed.group import Group
from keepstep.errors import UsageError


def choose_device(wanted: str, group: Group) -> torch.device:
    """Return the device to train on; UsageError where the wanted one is not there."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "train.device is 'cuda', and this machine has no usable CUDA device",
            hint="Use --train.device=auto, or look at `nvidia-smi`.",
        )
    return torch.device("cuda", group.local_rank)


def make_deterministic() -> None:
    """Choose deterministic kernels; on a GPU a resumed run would not be exact without them."""
    # cuBLAS reads this when it is first used; it refuses deterministic work without it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory finds reads of uninitialised data and costs time at every allocation.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Return the facts that can change the last bits of a result."""
    return {
        "keepstep": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "threads": torch.get_num_threads(),
    }


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what of the environment changed, one phrase each."""
    return [
        f"{name}: {saved[name]} -> {now[name]}"
        for name in now
        if name in saved and saved[name] != now[name]
    ]
