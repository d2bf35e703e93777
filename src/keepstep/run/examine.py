"""Whether a run could begin and end well here: what `keepstep doctor` looks at.

Guarantees: nothing is left behind, and nothing that lives is disturbed: a folder that a session
holds is only read.
"""

import importlib.util
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from keepstep import __version__
from keepstep.config.quantities import bytes_text, seconds
from keepstep.config.resolved import checkpoint_folder, run_folder
from keepstep.config.schema import Config
from keepstep.config.surroundings import folder_fault
from keepstep.distributed.launcher import find_place
from keepstep.errors import KeepstepError
from keepstep.run.clock import SAVES_KEPT, Clock
from keepstep.run.journal import Journal
from keepstep.run.stop import StopRequests
from keepstep.store.catalog import checkpoints_in
from keepstep.store.disk import Disk
from keepstep.store.layout import JOURNAL_NAME, LOCK_NAME
from keepstep.store.lock import who_holds
from keepstep.store.probe import try_out
from keepstep.store.retention import Retention

_EXTRAS = {
    "language": ("transformers", "tokenizers"),
    "optim": ("pytorch_optimizer", "schedulefree"),
    "remote": ("fsspec", "s3fs"),
    "report": ("matplotlib", "plotext"),
    "trackers": ("tensorboard", "wandb", "trackio"),
}
_OPEN_FILES_MIN = 1024
"""What systems allow by default; libraries and the shards of a resume need some hundred."""
_SHARED_BYTES_MIN = 256 << 20
"""Containers give 64 MiB by default, which data workers and NCCL outgrow."""
_SKEW_SECONDS_MAX = 5.0
_RANKS_SECONDS = 90.0
_RANK_CODE = """
from keepstep.config.schema import DistributedConfig
from keepstep.distributed.group import open_group
with open_group(DistributedConfig(), device="cpu") as group:
    assert group.sum([1.0]) == [2.0]
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was looked at, how it is, and what to do where it is not fine."""

    name: str
    state: Literal["ok", "warn", "fail"]
    text: str
    hint: str = ""


def examine(config: Config | None) -> Iterator[Check]:
    """Yield every check of this machine and, where there is a config, of its run's folders."""
    yield _versions()
    yield _extras()
    yield _device()
    yield _threads()
    yield _open_files()
    yield _shared_memory()
    yield _signals()
    yield _place()
    yield _ranks()
    if config is not None:
        yield from _folder(config)
        yield _time(config)


def _versions() -> Check:
    import torch

    found = f"keepstep {__version__} · torch {torch.__version__} · python"
    return Check(name="versions", state="ok", text=f"{found} {platform.python_version()}")


def _extras() -> Check:
    there = {
        name: all(importlib.util.find_spec(package) for package in packages)
        for name, packages in _EXTRAS.items()
    }
    words = [f"{name} {'installed' if found else 'not installed'}" for name, found in there.items()]
    return Check(name="extras", state="ok", text=", ".join(words))


def _device() -> Check:
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return Check(name="device", state="ok", text="no CUDA device: the CPU, ranks over gloo")
    nccl = dist.is_nccl_available()
    return Check(
        name="device",
        state="ok" if nccl else "warn",
        text=f"{torch.cuda.device_count()} CUDA devices, {'NCCL' if nccl else 'no NCCL'}",
        hint="" if nccl else "Several ranks on GPUs need a torch that is built with NCCL.",
    )


def _threads() -> Check:
    import torch

    threads, cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    return Check(
        name="threads",
        state="ok",
        text=f"{threads} of torch in a process, on {cores} cores that it may use",
    )


def _open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < _OPEN_FILES_MIN
    return Check(
        name="open files",
        state="warn" if few else "ok",
        text=f"at most {soft:,} at once" if soft != resource.RLIM_INFINITY else "no limit",
        hint=f"Raise it with `ulimit -n` (up to {hard:,} here)." if few else "",
    )


def _shared_memory() -> Check:
    place = Path("/dev/shm")
    if not place.is_dir():
        return Check(
            name="shared memory",
            state="warn",
            text=f"there is no {place}",
            hint="Data workers and NCCL want it: mount a tmpfs there, or use data.workers = 0.",
        )
    free = shutil.disk_usage(place).free
    return Check(
        name="shared memory",
        state="warn" if free < _SHARED_BYTES_MIN else "ok",
        text=f"{bytes_text(free)} free in {place}",
        hint="Give a container more (--shm-size), or use data.workers = 0."
        if free < _SHARED_BYTES_MIN
        else "",
    )


def _signals() -> Check:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    stops = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    deaf = [n.name for n in stops if n in blocked or signal.getsignal(n) == signal.SIG_IGN]
    text = "SIGTERM, SIGINT and SIGUSR1 are heard"
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        text += "; SIGHUP is ignored, as under nohup: a lost terminal stops nothing"
    if not deaf:
        return Check(name="signals", state="ok", text=text)
    return Check(
        name="signals",
        state="warn",
        text=f"{', '.join(deaf)}: ignored or blocked by what started this, so by the run too",
        hint="A shell ignores SIGINT for what it starts with &: use SIGTERM, or mend the parent.",
    )


def _place() -> Check:
    try:
        place = find_place()
    except KeepstepError as error:
        return Check(name="launcher", state="fail", text=error.message, hint=error.hint)
    text = "one rank, if it were started here"
    if place.size > 1:
        text = f"rank {place.rank} of {place.size}, which meet at {place.host}:{place.port}"
    return Check(name="launcher", state="ok", text=text)


def _ranks() -> Check:
    """Have two processes meet on this host, as the ranks of a run do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = ("TORCHELASTIC_", "SLURM_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    started = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK_CODE],
            env={
                **kept,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    with ThreadPoolExecutor(len(ranks)) as threads:
        faults = []
        for ended in as_completed([threads.submit(_fault_of, rank) for rank in ranks]):
            if fault := ended.result():
                faults.append(fault)
                # The other one would wait for it.
                for rank in ranks:
                    rank.kill()
    if faults:
        return Check(
            name="ranks",
            state="fail",
            text=f"two processes cannot work together over gloo on this host: {faults[0]}",
            hint="Look at a firewall on the loopback, /etc/hosts, and GLOO_SOCKET_IFNAME.",
        )
    took = time.monotonic() - started
    return Check(name="ranks", state="ok", text=f"two processes met over gloo after {took:.1f} s")


def _fault_of(rank: subprocess.Popen[str]) -> str:
    """Return why a rank of the trial failed, when it has ended; nothing where it did not."""
    try:
        told = rank.communicate(timeout=_RANKS_SECONDS)[1].strip().splitlines()
    except subprocess.TimeoutExpired:
        return f"not over after {_RANKS_SECONDS:g} s"
    return (told or [f"exit code {rank.returncode}"])[-1] if rank.returncode else ""


def _folder(config: Config) -> Iterator[Check]:
    """Look at where the checkpoints go, or at what is there of that path."""
    folder = checkpoint_folder(config).absolute()
    if fault := folder_fault(folder):
        yield Check(name="folder", state="fail", text=fault, hint="Choose another, or mend it.")
        return
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    kind = _file_system(place)
    made = "" if place == folder else f", to be made in {place}"
    yield Check(name="folder", state="ok", text=f"{folder} ({kind}){made}")
    locks = (run_folder(config) / LOCK_NAME, folder / LOCK_NAME)
    holder = next(filter(None, map(who_holds, locks)), "")
    if holder:
        text = f"held by {holder}: not tried what its file system can do"
        yield Check(name="session", state="ok", text=text)
    else:
        yield from _tried(config, place)
    yield _room(config, folder, place)


def _tried(config: Config, place: Path) -> Iterator[Check]:
    checkpoint = config.checkpoint
    wanted = "file" if checkpoint.layout == "files" else checkpoint.commit_method
    try:
        tried = try_out(place, wanted)
    except (KeepstepError, OSError) as error:
        hint = getattr(error, "hint", "")
        text = f"no checkpoint can be saved there: {getattr(error, 'message', error)}"
        yield Check(name="commit", state="fail", text=text, hint=hint or "Mend that first.")
        return
    links = "hard links" if tried.hard_links else "no hard links: what is unchanged is written anew"
    yield Check(name="commit", state="ok", text=f"by {tried.methods}; {links}")
    skewed = abs(tried.skew_seconds) > _SKEW_SECONDS_MAX
    yield Check(
        name="clock",
        state="warn" if skewed else "ok",
        # No `-0.0`.
        text=f"a new file's time is {round(tried.skew_seconds, 1) + 0:+.1f} s from this machine's",
        hint="Mend the clocks (NTP): times in manifests and journals come from both." * skewed,
    )


def _room(config: Config, folder: Path, place: Path) -> Check:
    from keepstep.store.rehearsal import look_at_room

    standing = [entry.manifest for entry in checkpoints_in(folder) if entry.manifest is not None]
    if not standing:
        free = bytes_text(shutil.disk_usage(place).free)
        text = f"{free} free; no checkpoint is there to measure: `train` rehearses one first"
        return Check(name="room", state="ok", text=text)
    newest = max(standing, key=lambda manifest: manifest.sequence)
    names = ("keep_last_n", "keep_best_n", "keep_every", "keep_hourly", "keep_daily")
    policy = Retention(**{name: getattr(config.checkpoint, name) for name in names})
    wanted = policy.at_once(judged=newest.best is not None)
    room = look_at_room(folder, max(1, newest.size), wanted=wanted, copies=0)
    enough = room.fits >= room.wanted
    text = f"for {room.fits:,} more of {bytes_text(newest.size)}"
    return Check(
        name="room",
        state="ok" if enough else "warn" if room.fits else "fail",
        text=f"{text}, of which {room.wanted:,} may come before one goes",
        hint="" if enough else "Make room, or keep fewer (checkpoint.keep_last_n, keep_best_n).",
    )


def _time(config: Config) -> Check:
    """Compare what a save was measured to take with the grace, and say when a run would end."""
    stop = StopRequests()
    stop.set_grace(seconds(config.run.grace))
    try:
        clock = Clock(config, stop)
    except KeepstepError as error:
        return Check(name="time", state="fail", text=error.message, hint=error.hint)
    journal = Journal(run_folder(config) / JOURNAL_NAME, disk=Disk())
    took = journal.save_seconds(newest=SAVES_KEPT)
    clock.begin(took)
    parts = [f"the grace is {config.run.grace}"]
    parts.append(f"the last save took {took[0]:.1f} s" if took else "no save was measured")
    parts += filter(None, [clock.unheeded, clock.end_text])
    late = clock.is_late(saving=False)
    hint = "There would be no time for a step: raise the limit." if late else clock.grace_warning
    state: Literal["ok", "warn"] = "warn" if hint or clock.unheeded else "ok"
    return Check(name="time", state=state, text="; ".join(parts), hint=hint)


def _file_system(place: Path) -> str:
    """Return the type of the file system that a folder is on, by the kernel's list of mounts."""
    device = place.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0]
    return "file system unknown"
