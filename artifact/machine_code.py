"""Machine code in place of source text, for runtimes that would compile the text when loading it.

TVM's CUDA runtime hands the text of a library's kernels to `tvm_callback_cuda_compile`. With code
in it, that function is `from_text`, and a machine that only runs models needs no compiler.
"""

import base64

OLDEST_CUDA = 80
"""Compute capability (times ten) that the kernels for CUDA need: Ampere's."""
PREFIX = "// everycast: machine code in base64\n"


def as_text(code: bytes) -> str:
    return PREFIX + base64.b64encode(code).decode()


def from_text(text: str) -> bytes:
    """The code that `as_text` was given. ValueError for another text."""
    if not text.startswith(PREFIX):
        raise ValueError("the text holds no machine code")
    return base64.b64decode(text.removeprefix(PREFIX))
