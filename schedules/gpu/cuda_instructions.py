"""Instructions of NVIDIA GPUs that TIR has no words for: inline PTX in small device functions.

What each does is in the PTX ISA, under the name that it has in the text. All are there from sm_80
on. Matrices of halves go through registers as uint32, two values each, the lower one first.
"""

from collections.abc import Sequence
from typing import Any

from tvm.backend.cuda.op import cuda_func_call
from tvm.script import tirx as T
from tvm.tirx.script import builder as B

_HEAD = "__device__ __forceinline__"

_MMA = f"""
{_HEAD} void everycast_mma(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                           unsigned b0, unsigned b1) {{
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}}
"""

_LDMATRIX = f"""
{_HEAD} void everycast_ldmatrix(unsigned* out, const half* row) {{
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"((unsigned)__cvta_generic_to_shared(row)));
}}
"""

_CP_ASYNC = f"""
{_HEAD} void everycast_copy_async_BYTES(void* to, const void* from) {{
  asm volatile("cp.async.CACHE.shared.global [%0], [%1], BYTES;"
               : : "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}}
"""

_CP_ASYNC_COMMIT = f"""
{_HEAD} void everycast_commit_copies() {{
  asm volatile("cp.async.commit_group;" : : : "memory");
}}
"""

_CP_ASYNC_WAIT = f"""
{_HEAD} void everycast_wait_for_copies_COUNT() {{
  asm volatile("cp.async.wait_group COUNT;" : : : "memory");
}}
"""

_STORE = f"""
{_HEAD} void everycast_store_halves(half* to, unsigned a, unsigned b, unsigned c, unsigned d) {{
  *(uint4*)to = make_uint4(a, b, c, d);
}}
"""

_PACK = f"""
{_HEAD} unsigned everycast_pack_halves(float low, float high) {{
  half2 both = __floats2half2_rn(low, high);
  return *(unsigned*)&both;
}}
"""

_DECODE_PAIR = f"""
{_HEAD} unsigned everycast_decode_pair(unsigned pair, half zero, half scale, half low_end) {{
  half2 q = __hsub2(*(half2*)&pair, __half2half2(zero));
  half2 w = __hfma2(q, __half2half2(scale), __half2half2(low_end));
  return *(unsigned*)&w;
}}
"""

_BYTE_PERM = f"""
{_HEAD} unsigned everycast_byte_perm(unsigned a, unsigned b, unsigned selector) {{
  return __byte_perm(a, b, selector);
}}
"""


def multiply(sums: Any, at: Any, a: Sequence[Any], b: Sequence[Any]) -> None:
    """sums[at … at + 3] += a · bᵀ of 16 x 16 and 8 x 16 halves, shared out over a warp."""
    _run("everycast_mma", _MMA, _pointer(sums, at), *a, *b)


def load_matrices(out: Any, first: int, tile: Any, at: Any) -> None:
    """out[first … first + 3] = four matrices of 8 x 8 halves; lane i gives the start of row i % 8
    of matrix i / 8, in shared memory, at a multiple of 8."""
    _run("everycast_ldmatrix", _LDMATRIX, _pointer(out, first), _pointer(tile, at))


def copy_async(to: Any, at: Any, source: Any, *indices: Any, num_bytes: int = 16) -> None:
    """Start to copy 4, 8 or 16 bytes to shared memory; both starts are multiples of as many."""
    text = _CP_ASYNC.replace("BYTES", str(num_bytes))
    # Only reads of 16 bytes can go around the first cache.
    text = text.replace("CACHE", "cg" if num_bytes == 16 else "ca")
    name = f"everycast_copy_async_{num_bytes}"
    _run(name, text, _pointer(to, at), _pointer(source, *indices))


def commit_copies() -> None:
    """What this thread has started to copy since the last time is a group, perhaps empty."""
    _run("everycast_commit_copies", _CP_ASYNC_COMMIT)


def wait_for_copies(pending: int = 0) -> None:
    """Until all of this thread's groups but the last `pending` are there; other threads see them
    after a barrier."""
    text = _CP_ASYNC_WAIT.replace("COUNT", str(pending))
    _run(f"everycast_wait_for_copies_{pending}", text)


def store_halves(tile: Any, at: Any, words: Sequence[Any]) -> None:
    """Store 8 halves, in 4 uint32, at a multiple of 8."""
    _run("everycast_store_halves", _STORE, _pointer(tile, at), *words)


def pack_halves(low: Any, high: Any) -> Any:
    """Two float32 rounded to halves, in a uint32."""
    return _value("uint32", "everycast_pack_halves", _PACK, low, high)


def decode_pair(pair: Any, zero: Any, scale: Any, low_end: Any) -> Any:
    """(pair - zero) · scale + low_end of two halves in a uint32; all float16, rounded once if
    pair - zero is a small integer."""
    return _value("uint32", "everycast_decode_pair", _DECODE_PAIR, pair, zero, scale, low_end)


def byte_pair(word: Any, first: int) -> Any:
    """The halves 1024 + byte, of the bytes `first` (0 or 2) and `first` + 1 of a word."""
    # The selector's digits name bytes, last first: of the word 0 to 3, of the exponents 4 to 7.
    exponents, selector = T.uint32(0x64646464), T.uint32(0x4342 if first else 0x4140)
    return _value("uint32", "everycast_byte_perm", _BYTE_PERM, word, exponents, selector)


def _pointer(buffer: Any, *indices: Any) -> Any:
    return T.address_of(buffer[indices])


def _value(dtype: str, name: str, source: str, *args: Any) -> Any:
    return cuda_func_call(name, *args, source_code=source, return_type=dtype)


def _run(name: str, source: str, *args: Any) -> None:
    B.evaluate(cuda_func_call(name, *args, source_code=source))
