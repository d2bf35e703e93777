"""Random numbers derived from (seed, stream, rank, step): nothing needs to survive.

Guarantees: what a step draws depends on these four alone. A resumed step draws what the first
one drew, whatever ran in between; two streams, ranks or steps never share their numbers.
"""

import random

import numpy as np
import torch
import xxhash


def derive(seed: int, stream: str, rank: int, step: int) -> int:
    """Return a seed of 64 bits for one stream, rank and step."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{stream}/{rank}/{step}".encode())


def seed_everything(seed: int, stream: str, rank: int, step: int) -> None:
    """Set the generators of torch (CPU and GPU), numpy and Python."""
    derived = derive(seed, stream, rank, step)
    torch.manual_seed(derived & (2**63 - 1))
    np.random.seed(derived & (2**32 - 1))
    random.seed(derived)
