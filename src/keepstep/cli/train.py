"""`keepstep train CONFIG`: start the run, or continue it."""

from collections.abc import Sequence
from dataclasses import dataclass, make_dataclass
from typing import Annotated

from keepstep.cli.switches import require_switches
from keepstep.errors import UsageError
from keepstep.run.stop import StopRequests

_USAGE = "keepstep train CONFIG [--quiet] [--section.key=value ...]"
_DESCRIPTION = """\
Start the run that CONFIG describes, or continue it: always the same command.
- Every key of the config is a flag, written --a.b=c or --a.b c; values are as in TOML.
- [model] takes every key of the model library's own config too: --model.hidden_size=256.
- The window of dense saves is there where one of its flags is; then the (required) ones are.
- --quiet shows only what matters.
"""


def run_train(argv: Sequence[str]) -> int:
    """Train as `argv` (CONFIG, overrides, `--quiet`) says; return the exit code."""
    if {"-h", "--help"} & set(argv):
        return _help(argv)
    if not argv or argv[0].startswith("--"):
        raise UsageError("`keepstep train` needs a config file first", hint=f"usage: {_USAGE}")
    with StopRequests(ends_process=True) as stop:
        # Below the handlers, because importing torch takes seconds in which a signal may come.
        from keepstep.config.quantities import seconds
        from keepstep.tasks.registry import load_task_config

        require_switches(argv, ("--quiet", "--help"), usage=_USAGE)
        overrides = [word for word in argv[1:] if word != "--quiet"]
        config = load_task_config(argv[0], overrides, look=True).config
        stop.set_grace(seconds(config.run.grace))

        from keepstep.report.console import Console
        from keepstep.report.trackers import Trackers
        from keepstep.train import train

        # The console comes last: nothing is told after its last line.
        hooks = [Trackers(), Console(quiet="--quiet" in argv)]
        return train(config, stop=stop, hooks=hooks).exit_code


def _help(argv: Sequence[str]) -> int:
    """Print every flag, from the schema of the task that the config names."""
    import tyro

    from keepstep.config.schema import CheckpointConfig, DenseWindowConfig, RunConfig
    from keepstep.tasks.registry import config_class, load_task_config

    named = argv[0] if not argv[0].startswith("-") else ""
    task = load_task_config(named, []).config.task if named else "language"

    @dataclass(frozen=True, kw_only=True)
    class ShownRun(RunConfig):
        """Who the run is and where it lives."""

        # Shown as it is written: like every list, as in TOML.
        hooks: Annotated[
            tuple[str, ...],
            tyro.conf.arg(metavar="\"['a:A', 'b:B']\"", help_behavior_hint="(default: [])"),
        ] = ()
        """Hooks to call during the run, each as `module:Class`; one may stand without brackets."""

    shown_run = [("run", ShownRun, ShownRun())]
    schema = make_dataclass(
        "Shown", shown_run, bases=(config_class(task),), frozen=True, kw_only=True
    )
    # The window's own flags show only where there is a window to show them of.
    window = DenseWindowConfig(start=tyro.MISSING, stop=tyro.MISSING)
    shown = schema(checkpoint=CheckpointConfig(dyn_ckpt_window=window))
    try:
        tyro.cli(
            schema,
            prog=_USAGE,
            description=_DESCRIPTION,
            default=shown,
            args=["--help"],
            config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
            use_underscores=True,
        )
    except SystemExit as leaving:
        return int(leaving.code or 0)
    raise AssertionError("tyro leaves after the help")
