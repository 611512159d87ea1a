import pytest
from everycast.artifact.machine_code import as_text, from_text


@pytest.mark.parametrize("code", [b"", b"\0\xff\n", bytes(range(256))])
def test_code_survives_as_text(code: bytes) -> None:
    text = as_text(code)
    assert text.isascii() and text.startswith("//") and from_text(text) == code


def test_source_is_no_machine_code() -> None:
    with pytest.raises(ValueError, match="no machine code"):
        from_text("__global__ void f() {}")
