"""What a pickle names and asks for, read off its operations; nothing of it is ever loaded.

Without this a file of a hundred bytes has memory allocated for any number that it holds: Python's
own reader believes the numbers of a pickle before it looks whether what they count is there.
"""

import pickletools

_ASKING = ("PUT", "BINPUT", "LONG_BINPUT", "FRAME")


def names_in(pickled: bytes) -> set[str]:
    """Return what a pickle names, each as `module.name`; ValueError where it is cut short."""
    return {
        str(argument).replace(" ", ".")
        for operation, argument, _ in pickletools.genops(pickled)
        if operation.name == "GLOBAL"
    }


def require_modest(pickled: bytes) -> None:
    """Raise ValueError for a pickle that asks for more than it has bytes."""
    for operation, argument, _ in pickletools.genops(pickled):
        if operation.name in _ASKING and int(argument or 0) > len(pickled):
            raise ValueError(f"{operation.name} asks for {argument:,}")
