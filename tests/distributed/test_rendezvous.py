"""Ranks that do not come, or come and are lost before the first collective."""

import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import PrefixStore, TCPStore

from tests.helpers import warm
from tests.helpers.world import free_port, place_of, run_code

LOST_SOON = "--distributed.lost_after=2s"
MEET = """
import os, sys
from keepstep.config.schema import DistributedConfig
from keepstep.distributed.group import open_group
from keepstep.errors import KeepstepError

config = DistributedConfig(join_within=sys.argv[1], lost_after="2s")
try:
    with open_group(config, device="cpu"):
        print("all are there", flush=True)
except KeepstepError as error:
    print("ERROR", error, flush=True)
    sys.exit(error.exit_code)
"""
# At the second connection to the store of rank 1.
AT_SECOND = """
import os, signal, sys, threading
import torch._C._distributed_c10d as c10d

def connect(*words, **settings):
    made.append(true_store(*words, **settings))
    if os.environ["RANK"] == "1" and len(made) == 2:
        {act}
    return made[-1]

made, true_store, c10d.TCPStore = [], c10d.TCPStore, connect
"""
# Between the rendezvous and the process group, as the machine or the scheduler may do it.
LOSE_THE_LAST = """
import os, signal
import torch.distributed as dist
from keepstep.cli.main import main

def init_process_group(*words, **settings):
    if settings["rank"] == settings["world_size"] - 1:
        os.kill(os.getpid(), signal.{name})
    return true_init(*words, **settings)

true_init, dist.init_process_group = dist.init_process_group, init_process_group
raise SystemExit(main())
"""


def test_ranks_that_never_come_are_named_by_each_one_that_did():
    """Rank 0 holds the store, and waits with it until the others have heard, if they live."""
    port = free_port()
    first = warm.WarmSession("2s", extra=place_of(0, 4, port), code=MEET)
    other = warm.WarmSession("60s", extra=place_of(2, 4, port), code=MEET)
    with first, other:
        store = PrefixStore("keepstep/0", TCPStore("127.0.0.1", port, is_master=False))
        store.wait(["here/2"])
        other.signal(signal.SIGSTOP)
        store.wait(["fate"])
        with pytest.raises(subprocess.TimeoutExpired):
            first.process.wait(1)
        other.signal(signal.SIGCONT)
        assert [first.end(), other.end()] == [7, 7], first.output + other.output
    for session in (first, other):
        assert "ERROR ranks [1, 3] of 4 did not come within 2 s" in session.output
        assert "distributed.join_within" in session.lines[-1]


def test_a_rank_that_comes_too_late_hears_the_same_where_a_launcher_holds_the_store():
    held = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ended = [
        warm.run_together([warm.Job(("1s",), {**place_of(rank, 3, held.port), **launcher}, MEET)])
        for rank in (0, 1)
    ]
    for (done,) in ended:
        assert done.returncode == 7, ended
        assert "ERROR ranks [1, 2] of 3 did not come within 1 s" in done.stdout, ended


def test_a_store_that_nobody_holds_is_waited_for_no_longer_than_that():
    (done,) = warm.run_together([warm.Job(("1s",), place_of(1, 2, free_port()), MEET)])
    assert done.returncode == 7, done.stdout
    assert "ERROR rank 1 on" in done.stdout
    assert "did not come" in done.stdout


def test_a_rank_that_holds_the_store_and_is_frozen_ends_the_wait_of_the_others():
    """The kernel takes the connection, and nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        port = mute.getsockname()[1]
        (done,) = warm.run_together([warm.Job(("1s",), place_of(1, 2, port), MEET)])
    assert done.returncode == 7, done.stdout
    assert f"the rendezvous store on 127.0.0.1:{port}" in done.stdout


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        (done,) = warm.run_together([warm.Job(("20s",), place_of(0, 2, port), MEET)])
    assert done.returncode == 2, done.stdout
    assert f"rank 0 cannot hold the rendezvous store on port {port}" in done.stdout
    assert "MASTER_PORT" in done.stdout


def test_a_rank_that_is_lost_before_the_first_collective_is_named(config, tmp_path: Path):
    with ExitStack() as stack:
        worlds = {}
        for name in ("SIGKILL", "SIGSTOP"):
            port, code = free_port(), LOSE_THE_LAST.format(name=name)
            words = ("train", config, f"--checkpoint.dir={tmp_path}/{name}", LOST_SOON)
            worlds[name] = [
                stack.enter_context(
                    warm.WarmSession(*words, extra=place_of(rank, 2, port), code=code)
                )
                for rank in (0, 1)
            ]
        for first, _ in worlds.values():
            assert first.end() == 7, first.output
            assert "rank 1 on " in first.output
            assert "is lost" in first.output
        assert worlds["SIGKILL"][1].end() == -signal.SIGKILL
        # It wakes up in a world that has ended.
        frozen = worlds["SIGSTOP"][1]
        frozen.signal(signal.SIGCONT)
        assert frozen.end() == 7, frozen.output
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_all_come_go_on():
    for code, output in run_code(2, MEET, "20s"):
        assert (code, output) == (0, "all are there\n")


def test_a_rank_whose_connection_takes_longer_than_a_lost_one_is_waited_for_is_not_lost():
    """Nine seconds: one that is lost is found after two, and four later the process is left."""
    slow = AT_SECOND.format(act="threading.Event().wait(9)")
    for code, output in run_code(2, slow + MEET, "60s"):
        assert (code, output) == (0, "all are there\n")


def test_a_store_that_dies_before_a_rank_has_said_that_it_is_there_is_named():
    port = free_port()
    with warm.WarmSession("60s", extra=place_of(0, 2, port), code=MEET) as first:
        kill = AT_SECOND.format(act="os.kill(int(sys.argv[2]), signal.SIGKILL)")
        job = warm.Job(("60s", first.process.pid), place_of(1, 2, port), kill + MEET)
        (done,) = warm.run_together([job])
        assert first.end() == -signal.SIGKILL
    assert done.returncode == 7, done.stdout
    assert f"the rendezvous store on 127.0.0.1:{port}" in done.stdout
