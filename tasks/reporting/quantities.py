"""Numbers as people read them: with unit, interval and few digits. A missing one is a dash."""

import math
from datetime import UTC, datetime
from typing import TypeGuard

from tasks.contracts.base import TimeWindow
from tasks.contracts.evaluation import Metric
from tasks.kernel.values import printable as printable

MISSING = "\N{EN DASH}"
MINUS = "\N{MINUS SIGN}"
TIMES = "\N{MULTIPLICATION SIGN}"
THIN_SPACE = "\N{NARROW NO-BREAK SPACE}"
LARGEST_SHOWN = 1e12
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def is_shown(value: float | None) -> TypeGuard[float]:
    """True for a number that can be written and drawn: neither absent, NaN nor beyond measure."""
    return value is not None and math.isfinite(value) and abs(value) < LARGEST_SHOWN


def shortened(text: object, longest: int) -> str:
    """The text, cut in the middle to `longest` characters where it is longer."""
    whole = printable(text)
    if len(whole) <= longest:
        return whole
    head = longest // 2
    tail = longest - 1 - head
    return f"{whole[:head]}…{whole[len(whole) - tail :] if tail else ''}"


def count(value: float | None) -> str:
    """`336,776`."""
    return f"{value:,.0f}".replace("-", MINUS) if is_shown(value) else MISSING


def decimal(value: float | None, digits: int = 3) -> str:
    """`0.752`."""
    return f"{value:,.{digits}f}".replace("-", MINUS) if is_shown(value) else MISSING


def signed(value: float | None, digits: int = 3) -> str:
    """`+0.002`; a number that rounds to zero carries no sign."""
    if not is_shown(value):
        return MISSING
    text = f"{value:+,.{digits}f}"
    return text[1:] if float(text.replace(",", "")) == 0 else text.replace("-", MINUS)


def interval(metric: Metric | None, digits: int = 3) -> str:
    """The 95 % interval alone: `[0.748, 0.756]`."""
    if metric is None or not (is_shown(metric.low) and is_shown(metric.high)):
        return ""
    return f"[{decimal(metric.low, digits)}, {decimal(metric.high, digits)}]"


def estimate(metric: Metric | None, digits: int = 3) -> str:
    """Value and interval: `0.752 [0.748, 0.756]`."""
    if metric is None:
        return MISSING
    return f"{decimal(metric.value, digits)} {interval(metric, digits)}".strip()


def difference(metric: Metric | None, digits: int = 4) -> str:
    """Signed value and interval: `+0.0021 [+0.0003, +0.0044]`."""
    if metric is None:
        return MISSING
    bounds = f"[{signed(metric.low, digits)}, {signed(metric.high, digits)}]"
    return f"{signed(metric.value, digits)} {bounds}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of one as `23.7 %`."""
    return f"{decimal(share * 100, digits)}{THIN_SPACE}%" if is_shown(share) else MISSING


def duration(seconds: float | None) -> str:
    """`0.42 s`, `41.3 s`, `3 min 24 s` or `2 h 05 min`."""
    if not is_shown(seconds):
        return MISSING
    if seconds < 10:
        return f"{decimal(seconds, 2)} s"
    if seconds < 99.95:
        return f"{decimal(seconds, 1)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, part = divmod(minutes, 60)
    return f"{hours:,} h {part:02d} min" if hours else f"{minutes} min {rest:02d} s"


def milliseconds(value: float | None) -> str:
    """Three significant digits: `0.0312 ms`, `1.24 ms`, `142 ms`."""
    return f"{significant(value)} ms" if is_shown(value) else MISSING


def significant(value: float | None, digits: int = 3) -> str:
    """Significant digits: `0.0312`, `1.24`, `14,200`; the very small with a power of ten."""
    if not is_shown(value):
        return MISSING
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if int(exponent) < -4:
        power = f"-{-int(exponent)}".translate(_SUPERSCRIPTS)
        return f"{mantissa.replace('-', MINUS)}{TIMES}10{power}"
    return decimal(float(f"{mantissa}e{exponent}"), max(0, digits - 1 - int(exponent)))


def size(num_bytes: float | None) -> str:
    """`12.4 MB`, in powers of 1000."""
    if not is_shown(num_bytes):
        return MISSING
    power = 0
    while abs(num_bytes) >= 999.5 and power < len(_BYTE_UNITS) - 1:
        num_bytes, power = num_bytes / 1000, power + 1
    return f"{significant(num_bytes) if power else count(num_bytes)} {_BYTE_UNITS[power]}"


def factor(ratio: float | None) -> str:
    """A ratio of latencies as a factor; below 1 is faster."""
    return f"{significant(ratio, 2)}{TIMES}" if is_shown(ratio) else MISSING


def moment(value: datetime) -> str:
    """`2013-01-31 06:00 UTC`."""
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def days(window: TimeWindow) -> str:
    """`2013-01-01 to 2014-01-01`, with hours only where a bound is not midnight."""
    whole_days = all(f"{t:%H:%M:%S}" == "00:00:00" for t in (window.start, window.end))
    form = "%Y-%m-%d" if whole_days else "%Y-%m-%d %H:%M"
    return f"{window.start:{form}} to {window.end:{form}}"


def short_digest(digest: str) -> str:
    """The first twelve characters, enough to tell digests apart by eye."""
    return digest[:12]


def short_commit(commit: str) -> str:
    """The first characters of a commit, and whether files differed: `8970679c4d1b-modified`."""
    name, dash, state = commit.partition("-")
    return f"{name[:12]}{dash}{state}"


def plural(number: int, one: str, many: str | None = None) -> str:
    """`1 row`, `2 rows`."""
    return f"{count(number)} {one if number == 1 else many or one + 's'}"
