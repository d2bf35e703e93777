"""Arguments of the commands, from the signatures of the functions that carry them out."""

from collections.abc import Callable, Mapping, Sequence

import tyro

from keepstep.config.explain import suggestion
from keepstep.errors import UsageError


def dispatch(command: str, functions: Mapping[str, Callable[..., int]], argv: Sequence[str]) -> int:
    """Call the function that the first word names with the arguments that the others give.

    The function's docstring and its arguments' make the help.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(f"usage: keepstep {command} {{{','.join(functions)}}} ...\n")
        for name, function in functions.items():
            summary = (function.__doc__ or "").strip().splitlines()[0]
            print(f"  {name:<10} {summary}")
        print(f"\n`keepstep {command} NAME --help` says more.")
        return 0 if argv else UsageError.exit_code
    name, *rest = argv
    if name not in functions:
        near = suggestion(name, list(functions))
        raise UsageError(
            f"there is no command `keepstep {command} {name}`{near}",
            hint=f"`keepstep {command} --help` lists them.",
        )
    return call(f"keepstep {command} {name}", functions[name], rest)


def call(program: str, function: Callable[..., int], argv: Sequence[str]) -> int:
    """Call a function with parsed arguments; a usage error or `--help` becomes an exit code."""
    try:
        code: int = tyro.cli(
            function,
            prog=program,
            args=list(argv),
            config=(tyro.conf.FlagCreatePairsOff,),
        )
        return code
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else UsageError.exit_code
