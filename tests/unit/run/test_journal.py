"""The journal: whole lines, taken back exactly."""

import json

from keepstep.run.journal import Journal, read_journal
from keepstep.store.disk import Disk
from tests.helpers.recording_disk import RecordingDisk


def written(tmp_path, steps=6):
    journal = Journal(tmp_path / "j", disk=Disk(), clock=lambda: 1.0)
    journal.write("session", pid=1)
    for step in range(1, steps + 1):
        journal.write("step", step=step, loss=step / 3)
        if step % 2 == 0:
            journal.write("evaluation", step=step, metrics={"loss": 1.0})
            journal.write("saved", step=step)
    journal.close()
    return journal


def kinds(tmp_path):
    return [(event["kind"], event.get("step")) for event in read_journal(tmp_path / "j")]


def test_a_rewind_takes_back_what_is_about_to_be_done_again_and_no_more(tmp_path):
    journal = written(tmp_path)
    journal.write("outcome", code=75)
    assert journal.rewind(4, keep_evaluation=True) == 4
    assert kinds(tmp_path)[-4:] == [("step", 4), ("evaluation", 4), ("saved", 4), ("outcome", None)]
    assert kinds(tmp_path)[0] == ("session", None)


def test_an_evaluation_that_will_be_made_again_goes_too(tmp_path):
    assert written(tmp_path).rewind(4, keep_evaluation=False) == 5
    assert kinds(tmp_path)[-2:] == [("step", 4), ("saved", 4)]


def test_a_rewind_to_the_start_keeps_only_what_belongs_to_no_step(tmp_path):
    written(tmp_path).rewind(0, keep_evaluation=True)
    assert kinds(tmp_path) == [("session", None)]


def test_a_rollback_stays_when_its_steps_go_and_is_found_by_its_checkpoint(tmp_path):
    journal = written(tmp_path, steps=2)
    journal.write("step", step=3)
    journal.rewind(2, keep_evaluation=True)
    journal.write("rollback", step=3, back_to=2, sequence=1, samples=12)
    journal.write("step", step=3)
    journal.write("rollback", step=3, back_to=2, sequence=1, samples=16)
    journal.write("step", step=4)
    journal.write("rollback", step=5, back_to=4, sequence=2, samples=20)
    assert journal.last_rollback(2, sequence=1)["samples"] == 16
    assert journal.last_rollback(4, sequence=2)["samples"] == 20
    assert journal.last_rollback(4, sequence=1) is None
    assert journal.last_rollback(2, sequence=7) is None
    journal.rewind(2, keep_evaluation=True)
    assert [step for kind, step in kinds(tmp_path) if kind == "step"] == [1, 2]
    assert journal.last_rollback(2, sequence=1)["samples"] == 16
    journal.close()
    path = tmp_path / "j"
    line = b'{"kind": "rollback", "sequence": 1, "samples": 99}'
    path.write_bytes(path.read_bytes() + line)
    assert journal.last_rollback(2, sequence=1)["samples"] == 16, "a torn line is not there"
    assert Journal(tmp_path / "none", disk=Disk()).last_rollback(2, sequence=1) is None


def test_nothing_is_rewritten_where_nothing_is_taken_back(tmp_path):
    written(tmp_path)
    disk = RecordingDisk()
    assert Journal(tmp_path / "j", disk=disk).rewind(6, keep_evaluation=True) == 0
    assert disk.log == []


def test_a_torn_last_line_is_dropped(tmp_path):
    journal = written(tmp_path)
    path = tmp_path / "j"
    for cut in range(1, 30):
        whole = path.read_bytes()
        path.write_bytes(whole[:-cut])
        assert len(list(read_journal(path))) == len(whole.splitlines()) - 1
        journal.rewind(6, keep_evaluation=True)
        journal.write("step", step=7)
        journal.close()
        assert all(json.loads(line) for line in path.read_text().splitlines())
        path.write_bytes(whole)


def test_the_cost_of_a_rewind_does_not_grow_with_the_run(tmp_path, monkeypatch):
    from keepstep.run import journal as module

    journal = written(tmp_path, steps=5000)
    parsed = []
    real = module.parsed_line
    monkeypatch.setattr(module, "parsed_line", lambda line: parsed.append(1) or real(line))
    monkeypatch.setattr(module, "_BLOCK_BYTES", 512)
    before = (tmp_path / "j").read_bytes()
    beginning = (tmp_path / "j").stat().st_ino
    journal.rewind(4990, keep_evaluation=True)
    assert len(parsed) < 100
    # The same file, cut at its end: nothing of the beginning was written again.
    assert (tmp_path / "j").stat().st_ino == beginning
    after = (tmp_path / "j").read_bytes()
    assert before.startswith(after)
    assert kinds(tmp_path)[-1] == ("saved", 4990)


def test_numbers_that_are_not_finite_are_written_by_name(tmp_path):
    journal = Journal(tmp_path / "j", disk=Disk())
    journal.write("step", step=1, loss=float("nan"), metrics={"a": float("-inf")})
    journal.close()
    (event,) = read_journal(tmp_path / "j")
    assert (event["loss"], event["metrics"]) == ("nan", {"a": "-inf"})


def test_what_follows_a_torn_line_is_a_line_of_its_own(tmp_path):
    journal = written(tmp_path)
    with (tmp_path / "j").open("ab") as file:
        file.write(b'{"kind": "step", "ste')
    journal.write("notice", text="after the kill")
    assert kinds(tmp_path)[-1] == ("notice", None)
    journal.rewind(4, keep_evaluation=True)
    assert kinds(tmp_path)[-2:] == [("saved", 4), ("notice", None)]


def test_the_journal_knows_its_last_save(tmp_path):
    assert Journal(tmp_path / "none", disk=Disk()).tells_of_a_save() is None
    assert written(tmp_path).tells_of_a_save() == 6


def test_the_last_measured_saves_are_found_from_the_end_whatever_stands_behind_it(tmp_path):
    journal = Journal(tmp_path / "j", disk=Disk())
    assert journal.save_seconds(newest=8) == []
    written(tmp_path)
    assert journal.save_seconds(newest=8) == []
    journal.write("saved", step=6, seconds=1.0)
    journal.write("saved", step=7, seconds=2.5)
    journal.write("saved", step=8)
    journal.close()
    told = (tmp_path / "j").read_bytes()
    # Read in blocks of a mebibyte: wherever their edge falls, the line is found.
    start = told.rindex(b"\n", 0, told.index(b"2.5")) + 1
    for edge in (start - 1, start, start + 1, told.index(b"2.5"), told.index(b"2.5") + 3):
        behind = b'{"kind": "step", "step": 9}\n{"kind": "step", "step": 10, "padding": "'
        rest = b'"}\n{"kind": "saved", "seco'
        fill = 2 * (1 << 20) - (len(told) - edge) - len(behind) - len(rest)
        (tmp_path / "j").write_bytes(told + behind + b"x" * fill + rest)
        assert journal.save_seconds(newest=2) == [2.5, 1.0]
        assert journal.save_seconds(newest=1) == [2.5]
        assert journal.tells_of_a_save() == 8
