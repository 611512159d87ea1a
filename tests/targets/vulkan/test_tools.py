"""Finding the shader tools, and what is said where they are missing or refuse."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from everycast.artifact.errors import CompileError
from everycast.targets.vulkan import tools
from everycast.targets.vulkan.spirv import compile_shaders
from everycast.targets.vulkan.tools import find_tool, missing_tools


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    find_tool.cache_clear()
    yield
    find_tool.cache_clear()


def test_a_tool_from_a_wheel_finds_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", "/mine")
    monkeypatch.setattr(tools.sysconfig, "get_path", lambda name: str(tmp_path))
    assert missing_tools() == ["glslangValidator", "spirv-val", "spirv-opt"]
    with pytest.raises(CompileError, match=r"spirv-opt, which is not installed; run: pip install"):
        find_tool("spirv-opt")
    folder = tmp_path / "cmeel.prefix" / "bin"
    folder.mkdir(parents=True)
    (folder / "spirv-opt").touch()
    tool = find_tool("spirv-opt")
    assert tool.path == folder / "spirv-opt"
    assert tool.environment == {"LD_LIBRARY_PATH": f"{tmp_path}/cmeel.prefix/lib:/mine"}


def test_a_shader_that_is_refused_is_named() -> None:
    if missing_tools():
        pytest.skip(f"not installed: {', '.join(missing_tools())}")
    with pytest.raises(CompileError) as caught:
        compile_shaders({"my_kernel": "#version 460\nvoid main() { nothing(); }\n"})
    text = str(caught.value)
    assert text.startswith("kernel 'my_kernel': glslangValidator refuses the shader: ERROR:")
    assert "\n" not in text and "nothing" in text
