"""Bit rot in a checkpoint of two ranks: every damage is found, and nothing where there is none."""

import random
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from keepstep.errors import CheckpointDamaged
from keepstep.store import Store, list_checkpoints, load_state, verify
from keepstep.store.catalog import look_at
from keepstep.store.tensors import _HEADER_ALIGNMENT

SEED = 20261202
FLIPS = CLEAN_LOADS = 1000
MANIFEST = "manifest.json"
DATA = ("rank-00000.safetensors", "rank-00001.safetensors")


class TwoRanks:
    """One of two ranks that are threads of this process."""

    size = 2

    def __init__(self, rank, barrier, told):
        self.rank, self._barrier, self._told = rank, barrier, told

    def meet(self, what):
        self._barrier.wait(60)

    def gather(self, value, *, what):
        self._told[self.rank] = value
        self._barrier.wait(60)
        found = list(self._told)
        self._barrier.wait(60)
        return found

    def apart(self):
        return self


def state_of(step):
    """Return a state of several types and shapes, another one at each step."""
    torch.manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(40, 50),
            "narrow": torch.randn(30, 20).to(torch.bfloat16),
            "wide": torch.randn(11, 13, dtype=torch.float64),
            "ids": torch.randint(0, 99, (500,)),
            "mask": torch.rand(777) > 0.5,
            "count": torch.tensor(float(step)),
            "empty": torch.empty(0, 4),
        },
        "plain": {"step": step, "rate": 0.1 / (step + 1), "words": ["a", ("b", None)]},
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two checkpoints of two ranks."""
    folder = tmp_path_factory.mktemp("made")
    barrier, told = threading.Barrier(2), [None, None]
    states = {step: state_of(step) for step in (1, 2)}

    def work(rank):
        with Store(folder, ranks=TwoRanks(rank, barrier, told), keep_last_n=0) as store:
            for step, state in states.items():
                store.save(state, step=step)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
    return folder


@pytest.fixture
def folder(made, tmp_path):
    shutil.copytree(made, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


def region_of(name, place, header_text_end):
    if name == MANIFEST:
        return MANIFEST
    if place < header_text_end[name]:
        return f"header of {name}"
    return f"{'padding' if place < _HEADER_ALIGNMENT else 'data'} of {name}"


def tensor_at(manifest, name, place):
    """Return the tensor whose bytes lie at a place of a data file, and where its piece begins."""
    for tensor in manifest.tensors:
        for piece in tensor.pieces:
            if piece.file == name and piece.start <= place < piece.end:
                return tensor.name, piece.start
    return "", 0


def test_a_thousand_flipped_bits_are_all_found_and_named(folder):
    newest = folder / "step_2"
    manifest = look_at(newest).manifest
    whole = {name: (newest / name).read_bytes() for name in (MANIFEST, *DATA)}
    text_ends = {name: len(whole[name][:_HEADER_ALIGNMENT].rstrip(b" ")) for name in DATA}
    choose, reached, tensors = random.Random(SEED), set(), set()
    for number in range(FLIPS):
        # Not by size: the padding and the manifest get their share, and so does each file.
        name = choose.choice((MANIFEST, *DATA))
        ends = (_HEADER_ALIGNMENT, len(whole[name])) if name in DATA else (len(whole[name]),)
        end = choose.choice(ends)
        place = choose.randrange(0 if end == ends[0] else ends[0], end)
        spoiled = bytearray(whole[name])
        spoiled[place] ^= 1 << choose.randrange(8)
        (newest / name).write_bytes(spoiled)
        tensor, start = tensor_at(manifest, name, place)
        with pytest.raises(CheckpointDamaged) as caught:
            load_state(newest)
        message = str(caught.value)
        assert name in message, (number, message)
        assert not tensor or (tensor in message and f"bytes {start:,} to" in message)
        (fault,) = verify(look_at(newest))
        assert (fault.file, fault.tensor, fault.offset) == (name, tensor, start)
        reached.add(region_of(name, place, text_ends))
        tensors.add(tensor)
        (newest / name).write_bytes(whole[name])
    parts = {f"{part} of {name}" for part in ("header", "padding", "data") for name in DATA}
    assert reached == {MANIFEST, *parts}
    assert {t.name for t in manifest.tensors if 0 not in t.shape} <= tensors | {"model.count"}
    assert same(load_state(newest), state_of(2))


def test_a_thousand_loads_of_what_is_whole_raise_no_false_alarm(folder):
    expected = state_of(2)
    for _ in range(CLEAN_LOADS):
        assert same(load_state(folder / "step_2"), expected)
    with Store(folder) as store:
        restored = store.restore()
    assert (restored.manifest.step, restored.skipped) == (2, ())
    assert all(verify(entry) == [] for entry in list_checkpoints(folder))


def cut_short(new, old, name):
    data = (new / name).read_bytes()
    (new / name).write_bytes(data[: len(data) * 2 // 3])


def zeroed_block(new, old, name):
    data = (new / name).read_bytes()
    (new / name).write_bytes(data[:-512] + bytes(512))


def swapped_blocks(new, old, name):
    data = (new / name).read_bytes()
    (new / name).write_bytes(data[:-1024] + data[-512:] + data[-1024:-512])


def block_of_an_older_step(new, old, name):
    data = (new / name).read_bytes()
    (new / name).write_bytes(data[:-512] + (old / name).read_bytes()[-512:])


def file_of_an_older_step(new, old, name):
    shutil.copy(old / name, new / name)


def longer(new, old, name):
    (new / name).write_bytes((new / name).read_bytes() + b"\0")


def gone(new, old, name):
    (new / name).unlink()


def of_the_other_rank(new, old, name):
    other = {DATA[0]: DATA[1], DATA[1]: DATA[0], MANIFEST: DATA[0]}[name]
    shutil.copy(new / other, new / name)


def a_link(new, old, name):
    (new / name).rename(new / "elsewhere")
    (new / name).symlink_to("elsewhere")


DAMAGES = [
    cut_short, zeroed_block, swapped_blocks, block_of_an_older_step, file_of_an_older_step,
    longer, gone, of_the_other_rank, a_link,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", [MANIFEST, *DATA])
def test_what_is_damaged_is_passed_over_by_name_for_the_older_one(folder, damage, name):
    new, old = folder / "step_2", folder / "step_1"
    damage(new, old, name)
    assert next(fault.file for fault in verify(look_at(new))) == name
    with Store(folder) as store:
        restored = store.restore()
    assert restored.manifest.step == 1
    assert same(restored.state, state_of(1))
    ((skipped, fault),) = [(item.name, item.fault) for item in restored.skipped]
    assert skipped == "step_2"
    assert name in fault
    assert restored.set_aside == ("step_2",)


def test_two_blocks_of_one_type_that_were_swapped_are_named_by_tensor_and_place(folder):
    new = folder / "step_2"
    manifest = look_at(new).manifest
    pieces = [(t.name, p) for t in manifest.tensors for p in t.pieces if p.end - p.start > 600]
    (_, a), (_, b) = [item for item in pieces if item[1].file == pieces[0][1].file][:2]
    data = bytearray((new / a.file).read_bytes())
    data[a.start : a.start + 512], data[b.start : b.start + 512] = (
        data[b.start : b.start + 512],
        data[a.start : a.start + 512],
    )
    (new / a.file).write_bytes(data)
    with pytest.raises(CheckpointDamaged, match=r"bytes .* \(model\.\w+\) do not match"):
        load_state(new)
    assert [fault.offset for fault in verify(look_at(new))] == sorted([a.start, b.start])


@pytest.mark.parametrize("more", [b"a", bytes(4096), None], ids=["a byte", "zeros", "flipped"])
def test_what_lies_behind_the_end_of_a_file_is_damage(tmp_path, more):
    with Store(tmp_path, layout="files") as store:
        path = store.save({"step": 1}, step=1).path
    content = bytearray(path.read_bytes())
    if more is None:
        content[-1] ^= 1
    path.write_bytes(content + (more or b""))
    (entry, *_) = list_checkpoints(tmp_path)
    assert entry.fault == "bytes stand behind its end"
    assert verify(entry)
