"""A short run whose every file operation is known, to be killed or failed at each of them."""

from pathlib import Path

from tests.helpers import warm
from tests.helpers.command import digests, events, injecting, keepstep, link, losses, steps

SHORT = (
    "--checkpoint.interval=2",
    "--evaluation.interval=2",
    "--train.max_steps=6",
    "--data.workers=0",
)


def whole(run: Path) -> bool:
    """Whether every checkpoint there is whole; without one, the verifier has to say so."""
    done = warm.keepstep("ckpt", "verify", run)
    return done.returncode == (0 if steps(run) else 4)


def assert_same_as(run: Path, reference: Path) -> None:
    """Assert that a run ended as the untouched one did, in every bit that it tells."""
    assert steps(run)[-1] == steps(reference)[-1]
    last = steps(run)[-1]
    assert digests(run, last) == digests(reference, last)
    assert losses(run) == losses(reference)
    assert link(run, "best") == link(reference, "best")
    assert link(run, "latest") == f"step_{last}"
    found = [(e["step"], e["metrics"]) for e in events(run, "evaluation")]
    assert found == [(e["step"], e["metrics"]) for e in events(reference, "evaluation")]


def logged_operations(
    log: Path, *words: object, copies: tuple[Path, Path] | None = None
) -> list[str]:
    """Run the command to its end; return its file operations in order, `number name path`.

    ``copies`` (folder, into): what a SIGKILL before each operation would leave of a folder, in
    `into/<number>`. The files are in the kernel's hands: a killed process leaves what a reader sees
    at that instant.
    """
    spec = {} if copies is None else {"copies": [str(path) for path in copies]}
    done = keepstep(*words, extra=injecting(log=str(log), at=0, **spec))
    assert done.returncode == 0, done.stdout
    return log.read_text().splitlines()


def operations_of_a_save(operations: list[str], step: int) -> range:
    """Return the numbers of all operations of a save, up to the journal's line that tells of it."""
    first = next(n for n, line in enumerate(operations) if f"/.staging-{step}-" in line)
    last = next(n for n, line in enumerate(operations[first:], first) if "remove_folder" in line)
    # One more: the journal's line that tells of the save.
    return range(first + 1, last + 4)


def leaves_more_when_killed(operation: str) -> bool:
    """Tell whether a process that is killed before the operation leaves other files than after it.

    A sync or a close changes nothing that a killed process leaves: the state is that before the
    next operation.
    """
    return operation.split()[1] not in ("sync", "sync_folder", "close", "open_for_append")
