"""Of long tests a part runs, another one each day."""

from datetime import UTC, datetime

TODAY = datetime.now(UTC).toordinal()
