import pytest
from everycast.artifact.errors import CompileError
from everycast.targets.target import find_target


def test_the_cpu_target_is_found_with_and_without_an_architecture() -> None:
    for text in ("cpu", "cpu:", "cpu:x86-64-v3"):
        target = find_target(text)
        assert (target.name, target.library_suffix) == ("cpu", "so")
    assert find_target("cpu:x86-64-v3").spec["mcpu"] == "x86-64-v3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("webgpt", "unknown target 'webgpt'; did you mean webgpu"),
        ("vulkan:anything", "target vulkan has one library for all devices; leave ':anything' out"),
        ("cpv", "unknown target 'cpv'; did you mean cpu"),
        ("cudda", "did you mean cuda"),
        ("quantum", "unknown target 'quantum'; supported: cpu, vulkan, cuda"),
        ("", "unknown target ''"),
        ("cpu:x86-64-v33", "did you mean x86-64-v3"),
        ("all:sm_90", "target all is every target as it comes; leave ':sm_90' out"),
    ],
)
def test_an_unknown_target_is_one_line(text: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        find_target(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
