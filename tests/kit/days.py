"""Of long tests a part runs, another one each day."""

from datetime import UTC, datetime

TODAY = datetime.now(UTC).toordinal()


def turn_of(n: int, day: int = TODAY) -> int:
    """How many times a test that runs each n-th day has had its turn, but for a number that stays the same.

    It says which part of its cases such a test takes. The day itself would not do: of six parts, a test of each second
    day would only ever take three.
    """
    return day // n
