"""What the store does, in the words of a run."""

from typing import TYPE_CHECKING, Any

from keepstep.config.quantities import bytes_text, number_text
from keepstep.store.manifest import Best

if TYPE_CHECKING:
    from keepstep.run.run import Run

_STORE_WORDS = {
    "methods": "commits are made by {methods}: {why}",
    "swept": "{name} was left by a session that died; removed",
    "retry": "step {step}: attempt {attempt} to save failed ({error}); trying again",
    "disk_refused": "on this file system {what}",
    "verified_on_disk": "step {step}: every byte was read back from the disk in {seconds:.2f} s",
    "not_read_back": "step {step} is committed; there was no time to read it back from the disk",
    "uploaded": "step {step} is in the remote too, after {seconds:.2f} s: {name}",
    "fetched": "{name} fetched, every byte verified",
    "passed_over": "{name} passed over: {fault}",
    "remote_retry": "remote: attempt {attempt} to {what} failed ({error}); trying again",
    "set_aside": "{name} moved to {new_name}: kept, never chosen",
    "written_anew": "{name} holds frozen weights and is written anew, not linked: {why}",
    "damaged": "{name} is damaged: {fault}",
    "housekeeping_failed": "the checkpoint is committed, but tidying up failed: {error}",
}


def tell_of_store(run: "Run", event: str, **facts: Any) -> None:
    """Tell the hooks, the terminal and the journal of an event of the store."""
    if event == "snapshot":
        run.hooks.call("on_snapshot", run, facts["step"])
    elif event == "committed":
        text = (
            f"step {facts['manifest'].step:,}  {bytes_text(facts['manifest'].size)}"
            f" · committed after {facts['seconds']:.2f} s"
        )
        run.hooks.call("on_notice", run, "save", text)
    elif event == "best_gone":
        run.notice("store", _best_gone_text(**facts))
    elif event in _STORE_WORDS:
        run.notice("store", _STORE_WORDS[event].format(**facts))


def _best_gone_text(*, gone: Best, fault: str, instead: Best | None) -> str:
    """Say what became of the best so far, what stands in for it, and how it comes back."""
    text = f"the best so far, step {gone.step:,} ({gone.metric} {number_text(gone.value)}), is "
    text += f"damaged ({fault})" if fault else "not there any more"
    if instead is None:
        text += "; no other that is there was measured: there is no best until the next evaluation"
    else:
        text += f"; step {instead.step:,} ({number_text(instead.value)}) takes its place"
    if fault:
        text += ". Put a whole copy in its place, if there is one, before the run is continued"
    return text
