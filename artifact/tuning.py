"""What compiler and runtime both know of tuning: where records lie, and whose they are."""

from dataclasses import dataclass
from pathlib import Path

from .cache import cache_dir

SHIPPED = Path(__file__).parents[1] / "schedules" / "tuned"
"""Files of records that come with everycast (`schedules/tuning/records.py`)."""


def user_folder() -> Path:
    """Those of this user."""
    return cache_dir() / "tuned"


@dataclass(frozen=True, slots=True)
class TunedDevice:
    """A device of this machine. `name` is what records of all such devices are kept under, `label`
    is for people, `architecture` what machine code must be for, if there are several."""

    kind: str
    index: int
    architecture: str | None
    label: str
    name: str
