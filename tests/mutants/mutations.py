"""`find_mutations`: the single mistakes that can be made in a source file, by the kind of mistake.

Left alone is what changes no result:

* messages, annotations, docstrings, assertions (also `zip(..., strict=True)`) and decorators;
* `<` of a running minimum, `if cost < best: best = cost`, and `>` of a maximum: of equal numbers either is right;
* how long a polling loop sleeps.

A number above 100 is doubled, and one below 1e-6 becomes a million times as large: one more, or twice a guard against
rounding, is no mistake that anyone could notice.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

# Annotations of the positional parameters of a function, by its name.
Signatures = Mapping[str, tuple[str, ...]]

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.MatMult: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
# Either of two names is replaced by the other.
NAMES = {
    name: other
    for pair in (
        ("min", "max"), ("any", "all"), ("minimum", "maximum"), ("argmin", "argmax"), ("floor", "ceil"),
        ("amin", "amax"), ("popleft", "pop"), ("zeros", "ones"), ("startswith", "endswith"),
    )
    for name, other in (pair, pair[::-1])
}  # fmt: skip
# Calls that only log or print.
LOGGING = ("log", "logger", "logging", "warnings", "console", "print")


@dataclass(frozen=True)
class Mutation:
    """A mistake: bytes `start` to `end` of a file become `new`.

    Attributes:
        file: path from the repository's root.
        line: number of the line in which it begins.
        function: qualified name of the innermost named function around it; "" outside of functions.
        kind: of mistake, for example "comparison".
        is_kernel: whether the function is compiled.
        start, end: place in the file's bytes.
        old, new: text before and after.
    """

    file: str
    line: int
    function: str
    kind: str
    is_kernel: bool
    start: int
    end: int
    old: str
    new: str

    def apply(self, source: bytes) -> bytes:
        """The file with the mistake."""
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{self.file}:{self.line} {self.kind}: {old} -> {new}"


def find_mutations(file: str, source: bytes, signatures: Signatures) -> list[Mutation]:
    """All mistakes of one file, in order.

    Args:
        signatures: of the functions whose arguments may be swapped, as `read_signatures` returns them.
    """
    finder = _Finder(file, source, signatures)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda mutation: (mutation.start, mutation.end, mutation.kind, mutation.new))


def read_signatures(sources: Iterable[bytes]) -> dict[str, tuple[str, ...]]:
    """The annotations of positional parameters of each function whose name is unique in all files.

    A parameter of a kernel, which has no annotation, has its own name, so that none is taken for another.
    """
    signatures: dict[str, tuple[str, ...]] = {}
    known: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                parameters = [a for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
                if node.name not in known:
                    signatures[node.name] = tuple(ast.unparse(a.annotation) if a.annotation else "" for a in parameters)
                elif node.name in signatures:
                    del signatures[node.name]
                known.add(node.name)
    return signatures


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes, signatures: Signatures) -> None:
        self.found: list[Mutation] = []
        self._file, self._source, self._signatures = file, source, signatures
        self._line_starts = list(accumulate((len(line) + 1 for line in source.split(b"\n")), initial=0))
        self._names: list[str] = []
        self._function = ""
        self._is_kernel = False

    def _replace(self, node: ast.expr | ast.stmt, kind: str, new: ast.AST | str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset
        text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        if isinstance(new, ast.BinOp | ast.BoolOp | ast.Compare | ast.UnaryOp):
            # Whatever stands around it.
            text = f"({text})"
        old = self._source[start:end].decode()
        place = self._function, kind, self._is_kernel
        self.found.append(Mutation(self._file, node.lineno, *place, start, end, old, text))

    # What is left alone.

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        outside = self._function, self._is_kernel
        self._names.append(node.name)
        self._function = ".".join(self._names)
        self._is_kernel |= any("kernel" in ast.unparse(decorator) for decorator in node.decorator_list)
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()
        self._function, self._is_kernel = outside

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    # Statements.

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "dropped statement", "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _is_logging(node.value):
            return
        if isinstance(node.value, ast.Call):
            self._replace(node, "dropped statement", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets):
            return
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._replace(node, "dropped statement", "pass")
        self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "dropped statement", "pass")
        other = OPERATORS.get(type(node.op))
        if other is not None:
            new = copy.deepcopy(node)
            new.op = other()
            self._replace(node, "operator", new)
        self.visit(node.value)

    def visit_Delete(self, node: ast.Delete) -> None:
        self._replace(node, "dropped statement", "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._replace(node, "dropped statement", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._replace(node, "dropped statement", "pass")

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if _is_running_extreme(node):
            self.generic_visit(node.test)
            for statement in node.body:
                self.visit(statement)
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def _negate(self, test: ast.expr) -> None:
        # Others have mistakes of their own.
        if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
            self._replace(test, "condition", ast.UnaryOp(ast.Not(), test))

    # Expressions.

    def visit_Compare(self, node: ast.Compare) -> None:
        for number, op in enumerate(node.ops):
            new = copy.deepcopy(node)
            new.ops[number] = COMPARISONS[type(op)]()
            self._replace(node, "comparison", new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        new = copy.deepcopy(node)
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._replace(node, "and/or", new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.operand, ast.Constant):
            return
        self._replace(node, "sign" if isinstance(node.op, ast.USub) else "condition", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_text = any(isinstance(n, ast.JoinedStr) or _is_constant(n, str) for n in ast.walk(node))
        if not is_text:
            new = copy.deepcopy(node)
            new.op = OPERATORS[type(node.op)]() if type(node.op) in OPERATORS else node.op
            if ast.dump(new) != ast.dump(node):
                self._replace(node, "operator", new)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._replace(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, "constant", str(node.value + 1 if node.value <= 100 else node.value * 2))
        elif isinstance(node.value, float):
            times = 1e6 if node.value < 1e-6 else 2
            self._replace(node, "constant", repr(node.value * times if node.value else 1.0))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        index = ast.unparse(node.slice)
        if index in ("0", "-1"):
            other = ast.Constant(0) if index == "-1" else ast.UnaryOp(ast.USub(), ast.Constant(1))
            new = copy.deepcopy(node)
            new.slice = other
            self._replace(node, "first/last", new)
        else:
            self.visit(node.slice)
        self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if _is_logging(node) or ast.unparse(node.func) == "time.sleep":
            return
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if name in NAMES and name != "pop":
            new = copy.deepcopy(node)
            if isinstance(new.func, ast.Name):
                new.func.id = NAMES[name]
            elif isinstance(new.func, ast.Attribute):
                new.func.attr = NAMES[name]
            self._replace(node, "min/max", new)
        if name == "pop" and ast.unparse(node).endswith(("pop()", "pop(0)")):
            new = copy.deepcopy(node)
            new.args = [] if node.args else [ast.Constant(0)]
            self._replace(node, "first/last", new)
        self._swap_arguments(node, name)
        if name == "zip":
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        self.generic_visit(node)

    def _swap_arguments(self, node: ast.Call, name: str) -> None:
        kinds = self._signatures.get(name, ())
        for first in range(min(len(node.args), len(kinds)) - 1):
            one, two = node.args[first : first + 2]
            if isinstance(one, ast.Starred) or isinstance(two, ast.Starred):
                return
            if kinds[first] == kinds[first + 1] and ast.dump(one) != ast.dump(two):
                new = copy.deepcopy(node)
                new.args[first], new.args[first + 1] = new.args[first + 1], new.args[first]
                self._replace(node, "swapped arguments", new)


def _is_running_extreme(node: ast.If) -> bool:
    """Whether a statement is `if a < b: b = a`, or the same with `>`."""
    match node:
        case ast.If(
            test=ast.Compare(left=left, ops=[ast.Lt() | ast.Gt()], comparators=[right]),
            body=[ast.Assign(targets=[target], value=value)],
            orelse=[],
        ):
            return ast.unparse(target) == ast.unparse(right) and ast.unparse(value) == ast.unparse(left)
    return False


def _is_constant(node: ast.AST, kind: type) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, kind)


def _is_logging(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return ast.unparse(node.func).split(".")[0].lstrip("_") in LOGGING
