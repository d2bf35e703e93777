"""Flags without a value, which stand beside the config's own: `--quiet`, `--json`, `--help`."""

from collections.abc import Sequence

from keepstep.config.explain import suggestion
from keepstep.errors import UsageError


def require_switches(words: Sequence[str], switches: Sequence[str], *, usage: str) -> None:
    """Refuse a word that was probably meant to be one of the switches, and says which.

    Everything else with two dashes is a key of the config, whose own check knows its names.
    """
    for word in words:
        name, equals, _ = word.partition("=")
        if not name.startswith("--") or "." in name or (name in switches and not equals):
            continue
        if name in switches:
            raise UsageError(f"{name} takes no value", hint=f"usage: {usage}")
        if near := suggestion(name, switches, cutoff=0.75):
            raise UsageError(f"there is no flag {name}{near}", hint=f"usage: {usage}")
