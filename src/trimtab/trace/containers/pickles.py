"""Safe pickle reader for protocols 2 to 5: returns plain values and runs no code.

Python's unpickler calls any function that the file names, and trusts its sizes. This one passes every name to
`find`, which answers with one of our own `AllowedGlobal`s or refuses, and it holds:

* sizes are checked: claimed bytes must be in the file;
* large strings and bytes stay in the file (`LargeText`, `memoryview`) until they are used;
* the number of objects is limited, dictionary keys are plain, and sets become lists, which bounds memory and time.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import InputError

# With these limits a pickle takes at most about 2 GB of memory. A million tokens, with loss mask and log-probs as
# lists, take 16 MB of program.
MOST_OBJECTS = 4_000_000
MOST_PROGRAM_BYTES = 128 << 20
LARGE = 1 << 16
_LONGEST_NAME = 512
_LONGEST_INTEGER = 32
_STRETCH = 1 << 16
_INT32 = struct.Struct("<i").unpack_from
_FLOAT64 = struct.Struct(">d").unpack_from


def clip(name: str) -> str:
    """A name from a file, shortened for a one-line message."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in name[:80])
    return shown + ("..." if len(name) > 80 else "")


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


@dataclass(slots=True, eq=False)
class Budget:
    """Remaining read limit, shared by all pickles in one file."""

    objects: int = MOST_OBJECTS
    program_bytes: int = MOST_PROGRAM_BYTES

    def spend(self, objects: int, program_bytes: int) -> None:
        self.objects -= objects
        self.program_bytes -= program_bytes
        if self.objects < 0 or self.program_bytes < 0:
            raise InputError(
                f"holds more than {MOST_OBJECTS} objects or {MOST_PROGRAM_BYTES >> 20} MiB of them; routing dumps hold "
                "arrays: save fewer steps or samples a file"
            )


class Unpickler:
    """Reads one pickle after another from a buffer.

    Args:
        code: the buffer; `at` is where the next pickle starts.
        find: maps module and name to their replacement; raises InputError for anything but data.
        load_storage: maps a persistent id to its storage.
        budget: shared with the pickles around and within.
    """

    def __init__(
        self,
        code: memoryview,
        find: Callable[[str, str], Any],
        load_storage: Callable[[Any], Any],
        budget: Budget,
        at: int = 0,
    ) -> None:
        self.at = at
        self._code = code
        self._find = find
        self._load_storage = load_storage
        self._budget = budget
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._names: dict[tuple[str, str], Any] = {}
        self._in_file = 0

    def load(self) -> Any:
        """The next pickle's value.

        Raises:
            InputError: if it is damaged, too large, or holds anything but data.
        """
        self._stack, self._marks, self._memo = [], [], {}
        try:
            return self._run()
        except (InputError, MemoryError):
            raise
        except IndexError:
            reason = "it is truncated or damaged"
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            reason = f"it is damaged ({clip(str(error))})"
        raise InputError(f"not a readable pickle: {reason}")

    def _run(self) -> Any:
        code, stack, at = self._code, self._stack, self.at
        append = stack.append
        size = len(code)
        others = _OTHERS
        while True:
            limit = min(at + _STRETCH, size)
            start, objects, self._in_file = at, 0, 0
            # Numbers are nearly all of a long program, and small: their bytes are counted, once a stretch.
            while at < limit:
                op = code[at]
                at += 1
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
                    self._budget.spend(objects, at - start - self._in_file)
                    self.at = at
                    return stack.pop()
                else:
                    objects += 1
                    at = others[op](self, at)
            if at >= size:
                raise IndexError
            self._budget.spend(objects, at - start - self._in_file)

    def _take(self, at: int, count: int) -> memoryview:
        taken = self._code[at : at + count]
        if len(taken) != count:
            raise InputError(f"not a readable pickle: truncated, or it claims {count} bytes that are not there")
        return taken

    def _number(self, at: int, count: int) -> int:
        return int.from_bytes(self._take(at, count), "little")

    def _since_mark(self) -> list[Any]:
        mark = self._marks.pop()
        items = self._stack[mark:]
        del self._stack[mark:]
        return items

    # Each takes the place after the opcode and returns the place of the next one.

    def _protocol(self, at: int) -> int:
        if not 2 <= self._code[at] <= 5:
            raise InputError(f"a pickle of protocol {self._code[at]}; protocols 2 to 5 are read")
        return at + 1

    def _frame(self, at: int) -> int:
        self._take(at, 8)
        return at + 8

    def _mark(self, at: int) -> int:
        self._marks.append(len(self._stack))
        return at

    def _text(self, at: int, width: int) -> int:
        count = self._number(at, width)
        at += width
        utf8 = self._take(at, count)
        if count > LARGE:
            self._in_file += count
            self._stack.append(LargeText(utf8))
        else:
            self._stack.append(str(utf8, "utf-8", "surrogatepass"))
        return at + count

    def _bytes(self, at: int, width: int) -> int:
        count = self._number(at, width)
        at += width
        data = self._take(at, count)
        if count > LARGE:
            self._in_file += count
        self._stack.append(data.toreadonly() if count > LARGE else bytes(data))
        return at + count

    def _integer(self, at: int, width: int) -> int:
        count = self._number(at, width)
        at += width
        if count > _LONGEST_INTEGER:
            raise InputError(f"not a readable pickle: it holds an integer of {count} bytes")
        self._stack.append(int.from_bytes(self._take(at, count), "little", signed=True))
        return at + count

    def _put(self, at: int, width: int) -> int:
        self._memo[self._number(at, width)] = self._stack[-1]
        return at + width

    def _get(self, at: int, width: int) -> int:
        self._stack.append(self._memo[self._number(at, width)])
        return at + width

    def _memoize(self, at: int) -> int:
        self._memo[len(self._memo)] = self._stack[-1]
        return at

    def _tuple(self, at: int) -> int:
        self._stack.append(tuple(self._since_mark()))
        return at

    def _short_tuple(self, at: int, count: int) -> int:
        stack = self._stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]
        return at

    def _append_one(self, at: int) -> int:
        self._extend(self._stack[-2], [self._stack.pop()])
        return at

    def _append_many(self, at: int) -> int:
        items = self._since_mark()
        self._extend(self._stack[-1], items)
        return at

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is OpaqueObject:
            target = target.entries
        if type(target) is not list:
            raise TypeError("items for what is no list")
        target.extend(items)

    def _set_one(self, at: int) -> int:
        value, key = self._stack.pop(), self._stack.pop()
        self._set(self._stack[-1], [key, value])
        return at

    def _set_many(self, at: int) -> int:
        items = self._since_mark()
        self._set(self._stack[-1], items)
        return at

    def _set(self, target: Any, items: list[Any]) -> None:
        if type(target) is OpaqueObject:
            target = target.items
        if type(target) is not dict or len(items) % 2:
            raise TypeError("items for what is no dictionary")
        self._budget.spend(len(items), 0)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if is_plain_key(key):
                target[key] = value

    def _frozen_set(self, at: int) -> int:
        self._stack.append(self._since_mark())
        return at

    def _global(self, at: int) -> int:
        names = bytes(self._code[at : at + 2 * _LONGEST_NAME]).split(b"\n", 2)
        if len(names) < 3:
            raise InputError("not a readable pickle: it is truncated, or names a class of endless length")
        self._stack.append(self._named(str(names[0], "utf-8"), str(names[1], "utf-8")))
        return at + len(names[0]) + len(names[1]) + 2

    def _stack_global(self, at: int) -> int:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise TypeError("a class whose name is no string")
        self._stack.append(self._named(module, name))
        return at

    def _named(self, module: str, name: str) -> Any:
        if (module, name) not in self._names:
            self._names[module, name] = self._find(module, name)
        return self._names[module, name]

    def _call(self, at: int) -> int:
        args, allowed = self._stack.pop(), self._stack.pop()
        return self._make(allowed, args, at)

    def _call_with_keywords(self, at: int) -> int:
        _, args, allowed = self._stack.pop(), self._stack.pop(), self._stack.pop()
        return self._make(allowed, args, at)

    def _make(self, allowed: Any, args: Any, at: int) -> int:
        if type(allowed) is not AllowedGlobal or type(args) is not tuple:
            raise TypeError("calls what is no class")
        try:
            made = allowed.make(*args)
        except TypeError:
            raise TypeError(f"{allowed.name} of what it is not made of") from None
        self._stack.append(made)
        return at

    def _build(self, at: int) -> int:
        state, target = self._stack.pop(), self._stack[-1]
        if type(target) is OpaqueObject:
            # Slots come beside the dictionary.
            if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
                state = {**(state[0] or {}), **state[1]}
                self._budget.spend(len(state), 0)
            target.state = state
        elif hasattr(target, "set_state"):
            target.set_state(state)
        elif type(target) not in (dict, list):
            raise TypeError(f"state for a {type(target).__name__}")
        return at

    def _persistent(self, at: int) -> int:
        self._stack.append(self._load_storage(self._stack.pop()))
        return at

    def _pop(self, at: int) -> int:
        self._stack.pop()
        return at

    def _pop_mark(self, at: int) -> int:
        self._since_mark()
        return at

    def _duplicate(self, at: int) -> int:
        self._stack.append(self._stack[-1])
        return at


def is_plain_key(key: Any) -> bool:
    """True for keys with a fast hash that can't be made to collide."""
    if type(key) is tuple:
        return len(key) <= 16 and all(type(part) is str for part in key)
    if type(key) is int:
        return -(1 << 31) <= key < 1 << 31
    return key is None or type(key) in (str, bool)


_Step = Callable[[Unpickler, int], int]


def _constant(make: Callable[[], Any]) -> _Step:
    def push(self: Unpickler, at: int) -> int:
        self._stack.append(make())
        return at

    return push


def _sized(method: Callable[[Unpickler, int, int], int], number: int) -> _Step:
    return lambda self, at: method(self, at, number)


def _unknown(self: Unpickler, at: int) -> int:
    raise InputError(f"not a readable pickle: opcode {self._code[at - 1]:#04x} is none of protocols 2 to 5")


def _table() -> list[_Step]:
    vm = Unpickler
    steps: dict[int, _Step] = {
        0x80: vm._protocol,
        0x95: vm._frame,
        0x28: vm._mark,
        0x7D: _constant(lambda: {}),  # noqa: PIE807
        0x5D: _constant(lambda: []),  # noqa: PIE807
        0x8F: _constant(lambda: []),  # noqa: PIE807
        0x29: _constant(lambda: ()),
        0x4E: _constant(lambda: None),
        0x88: _constant(lambda: True),
        0x89: _constant(lambda: False),
        0x8C: _sized(vm._text, 1),
        0x58: _sized(vm._text, 4),
        0x8D: _sized(vm._text, 8),
        0x43: _sized(vm._bytes, 1),
        0x42: _sized(vm._bytes, 4),
        0x8E: _sized(vm._bytes, 8),
        0x96: _sized(vm._bytes, 8),
        0x8A: _sized(vm._integer, 1),
        0x8B: _sized(vm._integer, 4),
        0x71: _sized(vm._put, 1),
        0x72: _sized(vm._put, 4),
        0x68: _sized(vm._get, 1),
        0x6A: _sized(vm._get, 4),
        0x85: _sized(vm._short_tuple, 1),
        0x86: _sized(vm._short_tuple, 2),
        0x87: _sized(vm._short_tuple, 3),
        0x94: vm._memoize,
        0x74: vm._tuple,
        0x61: vm._append_one,
        0x65: vm._append_many,
        0x90: vm._append_many,
        0x91: vm._frozen_set,
        0x73: vm._set_one,
        0x75: vm._set_many,
        0x63: vm._global,
        0x93: vm._stack_global,
        0x52: vm._call,
        0x81: vm._call,
        0x92: vm._call_with_keywords,
        0x62: vm._build,
        0x51: vm._persistent,
        0x30: vm._pop,
        0x31: vm._pop_mark,
        0x32: vm._duplicate,
    }
    return [steps.get(op, _unknown) for op in range(256)]


_OTHERS = _table()
