"""Which sample stands at a position: a permutation of each epoch that is computed, not stored.

Guarantees: the position counts global samples from the start of the run; position p belongs to
epoch p // N, in which each of the N samples stands exactly once, in an order that depends on the
seed and the epoch alone. Any position costs the same: a resume replays nothing.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from keepstep.state.rng import derive

_ROUNDS = 6

Indices = npt.NDArray[np.int64]


def sample_indices(seed: int, positions: Sequence[int] | Indices, num_samples: int) -> Indices:
    """Return the sample at each position, shape (len(positions),), values in [0, num_samples)."""
    if num_samples < 1:
        raise ValueError(f"there are {num_samples} samples; at least one is needed")
    places = np.asarray(positions, dtype=np.int64)
    epochs, within = np.divmod(places, num_samples)
    result = np.empty_like(places)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        result[chosen] = _permuted(within[chosen], num_samples, seed, int(epoch))
    return result


def _permuted(places: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Return the permuted places: a Feistel network on the next power of four, cycle-walked.

    Black and Rogaway (2002), "Ciphers with Arbitrary Finite Domains", method 2: what falls outside
    the range is permuted again until it falls inside, which keeps it a permutation. The range is
    more than a quarter of the domain, so that takes four rounds on average at most.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive(seed, "data order", round_, epoch)) for round_ in range(_ROUNDS)]
    values = _feistel(places.astype(np.uint64), half_bits, keys)
    outside = values >= size
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half_bits: int, keys: Sequence[np.uint64]
) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the values with every bit depending on every other.

    The finaliser of SplitMix64: Steele, Lea and Flood (2014), "Fast Splittable Pseudorandom Number
    Generators", figure 16 (the mix of variant 13 by Stafford).
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
