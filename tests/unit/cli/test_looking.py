"""`keepstep runs`, `watch`, `plot` and `report`, on runs of every kind."""

import json
import math
import os
import re
from pathlib import Path

import pytest

from keepstep.cli.main import main
from tests.helpers.told import Told


def do(capsys, *words):
    code = main([str(word) for word in words])
    return code, capsys.readouterr().out


@pytest.fixture
def runs(tmp_path) -> Path:
    for name, scale in (("a", 1.0), ("b", 2.0)):
        run = Told(tmp_path / "runs" / name, optimizer={"rate": scale})
        run.session()
        run.step(1, 1.0)
        run.step(2, math.nan)
        run.steps(3, 20, scale=scale)
        run.evaluate(20, valid_loss=scale)
        run.journal.write("notice", word="<b>", text="<script>alert(1)</script>\x1b[2J\ud800")
        run.end("stopped", code=75, reason="SIGTERM", step=20)
    return tmp_path / "runs"


def test_ls_has_a_row_for_each_run_also_for_a_damaged_one(capsys, runs):
    (runs / "b/run.toml").write_text("= 1")
    code, shown = do(capsys, "runs", "ls", runs, "--json")
    one, other = json.loads(shown)
    assert code == 0
    assert (one["state"], one["step"], one["max_steps"], one["loss"]) == (
        "stopped",
        20,
        100,
        1 / 20,
    )
    assert one["best"] == {"metric": "valid_loss", "step": 20, "value": 1.0}
    assert "not valid TOML" in other["fault"]
    assert "damaged: " in do(capsys, "runs", "ls", runs)[1]


def test_compare_says_what_differs_and_where_the_losses_part(capsys, runs):
    code, shown = do(capsys, "runs", "compare", runs / "a", runs / "b", "--json")
    found = json.loads(shown)
    assert code == 0
    assert found["config"]["optimizer.rate"] == [1.0, 2.0]
    # Step 2 is nan in both, which is the same.
    assert found["losses_part"] == [{"run": str(runs / "b"), "step": 3, "common_steps": 20}]
    assert (found["last_common_step"], found["losses"]) == (20, [1 / 20, 2 / 20])
    assert "at step 3" in do(capsys, "runs", "compare", runs / "a", runs / "b")[1]
    same = do(capsys, "runs", "compare", runs / "a", runs / "a")[1]
    assert "all 20 common steps" in same
    assert main(["runs", "compare", str(runs / "a")]) == 2


def test_watch_says_how_an_ended_run_ended(capsys, runs):
    code, shown = do(capsys, "watch", runs / "a")
    assert code == 0
    assert "stopped at step 20: SIGTERM" in shown
    assert "\x1b" not in shown
    lines = [json.loads(line) for line in do(capsys, "watch", runs / "a", "--json")[1].splitlines()]
    assert [line["kind"] for line in lines] == ["status", "ended"]
    assert lines[-1]["code"] == 75
    assert main(["watch", str(runs / "a"), "--interval", "soon"]) == 2


def test_plot_draws_in_the_terminal_and_as_pictures(capsys, runs):
    assert "a loss" in do(capsys, "plot", runs / "a", runs / "b")[1]
    for name, head in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml")):
        assert do(capsys, "plot", runs / "a", "--x", "time", "-o", runs / name)[0] == 0
        assert (runs / name).read_bytes().startswith(head)
    for words in (["--metric", "bogus"], ["-o", runs / "x.jpg"], ["-o", runs / "no/x.png"]):
        assert do(capsys, "plot", runs / "a", *words)[0] == 2


def test_a_report_is_one_page_that_fetches_nothing_and_holds_text_as_text(capsys, runs):
    page = runs / "r.html"
    assert do(capsys, "report", runs / "a", "-o", page)[0] == 0
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<svg" in text
    assert not re.search(r"(src|href)=[\"']http", text)
    assert do(capsys, "report", runs / "a", "-o", page)[0] == 0
    page.write_text("mine")
    assert do(capsys, "report", runs / "a", "-o", page)[0] == 2
    assert page.read_text() == "mine"
    assert do(capsys, "report", runs / "a", "-o", page, "--overwrite")[0] == 0


def test_reading_changes_nothing_in_a_runs_folder(capsys, runs, tmp_path):
    def facts():
        found = [os.stat(path) for path in (runs / "a", *sorted((runs / "a").iterdir()))]
        return [(f.st_ino, f.st_mtime_ns, f.st_ctime_ns, f.st_size) for f in found]

    before = facts()
    for words in (["runs", "ls", runs], ["watch", runs / "a"], ["plot", runs / "a"]):
        assert do(capsys, *words)[0] == 0
    assert do(capsys, "report", runs / "a", "-o", tmp_path / "r.html")[0] == 0
    assert facts() == before
