"""The GGUF that both engines are measured on holds what its source holds, in the types promised."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from everycast.benchmarks.q4_0_gguf import matrix_bytes, num_block_parameters, write_q4_0
from gguf.quants import dequantize, quantize

ROWS, COLUMNS = 8, 64
Q4_0, Q4_1 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q4_1
Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A head of 8 bits, one matrix of 4 and a norm."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((ROWS, COLUMNS), dtype=np.float32)
    path = tmp_path / "source.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(3)
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    writer.add_tensor("token_embd.weight", quantize(matrix, Q8_0), raw_dtype=Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", quantize(matrix, Q4_1), raw_dtype=Q4_1)
    writer.add_tensor("blk.0.attn_norm.weight", matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_only_narrow_matrices_change(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    write_q4_0(source, target)
    before = {t.name: t for t in gguf.GGUFReader(source).tensors}
    after = {t.name: t for t in gguf.GGUFReader(target).tensors}
    assert list(after) == list(before)
    narrow = "blk.0.attn_q.weight"
    for name in before.keys() - {narrow}:
        assert after[name].tensor_type == before[name].tensor_type
        np.testing.assert_array_equal(after[name].data, before[name].data)
    assert after[narrow].tensor_type == Q4_0
    expected = quantize(dequantize(before[narrow].data, Q4_1), Q4_0)
    np.testing.assert_array_equal(after[narrow].data, expected)


def test_metadata_is_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    write_q4_0(source, target)
    before, after = (gguf.GGUFReader(path).fields for path in (source, target))
    assert set(after) == set(before)
    assert after["general.file_type"].contents() == 2
    for name in set(before) - {"general.file_type"}:
        assert after[name].contents() == before[name].contents()


def test_sizes(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target.gguf"
    write_q4_0(source, target)
    numbers = ROWS * COLUMNS
    # A block of 32 is 18 bytes in Q4_0, 34 in Q8_0.
    assert matrix_bytes(target) == (numbers // 32 * (18 + 34), 2 * numbers)
    assert num_block_parameters(target) == numbers
