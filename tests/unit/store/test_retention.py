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


def kept(found, policy, **more):
    return [s for s, why in reasons_to_keep(found, policy, **more).items() if why]


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


def test_retention_keeps_the_best_k():
    from keepstep.store import Best

    best = Best(metric="loss", mode="min", value=1.0, sequence=3, step=30)
    found = manifests(5, metrics=lambda n: {"loss": abs(n - 3) + 1.0}, best=lambda n: best)
    assert kept(found, Retention(keep_last_n=1, keep_best_n=3), best=3) == [2, 3, 4, 5]
