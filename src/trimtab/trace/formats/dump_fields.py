"""Fields of a dump as arrays, numbers and texts; the dump holds a framework's objects or those of `torch_files`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any

import numpy as np

from trimtab.array_type import Array
from trimtab.errors import InputError
from trimtab.trace.containers.tensors import Jagged, NumpyArray, Tensor
from trimtab.trace.containers.unpickling import OpaqueObject
from trimtab.trace.message_text import clip, kind_of, short


@contextmanager
def damaged_values() -> Iterator[None]:
    """A context that turns the exceptions of unexpected values into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ArithmeticError, AttributeError, BufferError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"damaged, or not what its format says ({clip(str(error))})") from None


def field(source: Any, name: str, default: Any = None) -> Any:
    """`source[name]` of a dictionary, `source.name` of anything else."""
    if isinstance(source, OpaqueObject):
        if name in source.items:
            return source.items[name]
        return getattr(source, name, default)
    if isinstance(source, Mapping):
        return source.get(name, default)
    # A TensorDict, and a UserDict of any library.
    if hasattr(source, "keys") and hasattr(source, "__getitem__"):
        return source[name] if name in source.keys() else default  # noqa: SIM118
    return getattr(source, name, default)


def first_field(source: Any, *names: str) -> Any:
    """The first of several fields that is there and not None."""
    return next((value for name in names if (value := field(source, name)) is not None), None)


def as_array(value: Any, what: str = "expert ids") -> Array:
    """An array of any library, one of a dump, or nested lists of integers, as a numpy array; a view where it can be.

    A nested (jagged) tensor is the array of all its rows, one after the other.

    Raises:
        InputError: if it is none of these.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, Jagged) or getattr(value, "is_nested", False):
        value = value.values() if callable(value.values) else value.values
    if isinstance(value, Tensor | NumpyArray):
        return value.numpy()
    if isinstance(value, list | tuple):
        return array_of_lists(value, _depth(value), what, scalars=True)
    if not isinstance(value, OpaqueObject):
        if hasattr(value, "detach"):
            value = value.detach().cpu()
        if hasattr(value, "numpy"):
            value = value.numpy()
        if hasattr(value, "__array__"):
            return np.asarray(value)
    raise InputError(f"{what} is a {_kind(value)}; it should be an array")


def integers(value: Any, what: str, ndim: int) -> Array:
    """As `as_array`, of integers (or booleans) and with `ndim` axes."""
    array = as_array(value, what)
    if array.dtype.kind not in "iub":
        raise InputError(f"{what} is {array.dtype}; it should hold integers")
    if array.ndim != ndim:
        raise InputError(f"{what} has shape {list(array.shape)}; it should have {ndim} axes")
    return array


def optional_integers(source: Any, name: str, ndim: int) -> Array | None:
    """The field as `integers`, None if it is missing."""
    value = field(source, name)
    return None if value is None else integers(value, name, ndim)


def shape_of(routes: Any, what: str) -> tuple[int, ...]:
    """The shape `[B, T, layers, K]` of the routes of a padded batch, whose ids are not read.

    Raises:
        InputError: if it has another number of axes, or they are no integers.
    """
    if is_on_device(routes):
        return tuple(routes.shape)
    return integers(routes, what, 4).shape


def is_on_device(value: Any) -> bool:
    """Whether a tensor is in other memory than the host's."""
    return getattr(getattr(value, "device", None), "type", "cpu") != "cpu"


def masks(batch: Any, key: str, shape: tuple[int, ...], *names: str) -> list[Array | None]:
    """The fields `[B, T]` of a padded batch by name; None for those that are missing.

    Args:
        key: of the routes, and their shape.

    Raises:
        InputError: if one has another shape, or holds no integers.
    """
    found = [optional_integers(batch, name, 2) for name in names]
    for name, mask in zip(names, found, strict=True):
        if mask is not None and mask.shape != shape[:2]:
            raise InputError(f"{name} has shape {list(mask.shape)}; {key} has [{shape[0]}, {shape[1]}, ...]")
    return found


def spans(mask_BT: Array) -> Iterator[tuple[int, int, int]]:
    """Yields for every row the first column that is not 0, the last one + 1, and the number of those; that is 0 if the
    row has none."""
    fed_BT = mask_BT != 0
    starts, backwards = fed_BT.argmax(axis=1), fed_BT[:, ::-1].argmax(axis=1)
    counts = np.count_nonzero(fed_BT, axis=1)
    yield from zip(starts.tolist(), (fed_BT.shape[1] - backwards).tolist(), counts.tolist(), strict=True)


def required(source: Any, key: str, how: str) -> Any:
    """A field. Raises InputError that says how it is recorded, if it is missing."""
    value = field(source, key)
    if value is None:
        raise InputError(f"no {key!r} in this batch; {how}")
    return value


def parts_of(routes: Any) -> list[tuple[Any, slice | None, int]]:
    """The rows of a nested (jagged) tensor or of a list: what holds each, where in its array, and its length."""
    if isinstance(routes, Jagged):
        bounds = routes.bounds()
    elif hasattr(routes, "offsets"):
        ends = routes.offsets().tolist()
        bounds = list(pairwise(ends))
    else:
        return [(row, None, len(row)) for row in (routes if isinstance(routes, list) else routes.unbind())]
    return [(routes, slice(start, end), end - start) for start, end in bounds]


def rows_of(value: Any, what: str) -> list[Any]:
    """The rows of a nested (jagged) tensor, or of any array along its first axis, one view each."""
    if isinstance(value, Jagged):
        values = value.values.numpy()
        return [values[start:end] for start, end in value.bounds()]
    if getattr(value, "is_nested", False):
        return list(value.unbind())
    if isinstance(value, list | tuple):
        return list(value)
    array = as_array(value, what)
    if array.ndim < 1:
        raise InputError(f"{what} is a single number; it should have a row for each sequence")
    return list(array)


def text(value: Any) -> str:
    """A label as a short string; "" for what is no label."""
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    return clip(value) if isinstance(value, str) else ""


def label_of(labels: Any, row: int) -> str:
    """The label of a row as a short string; "" if there is none."""
    labels = labels.numpy() if isinstance(labels, NumpyArray) else labels
    listed = isinstance(labels, list | tuple) or (isinstance(labels, np.ndarray) and labels.ndim == 1)
    return text(labels[row]) if listed and row < len(labels) else ""


def whole_number(value: Any, default: int = 0) -> int:
    """A count or a step number; `default` for what is none."""
    if isinstance(value, np.ndarray | Tensor | NumpyArray) or hasattr(value, "item"):
        array = as_array(value, "a number")
        value = array.item() if array.size == 1 else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31 else default


_REQUIRED: Any = object()


def whole_field(value: Mapping[str, Any], key: str, default: Any = _REQUIRED) -> Any:
    """A whole number of 31 bits, or the default.

    Raises:
        InputError: if it is anything else, or missing without a default.
    """
    number = value.get(key, default)
    if number is _REQUIRED:
        raise InputError(f"no {key}")
    if number is not default and (type(number) is not int or not 0 <= number < 1 << 31):
        raise InputError(f"{key} should be a whole number of 0 or more")
    return number


def array_of_lists(value: Sequence[Any], depth: int, what: str = "ids", *, scalars: bool = False) -> Array:
    """An integer array from lists `depth` deep, in the narrowest dtype.

    Args:
        scalars: whether booleans, and numbers of numpy and torch, are integers too.

    Raises:
        InputError: if the lists are ragged or contain anything but integers of 64 bits.
    """
    shape = [len(value)]
    flat: Sequence[Any] = value
    for _ in range(depth - 1):
        if not all(isinstance(part, list | tuple) for part in flat):
            raise InputError(f"{what} should be lists {depth} deep")
        lengths = set(map(len, flat))
        if len(lengths) > 1:
            raise InputError(f"lists of {what} have different lengths, {min(lengths)} and {max(lengths)}")
        shape.append(lengths.pop() if lengths else 0)
        flat = list(chain.from_iterable(flat))
    if scalars and set(map(type, flat)) != {int}:
        flat = [each.item() if hasattr(each, "item") else each for each in flat]
        flat = [int(each) if type(each) is bool else each for each in flat]
    if set(map(type, flat)) - {int}:
        kind = kind_of(next(each for each in flat if type(each) is not int))
        raise InputError(f"{what} should be whole numbers; there is {kind}")
    try:
        ids = np.array(flat, np.int64)
    except OverflowError:
        raise InputError(f"{what} hold {short(max(flat, key=abs))}; that is no expert") from None
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    narrow = next((t for t in (np.int16, np.int32) if np.iinfo(t).min <= low and high <= np.iinfo(t).max), np.int64)
    return ids.astype(narrow).reshape(shape)


def _depth(value: Any) -> int:
    """How deep lists are nested, by their first items; at most 5."""
    depth = 0
    while isinstance(value, list | tuple) and depth < 5:
        value = value[0] if value else None
        depth += 1
    return depth


def _kind(value: Any) -> str:
    return clip(value.name) if isinstance(value, OpaqueObject) else type(value).__name__
