"""Random numbers derived from (seed, stream, rank, step): nothing needs to survive.

Guarantees: what a step draws depends on these four alone. A resumed step draws what the first
one drew, whatever ran in between. Seeds of two streams, ranks or steps differ in 64 bits; torch's
CPU generator and numpy's take 32 of them, so in a long run two steps may draw the same numbers,
as they would from any seeds of that width.
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
