"""Quantities as users write them: "90s", "15min", "2h", "1d12h"."""

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(d|h|min|s)\s*")


def seconds(text: str) -> float:
    """Return the duration in seconds; ValueError names what is allowed."""
    parts = list(_PART.finditer(text))
    if not parts or "".join(part.group(0) for part in parts) != text:
        raise ValueError('must be a duration such as "90s", "15min", "2h" or "1d12h"')
    return sum(float(part.group(1)) * _SECONDS[part.group(2)] for part in parts)


def _checked(text: str) -> str:
    seconds(text)
    return text


def _as_text(given: Any) -> Any:
    return str(given) if isinstance(given, int) and not isinstance(given, bool) else given


Duration = Annotated[str, AfterValidator(_checked)]
DurationOrNone = Annotated[str, AfterValidator(lambda text: text and _checked(text))]
StepOrWord = Annotated[str, BeforeValidator(_as_text)]


def bytes_text(count: int) -> str:
    """Return a size for people: `148.2 MB`, in powers of 1000."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def number_text(value: float, *, digits: int = 4) -> str:
    """Return a number for people: a small one is not 0.0000, a huge one no wall of digits."""
    return f"{value:.{digits}f}" if value == 0 or 0.001 <= abs(value) < 1e6 else f"{value:.3e}"
