"""Pickle reader for protocols 2 to 5: returns plain values, runs no code, and leaves large bytes in the file.

Every name goes to `resolve_global`, which returns one of our own `AllowedGlobal`s or raises an error. Python's own
unpickler can be restricted in the same way, but it copies all bytes into memory, once or, for arrays of protocol 2,
several times. Large strings and bytes stay in the file here (`LargeText`, `memoryview`) until they are used: a dump of
slime of 203 MB takes half the time and a third less memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from trimtab.errors import InputError
from trimtab.trace.message_text import clip

LARGE = 1 << 16
_LONGEST_NAME = 512
_LONGEST_INTEGER = 32
_INT32 = struct.Struct("<i").unpack_from
_FLOAT64 = struct.Struct(">d").unpack_from


@dataclass(frozen=True, slots=True, eq=False)
class LargeText:
    """A string of more than `LARGE` bytes, left in the file as UTF-8."""

    utf8: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class AllowedGlobal:
    """Replacement of a class or function that a pickle names: only `make`, our own function, is ever called."""

    name: str
    make: Callable[..., Any]


@dataclass(slots=True, eq=False)
class OpaqueObject:
    """An object of a known data class, as the values that it was pickled with.

    `state["x"]` reads as the attribute `x`, if state is a dictionary; `items` and `entries` are what a class derived
    from dict or list holds.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)
    entries: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        state = self.state
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)


class Unpickler:
    """Reads one pickle after another from a buffer.

    Args:
        code: the buffer; `at` is where the next pickle starts.
        resolve_global: maps module and name to their replacement; raises InputError for anything but data.
        load_storage: maps a persistent id to its storage.
    """

    def __init__(
        self,
        code: memoryview,
        resolve_global: Callable[[str, str], Any],
        load_storage: Callable[[Any], Any],
    ) -> None:
        self.at = 0
        self._code = code
        self._resolve_global = cache(resolve_global)
        self._load_storage = load_storage
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The next pickle's value.

        Raises:
            InputError: if it is damaged, or holds anything but data.
        """
        self._stack, self._marks, self._memo = [], [], {}
        try:
            return self._run()
        except InputError:
            raise
        except IndexError:
            reason = "it is truncated or damaged"
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            reason = f"it is damaged ({clip(str(error))})"
        raise InputError(f"not a readable pickle: {reason}")

    def _run(self) -> Any:
        code, stack, at = self._code, self._stack, self.at
        append = stack.append
        operations = _OPERATIONS
        while True:
            op = code[at]
            at += 1
            # Most opcodes of a large pickle push numbers.
            if op == 0x4B:  # BININT1
                append(code[at])
                at += 1
            elif op == 0x4A:  # BININT
                append(_INT32(code, at)[0])
                at += 4
            elif op == 0x4D:  # BININT2
                append(code[at] | code[at + 1] << 8)
                at += 2
            elif op == 0x47:  # BINFLOAT
                append(_FLOAT64(code, at)[0])
                at += 8
            elif op == 0x2E:  # STOP
                self.at = at
                return stack.pop()
            else:
                self.at = at
                operations[op](self)
                at = self.at

    def _read(self, count: int) -> memoryview:
        """The next bytes of the program."""
        taken = self._code[self.at : self.at + count]
        if len(taken) != count:
            raise InputError(f"not a readable pickle: truncated, or it claims {count} bytes that are not there")
        self.at += count
        return taken

    def _number(self, width: int) -> int:
        return int.from_bytes(self._read(width), "little")

    def _pop_items(self) -> list[Any]:
        """The items since the last mark."""
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    # Operations, each of one opcode or of several that differ in the width of their operand.

    def _protocol(self) -> None:
        if not 2 <= (protocol := self._number(1)) <= 5:
            raise InputError(f"a pickle of protocol {protocol}; protocols 2 to 5 are read")

    def _frame(self) -> None:
        self._read(8)

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _text(self, width: int) -> None:
        utf8 = self._read(self._number(width))
        self._stack.append(LargeText(utf8) if len(utf8) > LARGE else str(utf8, "utf-8", "surrogatepass"))

    def _bytes(self, width: int) -> None:
        data = self._read(self._number(width))
        self._stack.append(data.toreadonly() if len(data) > LARGE else bytes(data))

    def _integer(self, width: int) -> None:
        size = self._number(width)
        if size > _LONGEST_INTEGER:
            raise InputError(f"not a readable pickle: it holds an integer of {size} bytes")
        self._stack.append(int.from_bytes(self._read(size), "little", signed=True))

    def _put(self, width: int) -> None:
        self._memo[self._number(width)] = self._stack[-1]

    def _get(self, width: int) -> None:
        self._stack.append(self._memo[self._number(width)])

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _tuple(self) -> None:
        self._stack.append(tuple(self._pop_items()))

    def _short_tuple(self, count: int) -> None:
        stack = self._stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]

    def _append_one(self) -> None:
        self._extend([self._stack.pop()])

    def _append_many(self) -> None:
        self._extend(self._pop_items())

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is OpaqueObject:
            target = target.entries
        if type(target) is not list:
            raise TypeError("appends to an object that is not a list")
        target.extend(items)

    def _set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _set_many(self) -> None:
        self._set(self._pop_items())

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is OpaqueObject:
            target = target.items
        if type(target) is not dict or len(items) % 2:
            raise TypeError("sets items of an object that is not a dictionary, or a key without a value")
        target.update(zip(items[::2], items[1::2], strict=True))

    def _frozen_set(self) -> None:
        self._stack.append(self._pop_items())

    def _global(self) -> None:
        names = bytes(self._code[self.at : self.at + 2 * _LONGEST_NAME]).split(b"\n", 2)
        if len(names) < 3:
            raise InputError("not a readable pickle: it is truncated, or names a class of endless length")
        self.at += len(names[0]) + len(names[1]) + 2
        self._stack.append(self._resolve_global(str(names[0], "utf-8"), str(names[1], "utf-8")))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a class whose name is no string")
        self._stack.append(self._resolve_global(module, name))

    def _call(self) -> None:
        args, function = self._stack.pop(), self._stack.pop()
        if type(function) is not AllowedGlobal or type(args) is not tuple:
            raise TypeError("calls an object that is not an allowed class")
        try:
            self._stack.append(function.make(*args))
        except TypeError:
            raise TypeError(f"{function.name} was called with wrong arguments") from None

    def _call_with_keywords(self) -> None:
        self._pop()
        self._call()

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is OpaqueObject:
            # A class with __slots__ pickles (dict or None, slots) as its state.
            if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
                state = {**(state[0] or {}), **state[1]}
            target.state = state
        elif hasattr(target, "set_state"):
            target.set_state(state)
        elif type(target) not in (dict, list):
            raise TypeError(f"state for a {type(target).__name__}")

    def _persistent(self) -> None:
        self._stack.append(self._load_storage(self._stack.pop()))

    def _pop(self) -> None:
        self._stack.pop()

    def _duplicate(self) -> None:
        self._stack.append(self._stack[-1])

    def _unknown(self) -> None:
        raise InputError(f"not a readable pickle: opcode {self._code[self.at - 1]:#04x} is none of protocols 2 to 5")


_Operation = Callable[[Unpickler], Any]


def _constant(value: Any) -> _Operation:
    return lambda self: self._stack.append(value)


def _new(kind: type) -> _Operation:
    return lambda self: self._stack.append(kind())


def _sized(method: Callable[[Unpickler, int], None], number: int) -> _Operation:
    return lambda self: method(self, number)


_BY_OPCODE: dict[int, _Operation] = {
    0x80: Unpickler._protocol,  # PROTO
    0x95: Unpickler._frame,  # FRAME
    0x28: Unpickler._mark,  # MARK
    0x7D: _new(dict),  # EMPTY_DICT
    0x5D: _new(list),  # EMPTY_LIST
    0x8F: _new(list),  # EMPTY_SET
    0x29: _constant(()),  # EMPTY_TUPLE
    0x4E: _constant(None),  # NONE
    0x88: _constant(True),  # NEWTRUE
    0x89: _constant(False),  # NEWFALSE
    0x8C: _sized(Unpickler._text, 1),  # SHORT_BINUNICODE
    0x58: _sized(Unpickler._text, 4),  # BINUNICODE
    0x8D: _sized(Unpickler._text, 8),  # BINUNICODE8
    0x43: _sized(Unpickler._bytes, 1),  # SHORT_BINBYTES
    0x42: _sized(Unpickler._bytes, 4),  # BINBYTES
    0x8E: _sized(Unpickler._bytes, 8),  # BINBYTES8
    0x96: _sized(Unpickler._bytes, 8),  # BYTEARRAY8
    0x8A: _sized(Unpickler._integer, 1),  # LONG1
    0x8B: _sized(Unpickler._integer, 4),  # LONG4
    0x71: _sized(Unpickler._put, 1),  # BINPUT
    0x72: _sized(Unpickler._put, 4),  # LONG_BINPUT
    0x68: _sized(Unpickler._get, 1),  # BINGET
    0x6A: _sized(Unpickler._get, 4),  # LONG_BINGET
    0x85: _sized(Unpickler._short_tuple, 1),  # TUPLE1
    0x86: _sized(Unpickler._short_tuple, 2),  # TUPLE2
    0x87: _sized(Unpickler._short_tuple, 3),  # TUPLE3
    0x94: Unpickler._memoize,  # MEMOIZE
    0x74: Unpickler._tuple,  # TUPLE
    0x61: Unpickler._append_one,  # APPEND
    0x65: Unpickler._append_many,  # APPENDS
    0x90: Unpickler._append_many,  # ADDITEMS
    0x91: Unpickler._frozen_set,  # FROZENSET
    0x73: Unpickler._set_one,  # SETITEM
    0x75: Unpickler._set_many,  # SETITEMS
    0x63: Unpickler._global,  # GLOBAL
    0x93: Unpickler._stack_global,  # STACK_GLOBAL
    0x52: Unpickler._call,  # REDUCE
    0x81: Unpickler._call,  # NEWOBJ
    0x92: Unpickler._call_with_keywords,  # NEWOBJ_EX
    0x62: Unpickler._build,  # BUILD
    0x51: Unpickler._persistent,  # BINPERSID
    0x30: Unpickler._pop,  # POP
    0x31: Unpickler._pop_items,  # POP_MARK
    0x32: Unpickler._duplicate,  # DUP
}
_OPERATIONS = [_BY_OPCODE.get(op, Unpickler._unknown) for op in range(256)]
