"""The pieces of a tensor cover it, each element once: whatever their number and their cuts."""

import gc
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from keepstep.errors import CheckpointDamaged
from keepstep.store.manifest import Manifest, Piece, digest_of, from_bytes, to_bytes
from tests.unit.store.test_store import save

HEADER = 8


def manifest_with(saved: Manifest, shape: tuple[int, ...], boxes) -> Manifest:
    """A manifest whose one tensor, of bytes, is cut into these boxes: (offset, shape)."""
    pieces, end = [], HEADER
    for offset, size in boxes:
        start, end = end, end + int(np.prod(size))
        pieces.append(
            Piece(
                offset=tuple(offset), shape=tuple(size), file=saved.files[0].name, start=start,
                end=end, digest=digest_of(b""),
            )
        )  # fmt: skip
    (tensor,), (file,) = saved.tensors, saved.files
    return replace(
        saved,
        files=(replace(file, header_end=HEADER, size=end),),
        tensors=(replace(tensor, dtype="U8", shape=tuple(shape), pieces=tuple(pieces)),),
    )


@pytest.fixture
def saved(tmp_path) -> Manifest:
    return save(tmp_path, {"w": torch.ones(3)}).manifest


def cut(box, rng: random.Random, depth: int):
    """Cut a box in two, at random, again and again."""
    offset, shape = box
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    if not axes or depth == 0:
        return [box]
    axis = rng.choice(axes)
    at = rng.randrange(1, shape[axis])
    low, high, further = list(shape), list(shape), list(offset)
    low[axis], high[axis], further[axis] = at, shape[axis] - at, offset[axis] + at
    return cut((offset, low), rng, depth - 1) + cut((further, high), rng, depth - 1)


def times_covered(shape, boxes):
    count = np.zeros(shape, int)
    for offset, size in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
    return count


def test_what_is_cut_at_random_passes_and_what_is_moved_from_there_does_not(saved):
    rng, moved = random.Random(1), 0
    print("seed 1")
    for number in range(400):
        axes = number % 4
        shape = tuple(rng.randrange(1, 6) for _ in range(axes))
        boxes = cut(([0] * axes, list(shape)), rng, 5)
        rng.shuffle(boxes)
        to_bytes(manifest_with(saved, shape, boxes))
        for offset, size in boxes:
            for axis in range(axes):
                offset[axis] = rng.randrange(0, shape[axis] - size[axis] + 1)
        if (times_covered(shape, boxes) == 1).all():
            to_bytes(manifest_with(saved, shape, boxes))
        else:
            moved += 1
            with pytest.raises(CheckpointDamaged, match="pieces of w overlap"):
                to_bytes(manifest_with(saved, shape, boxes))
    assert moved > 100


def test_a_pinwheel_that_no_cut_goes_through_passes(saved):
    boxes = [([0, 0], [1, 2]), ([0, 2], [2, 1]), ([2, 1], [1, 2]), ([1, 0], [2, 1])]
    to_bytes(manifest_with(saved, (3, 3), [*boxes, ([1, 1], [1, 1])]))
    with pytest.raises(CheckpointDamaged, match="overlap"):
        to_bytes(manifest_with(saved, (3, 3), [*boxes, ([0, 1], [1, 1])]))


def test_many_pieces_of_one_row_are_checked_in_the_time_of_reading_them(saved):
    def seconds(count: int) -> float:
        manifest = manifest_with(saved, (1, count), [([0, n], [1, 1]) for n in range(count)])
        taken = []
        for _ in range(3):
            # Collected before, not in between; and what others do on the machine does not count.
            gc.collect()
            begun = time.process_time()
            from_bytes(to_bytes(manifest))
            taken.append(time.process_time() - begun)
        return min(taken)

    seconds(100)
    gc.disable()
    try:
        few, many = seconds(1_000), seconds(8_000)
    finally:
        gc.enable()
    # Eight times the pieces: eight times the time, and not 64 times.
    assert many < 24 * few, (few, many)


def test_pieces_with_more_corners_than_any_tensor_needs_are_refused_at_once(saved):
    shape = (2,) * 24
    # Each cut halves the last one: 25 pieces, and each axis is cut.
    boxes = [
        ([1] * axis + [0] * (24 - axis), [1] * (axis + 1) + [2] * (23 - axis)) for axis in range(24)
    ]
    boxes.append(([1] * 24, [1] * 24))
    begun = time.perf_counter()
    with pytest.raises(CheckpointDamaged, match="cut too finely"):
        to_bytes(manifest_with(saved, shape, boxes))
    assert time.perf_counter() - begun < 5
