"""Take the symbol table and the debug sections that only debuggers read out of an ELF library, deterministically.

What `strip --strip-unneeded` does for such a file, without its dependence on the version of binutils, so that every
machine writes the same bytes. Everything that a program header names (all that is ever loaded) stays as it is.
Format: System V ABI, chapter 4 (ELF-64, little-endian).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_PROGRAM = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_MAGIC = b"\x7fELF\x02\x01"  # 64 bit, little-endian
_SYMTAB, _NOBITS, _REL, _RELA = 2, 8, 9, 4
_ALLOC, _INFO_LINK = 0x2, 0x40


@dataclass(frozen=True, slots=True)
class _Section:
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int

    @property
    def movable(self) -> bool:
        """Whether the section is in the file but never loaded."""
        return not self.flags & _ALLOC and self.type not in (0, _NOBITS)


def drop_symbols(path: Path) -> int:
    """Rewrite the library at `path` without symbol table and debug sections; returns the bytes saved.

    0, and an untouched file, when it is no ELF library, has none of them, or is laid out so that bytes which are loaded
    lie behind them.
    """
    data = path.read_bytes()
    if not data.startswith(_MAGIC):
        return 0
    shorter = _without_symbols(data)
    if shorter is None or len(shorter) >= len(data):
        return 0
    mode = path.stat().st_mode
    path.unlink()  # the file may be a link to one in a cache
    path.write_bytes(shorter)
    path.chmod(mode)
    return len(data) - len(shorter)


def _without_symbols(data: bytes) -> bytes | None:
    header = list(_HEADER.unpack_from(data))
    program_offset, section_offset, program_count, section_count, names = (header[i] for i in (5, 6, 10, 12, 13))
    programs = [_PROGRAM.unpack_from(data, program_offset + i * _PROGRAM.size) for i in range(program_count)]
    sections = [_Section(*_SECTION.unpack_from(data, section_offset + i * _SECTION.size)) for i in range(section_count)]
    loaded_end = max((item[2] + item[5] for item in programs), default=0)
    loaded_end = max(loaded_end, program_offset + program_count * _PROGRAM.size)
    tables = {i for i, section in enumerate(sections) if section.type == _SYMTAB}
    texts = {sections[i].link for i in tables if sections[i].link != names and sections[sections[i].link].movable}
    text_at = sections[names].offset if section_count else 0
    debug = {i for i, s in enumerate(sections) if s.movable and data.startswith(b".debug_", text_at + s.name)}
    gone = tables | texts | debug
    moved = [i for i, section in enumerate(sections) if section.movable]
    linked = {section.link for i, section in enumerate(sections) if i not in gone}
    if not gone or gone & linked or section_offset < loaded_end or any(sections[i].offset < loaded_end for i in moved):
        return None
    made = bytearray(data[:loaded_end])
    kept = {}
    for i in sorted(set(moved) - gone, key=lambda number: sections[number].offset):
        section = sections[i]
        made += bytes(-len(made) % max(section.align, 1))
        kept[i] = replace(section, offset=len(made))
        made += data[section.offset : section.offset + section.size]
    number = {old: new for new, old in enumerate(i for i in range(section_count) if i not in gone)}
    made += bytes(-len(made) % 8)
    header[6], header[12], header[13] = len(made), len(number), number[names]
    for i in number:
        section = kept.get(i, sections[i])
        refers = section.type in (_REL, _RELA) or section.flags & _INFO_LINK
        made += _SECTION.pack(
            section.name, section.type, section.flags, section.address, section.offset, section.size,
            number.get(section.link, 0), number.get(section.info, 0) if refers else section.info,
            section.align, section.entry_size,
        )  # fmt: skip
    made[: _HEADER.size] = _HEADER.pack(*header)
    return bytes(made)
