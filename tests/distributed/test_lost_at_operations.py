"""A rank is killed, or frozen, at each file operation of its saves.

All others end within the deadline with the same cause, what was saved before is whole, and the
next session goes on, also beside a rank that is still frozen. That one then wakes up in a world
that has ended, and harms nothing.
"""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from keepstep.store import list_checkpoints, verify
from tests.distributed.test_operations_on_ranks import BEGIN
from tests.helpers import warm, worst_days
from tests.helpers.world import free_port, place_of, run_code

AT_ONCE = 4
BATCH = 16
"""Worlds whose frozen ranks stay at a time; the helper ends a process after 90 s."""
LOST_SECONDS = 15
"""From the loss to the end of all: 3 s of silence, 4 s for a blocked thread, and the machine's."""
LOSE = """
    import signal
    number, name = numbers
    told = open(f"{folder}.told-{group.rank}", "a")
    def tell(step):
        told.write(f"{step}\\n")
        told.flush()
    disk = DyingDisk(number, signal.Signals[name]) if group.rank == who else Disk()
    group.ranks.gather(None, what="begin")
    print("BEGINS", flush=True)
    save_two(folder, disk, tell)
    print("OPERATIONS", getattr(disk, "count", 0), flush=True)
"""
CONTINUE = """
    for place in numbers:
        save_two(place, Disk(), lambda step: None)
"""


@dataclass(frozen=True)
class Lost:
    """A world of which one rank was lost, and where it saved."""

    number: int
    folder: Path
    size: int
    who: int
    name: str
    ranks: list[warm.WarmSession]

    @property
    def others(self) -> list[warm.WarmSession]:
        return [session for rank, session in enumerate(self.ranks) if rank != self.who]

    def told(self) -> int:
        """Return the last step that any rank heard to be saved."""
        files = [Path(f"{self.folder}.told-{rank}") for rank in range(self.size)]
        return max(int(line) for path in files for line in ["0", *path.read_text().split()])

    def end_of_the_others(self) -> None:
        for session in self.others:
            # None where the other was lost before this one could say so.
            next((line for line in session.read() if line.startswith("BEGINS")), None)
        started = time.monotonic()
        codes = [session.end() for session in self.others]
        said = "\n".join(session.output for session in self.ranks)
        assert time.monotonic() - started < LOST_SECONDS, said
        # The main thread raises it, or it is left behind in a collective.
        assert set(codes) <= {1, 7}, said
        causes = {
            re.search(r"(?:Unhealthy|error): (.*)", session.output).group(1)
            for session in self.others
        }
        assert len(causes) == 1, said
        silent = f"rank {self.who} on \\S+ is lost: .*(without a sign of life|the rendezvous store)"
        assert re.match(silent, causes.pop()), said

    def assert_whole(self) -> int:
        """Assert that what stands is whole and nothing told of is gone; return the newest step."""
        entries = list_checkpoints(self.folder)
        assert [verify(entry) for entry in entries] == [[]] * len(entries), self.number
        newest = entries[-1].step if entries else 0
        assert self.told() <= newest <= self.told() + 1, self.number
        return newest


def lose(folder: Path, size: int, who: int, number: int, name: str, stack: ExitStack) -> Lost:
    """Start a world whose rank `who` gets the signal at its n-th operation; wait for the others."""
    port, place = free_port(), folder / f"{name}-{number}"
    words = (place, "folders", who, json.dumps([number, name]))
    ranks = [
        stack.enter_context(
            warm.WarmSession(*words, extra=place_of(rank, size, port), code=BEGIN + LOSE)
        )
        for rank in range(size)
    ]
    lost = Lost(number, place, size, who, name, ranks)
    lost.end_of_the_others()
    return lost


def go_on(size: int, folders: list[Path]) -> None:
    """Let the next session of each folder restore, save twice, and end."""
    where = json.dumps([str(folder) for folder in folders])
    for code, output in run_code(size, BEGIN + CONTINUE, folders[0], "folders", 0, where):
        assert code == 0, output


def live_through(folder: Path, size: int, who: int, days: list[tuple[int, str]]) -> None:
    with ExitStack() as stack:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            lost = list(pool.map(lambda day: lose(folder, size, who, *day, stack), days))
        newest = {one.folder: one.assert_whole() for one in lost}
        # Who holds the folders is the first rank.
        if who > 0:
            go_on(size, list(newest))
        for one in lost:
            victim = one.ranks[who]
            if one.name == "SIGSTOP":
                victim.signal(signal.SIGCONT)
            codes = {"SIGKILL": {-signal.SIGKILL}, "SIGSTOP": {1, 7}}[one.name]
            assert victim.end() in codes, victim.output
        if who == 0:
            newest = {one.folder: one.assert_whole() for one in lost}
            go_on(size, list(newest))
    for place, step in newest.items():
        (entry,) = list_checkpoints(place)
        assert (entry.step, verify(entry)) == (step + 2, []), place
        assert [path.name for path in place.iterdir() if path.name.startswith(".")] == [], place


@pytest.mark.parametrize(("size", "who"), [(2, 0), (2, 1), (4, 3), (4, 0)])
@pytest.mark.timeout(1200)
def test_a_rank_lost_at_any_operation_ends_all_and_harms_nothing(tmp_path, size, who):
    """Each operation of a rank of two and every third of a rank of four, or a part of these."""
    ended = run_code(size, BEGIN + LOSE, tmp_path / "0", "folders", who, '[0, "SIGKILL"]')
    (count,) = {int(out.split("OPERATIONS ")[1].split()[0]) for _, out in ended} - {0}
    assert count >= (8 if who else 50), "the operations are not counted"
    numbers = range(1, count + 1, {2: 1, 4: 3}[size])
    numbers = worst_days.some(numbers, of={(2, 0): 16, (2, 1): 6, (4, 0): 16, (4, 3): 3}[size, who])
    print(f"KEEPSTEP_TEST_SEED={worst_days.SEED}: operations {numbers} of {count}")
    days = [(number, name) for number in numbers for name in ("SIGKILL", "SIGSTOP")]
    for first in range(0, len(days), BATCH):
        live_through(tmp_path, size, who, days[first : first + BATCH])
