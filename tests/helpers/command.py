"""Runs the installed command in new processes, and looks at what they leave."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from keepstep.run.journal import read_journal
from keepstep.store import list_checkpoints

ROOT = Path(__file__).parents[2]
KEEPSTEP = Path(sys.executable).with_name("keepstep")
DEADLINE_SECONDS = 90


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child: one thread, no colours, the tests' hooks importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP_")}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "default",
        **(extra or {}),
    }


def injecting(**spec: Any) -> dict[str, str]:
    """Return the environment in which the command fails or dies at a file operation."""
    path = os.pathsep.join([str(Path(__file__).parent / "inject"), str(ROOT)])
    return {"PYTHONPATH": path, "KEEPSTEP_TEST_INJECT": json.dumps(spec)}


def keepstep(
    *words: object, extra: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; the output holds both streams."""
    return subprocess.run(
        [str(KEEPSTEP), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(extra),
        cwd=cwd,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


class Session:
    """A command that runs while the test looks on."""

    def __init__(
        self,
        *words: object,
        extra: Mapping[str, str] | None = None,
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        process = subprocess.Popen(
            [str(KEEPSTEP), *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(extra),
            start_new_session=True,
            pass_fds=pass_fds,
        )
        self._look_at(process)

    def _look_at(self, process: Any) -> None:
        self.process = process
        self.lines: list[str] = []
        # A command that hangs is killed, so that no read of its output waits for ever.
        self._hung = False
        self._timer = threading.Timer(DEADLINE_SECONDS, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_group()
        self.process.wait()
        self._timer.cancel()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def wait_for(self, text: str) -> str:
        """Read the output until a line holds `text`; the line is returned."""
        for line in self.read():
            if text in line:
                return line
        raise AssertionError(f"the command ended before it said {text!r}:\n{self.output}")

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        os.kill(self.process.pid, number)

    def wait_until_frozen(self) -> None:
        """Return when the command, a child of this process, is stopped by a signal."""
        found = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        assert found is not None and found.si_code == os.CLD_STOPPED, self.output

    def kill_group(self) -> None:
        """Kill the command and everything it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _give_up(self) -> None:
        self._hung = True
        self.kill_group()

    def end(self) -> int:
        """Read the output to its end; return the exit code."""
        for _ in self.read():
            pass
        code = self.process.wait()
        self._timer.cancel()
        # What hangs must not pass for what a test kills.
        assert not self._hung, f"not over after {DEADLINE_SECONDS} s:\n{self.output}"
        return code

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def read(self) -> Iterator[str]:
        """Yield the lines of the output that were not read yet, as they come."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            yield line


def outcome(run: Path) -> dict[str, Any]:
    return json.loads((run / "outcome.json").read_text())


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_journal(run / "journal.jsonl") if event["kind"] == kind]


def losses(run: Path) -> list[tuple[int, float | str, float | str]]:
    """Every logged step with its loss and gradient norm, in the order of the journal."""
    return [(e["step"], e["loss"], e["grad_norm"]) for e in events(run, "step")]


def steps(run: Path) -> list[int]:
    """The steps of the folders that stand there, whole or not."""
    return sorted(entry.step for entry in list_checkpoints(run))


def link(run: Path, name: str) -> str | None:
    path = run / name
    return path.readlink().name if path.is_symlink() else None


def digests(run: Path, step: int) -> dict[str, list[str]]:
    """The digests of every tensor of a checkpoint, and of its plain state."""
    (entry,) = [entry for entry in list_checkpoints(run) if entry.step == step]
    assert entry.manifest is not None, entry.fault
    found = {t.name: [piece.digest for piece in t.pieces] for t in entry.manifest.tensors}
    found["plain"] = [json.dumps(entry.manifest.plain, sort_keys=True)]
    return found
