"""What tests of several folders share."""

import os
from pathlib import Path

import pytest
from everycast.artifact.cache import cache_dir
from everycast.artifact.errors import EverycastError


@pytest.fixture(scope="session")
def default_gguf() -> Path:
    """The default model's GGUF in the user's cache, fetched if it is not there.

    A continuous integration run (`CI` is set) fails without it, others skip.
    """
    from everycast.relax_models.checkpoint.named_models import fetch_named

    try:
        return fetch_named("smollm2-135m", cache_dir())
    except EverycastError as error:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"the default model cannot be had: {error}")
