"""llama.cpp's own tokenizer test vectors, out of the package that carries them."""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from everycast.relax_models.checkpoint.gguf import GGUFCheckpoint
from everycast.relax_models.checkpoint.tokenizer_gguf import tokenizer_from_gguf

PACKAGE = "llama-cpp-python==0.3.36"
SUITES = (
    "command-r",
    "deepseek-coder",
    "deepseek-llm",
    "falcon",
    "gpt-2",
    "llama-bpe",
    "llama-spm",
    "mpt",
    "phi-3",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
)
SEPARATOR = "\n__ggml_vocab_test__\n"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the vocabularies and their vectors (76 MB to download)."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--no-input"),
            *("--no-binary", "llama-cpp-python", "--dest", str(folder), PACKAGE),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.skip(f"{PACKAGE} cannot be downloaded: {result.stderr.strip()[-200:]}")
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        for member in archive:
            name = Path(member.name).name
            if name.startswith("ggml-vocab-") and (content := archive.extractfile(member)):
                (folder / name).write_bytes(content.read())
    return folder


@pytest.mark.parametrize("suite", SUITES)
def test_suite(vectors: Path, suite: str) -> None:
    path = vectors / f"ggml-vocab-{suite}.gguf"
    tokenizer = tokenizer_from_gguf(GGUFCheckpoint(path).config, where=path.name).tokenizer
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    lines = Path(f"{path}.out").read_text().split("\n")
    cases = [
        (text, [int(token_id) for token_id in line.split()])
        for text, line in zip(texts, lines, strict=False)
    ]
    assert len(cases) >= 46
    for text, expected in cases:
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, repr(text)
