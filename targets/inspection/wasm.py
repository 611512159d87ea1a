"""As much of WebAssembly as an inspection needs: the memory that a module starts with.

Source: WebAssembly Core Specification 1.0, sections 5.2.2 (integers), 5.5.14 (data section).
"""

MAGIC = b"\0asm\x01\0\0\0"
_DATA_SECTION = 11
_CONSTANT, _END = 0x41, 0x0B  # i32.const, end of an expression


def initial_memory(data: bytes) -> bytes:
    """The module's data segments, each at its address. ValueError if `data` is no such module."""
    if not data.startswith(MAGIC):
        raise ValueError("it is no WebAssembly module")
    try:
        return _initial_memory(data)
    except IndexError:
        raise ValueError("its WebAssembly sections are damaged") from None


def _initial_memory(data: bytes) -> bytes:
    position, memory = len(MAGIC), bytearray()
    while position < len(data):
        section = data[position]
        length, start = _integer(data, position + 1)
        position = start + length
        if section != _DATA_SECTION:
            continue
        count, at = _integer(data, start)
        for _ in range(count):
            kind, at = _integer(data, at)
            if kind != 0 or data[at] != _CONSTANT:
                raise ValueError("its WebAssembly data has no fixed place")
            address, at = _integer(data, at + 1)
            if data[at] != _END:
                raise ValueError("its WebAssembly data has no fixed place")
            size, at = _integer(data, at + 1)
            if at + size > position:
                raise IndexError
            memory.extend(bytes(max(0, address + size - len(memory))))
            memory[address : address + size] = data[at : at + size]
            at += size
    if position != len(data):
        raise IndexError
    return bytes(memory)


def _integer(data: bytes, position: int) -> tuple[int, int]:
    """An unsigned number, seven bits in each byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position
