"""An answer that an error breaks off, in the terminal."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from everycast.artifact.errors import DeviceError
from everycast.chat_session import print_answer


@pytest.mark.parametrize(("said", "out"), [(["Hel", "lo"], "Hello\n"), ([], "")])
def test_the_error_gets_a_line_of_its_own(
    said: list[str], out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(turns: Any, show: Callable[[str], None]) -> None:
        for text in said:
            show(text)
        raise DeviceError("the device was lost")

    session: Any = SimpleNamespace(answer=answer)
    with pytest.raises(DeviceError):
        print_answer(session, [])
    assert capsys.readouterr().out == out
