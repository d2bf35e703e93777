"""On a terminal: a bar, in colours or without."""

import os
import pty
import subprocess

from tests.helpers.command import KEEPSTEP, environment


def on_a_terminal(*words: str, **extra: str) -> tuple[int, str]:
    """Run the command with a terminal for its output; return the code and what it showed."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [str(KEEPSTEP), *words],
        stdout=slave,
        stderr=slave,
        env=environment({"TERM": "xterm-256color", "COLUMNS": "120", **extra}),
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            # The kernel reports the end of a terminal as an error.
            break
        if not part:
            break
        shown += part
    os.close(master)
    return process.wait(), shown.decode()


def test_a_terminal_gets_a_bar_with_the_numbers_and_the_words_of_every_ending(config, tmp_path):
    code, shown = on_a_terminal("train", str(config), f"--checkpoint.dir={tmp_path}")
    assert code == 0, shown
    assert "10/10" in shown
    assert "tok/s" in shown
    assert "\x1b[" in shown
    assert "finished at step 10; step_10 is saved in" in shown.replace("\r\n", "")
    code, shown = on_a_terminal("train", str(config), f"--checkpoint.dir={tmp_path}", NO_COLOR="1")
    assert code == 0
    assert "nothing to do" in shown
