"""Which checkpoints stay: a pure function of the manifests and the policy."""

import pytest

from keepstep.store.retention import Retention, reasons_to_keep


def manifests(count, **changes):
    base = {
        "run_id": "r", "parent": None, "updates": 0, "samples": 0, "tokens": 0, "time": 0.0,
        "world_size": 1, "mesh": {}, "must_match": {}, "fingerprint": "", "environment": {},
        "metrics": {}, "best": None, "milestone": False, "commit_method": "rename", "files": (),
        "tensors": (), "plain": {},
    }  # fmt: skip
    from keepstep.store import Manifest

    found = []
    for n in range(1, count + 1):
        mine = {name: value(n) for name, value in changes.items()}
        found.append(Manifest(**{**base, "sequence": n, "step": n * 10, **mine}))
    return found


def kept(found, policy, *, now=0.0, **more):
    return [s for s, why in reasons_to_keep(found, policy, now=now, **more).items() if why]


def test_retention_goes_by_the_order_of_commits_and_not_by_step():
    rewound = manifests(4, step=lambda n: {1: 100, 2: 200, 3: 50, 4: 60}[n])
    assert kept(rewound, Retention(keep_last_n=2)) == [3, 4]


def test_retention_keeps_what_has_a_role():
    found = manifests(10, milestone=lambda n: n in (2, 3))
    assert kept(found, Retention(keep_last_n=1)) == [2, 3, 10]
    assert kept(found, Retention(keep_last_n=1, keep_every=50)) == [2, 3, 5, 10]
    assert kept(found, Retention(keep_last_n=1), best=7) == [2, 3, 7, 10]
    assert kept(found, Retention(keep_last_n=0)) == list(range(1, 11))
    assert kept([], Retention()) == []
    with pytest.raises(ValueError, match="negative"):
        Retention(keep_last_n=-1)


def test_a_file_and_its_copies_count_once():
    found = manifests(3)
    assert kept([*found, found[-1], found[-1]], Retention(keep_last_n=2)) == [2, 3]


def test_retention_keeps_the_best_k():
    from keepstep.store import Best

    best = Best(metric="loss", mode="min", value=1.0, sequence=3, step=30)
    found = manifests(5, metrics=lambda n: {"loss": abs(n - 3) + 1.0}, best=lambda n: best)
    assert kept(found, Retention(keep_last_n=1, keep_best_n=3), best=3) == [2, 3, 4, 5]


HOUR, DAY = 3600, 86400


def test_hourly_keeps_the_newest_commit_of_each_of_the_last_hours():
    # Two a hour, from hour 0 on: numbers 1 and 2 in hour 0, 3 and 4 in hour 1, ...
    found = manifests(10, time=lambda n: (n - 1) * HOUR / 2)
    policy = Retention(keep_last_n=1, keep_hourly=3)
    assert kept(found, policy, now=4.9 * HOUR) == [6, 8, 10]
    assert kept(found, policy, now=6.0 * HOUR) == [10]
    assert reasons_to_keep(found, policy, now=4.9 * HOUR)[8] == ["hourly"]
    assert kept(found, Retention(keep_last_n=1), now=4.9 * HOUR) == [10]


def test_daily_and_hourly_join_with_the_other_reasons():
    found = manifests(6, time=lambda n: n * DAY - 1, milestone=lambda n: n == 1)
    policy = Retention(keep_last_n=1, keep_daily=3, keep_hourly=1)
    reasons = reasons_to_keep(found, policy, now=6 * DAY - 1, pinned={2}, best=5)
    assert reasons == {
        1: ["milestone"],
        2: ["pinned"],
        3: [],
        4: ["daily"],
        5: ["daily", "best"],
        6: ["last 1", "hourly", "daily", "newest"],
    }


def test_within_an_hour_the_order_of_commits_decides_and_not_the_clock():
    found = manifests(3, time=lambda n: {1: 300.0, 2: 200.0, 3: HOUR + 5.0}[n])
    assert kept(found, Retention(keep_last_n=1, keep_hourly=2), now=HOUR + 9) == [2, 3]


def test_a_clock_that_was_set_back_makes_no_checkpoint_go():
    found = manifests(3, time=lambda n: n * HOUR)
    policy = Retention(keep_last_n=1, keep_hourly=1)
    assert kept(found, policy, now=0.5 * HOUR) == [1, 2, 3]


def test_hourly_and_daily_cannot_be_negative():
    for name in ("keep_hourly", "keep_daily"):
        with pytest.raises(ValueError, match=name):
            Retention(**{name: -1})


def test_a_store_keeps_by_the_clock_of_the_moment(tmp_path, monkeypatch):
    import torch

    from keepstep.store import Store, list_checkpoints

    state = {"model": {"w": torch.ones(1)}}
    with Store(tmp_path, keep_last_n=1, keep_hourly=3) as store:
        for step in range(1, 9):  # two an hour
            monkeypatch.setattr("time.time", lambda at=step: 1000 * HOUR + (at - 1) * HOUR / 2)
            store.save(state, step=step)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [4, 6, 8]
