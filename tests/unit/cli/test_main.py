"""The first word, and how an error leaves: a message and a code, never a traceback."""

import errno
import signal

import pytest

from keepstep import __version__, errors
from keepstep.cli import main as command


def fails_with(monkeypatch, error, name="config"):
    def run(words):
        raise error

    monkeypatch.setattr(f"keepstep.cli.{name}.run_{name}", run)
    return command.main([name])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.KeepstepError("it failed"), 1),
        (errors.UsageError("it failed"), 2),
        (errors.ConfigError(["it failed"]), 2),
        (errors.CheckpointDamaged("it failed"), 3),
        (errors.NotFound("it failed"), 4),
        (errors.Locked("it failed"), 5),
        (errors.Diverged("it failed"), 6),
        (errors.Unhealthy("it failed"), 7),
    ],
)
def test_every_error_has_its_exit_code_and_its_words_on_stderr(monkeypatch, capsys, error, code):
    error.add_note("and a note")
    error.hint = "a hint"
    assert fails_with(monkeypatch, error) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: it failed\na hint\nand a note\n"


def test_what_the_system_refuses_names_the_file_and_a_way_out(monkeypatch, capsys):
    full = OSError(errno.ENOSPC, "No space left on device", "/runs/x")
    assert fails_with(monkeypatch, full) == 1
    assert capsys.readouterr().err.splitlines() == [
        "error: /runs/x: No space left on device",
        "Make room, then run the same command again.",
    ]
    assert fails_with(monkeypatch, full, "train") == 1
    assert capsys.readouterr().err.splitlines()[1:] == [
        "Make room, then run the same command to continue.",
        "`keepstep ckpt prune RUN --keep-last 1` shows which checkpoints could go;"
        " with --apply it deletes them.",
    ]


def test_our_own_mistakes_keep_their_traceback(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        fails_with(monkeypatch, ZeroDivisionError())


def test_an_interrupt_of_a_command_that_reads_is_a_code(monkeypatch):
    assert fails_with(monkeypatch, KeyboardInterrupt()) == 130


def test_no_command_shows_the_overview_and_is_a_usage_error(capsys):
    assert command.main([]) == 2
    bare = capsys.readouterr().out
    assert command.main(["--help"]) == 0
    assert capsys.readouterr().out == bare
    for name in command._COMMANDS:
        assert f"\n  {name} " in bare


def test_the_version_is_the_packages(capsys):
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"keepstep {__version__}\n"


@pytest.mark.parametrize(
    ("words", "near"),
    [(["trian"], "`train`"), (["checkpt"], "`ckpt`"), (["config", "shwo"], "`show`"),
     (["ckpt", "verfy"], "`verify`")],
)  # fmt: skip
def test_a_mistyped_command_is_told_what_was_probably_meant(capsys, words, near):
    assert command.main(words) == 2
    assert f"did you mean {near}?" in capsys.readouterr().err


def test_a_command_called_from_python_leaves_the_signals_as_they_were(tmp_path, capsys):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert command.main(["train", str(tmp_path / "none.toml")]) == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert "none.toml" in capsys.readouterr().err
