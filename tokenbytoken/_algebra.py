"""Closed forms that run on numbers and on symbols alike.

A formula written with + − × ÷, ``math.ceil``, ``math.floor``, ``round`` and the functions of this file gives a number
for numbers. Given a :class:`Symbol` in place of a number it gives an :class:`Expression`, which remembers how it was
made: the same formula as data, to be evaluated elsewhere. So nobody has to write it a second time.

>>> n = Symbol("n")
>>> cost = minimum(3 * n, 100)
>>> cost
min(3 * n, 100)
>>> cost.evaluate(n=5), cost.evaluate(n=50)
(15, 100)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

__all__ = ["Expression", "Number", "Symbol", "is_symbolic", "log2", "maximum", "minimum", "where"]

#: What a closed form takes and gives. (An expression takes part in arithmetic as any number does.)
Number = Any

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "%": operator.mod, "**": operator.pow, "<": operator.lt, "<=": operator.le, "ceil": math.ceil,
    "floor": math.floor, "log2": math.log2, "round": round, "min": min, "max": max,
    "where": lambda condition, yes, no: yes if condition else no,
}  # fmt: skip


class Expression:
    """An operation and its operands, which are expressions or plain numbers. Equal where they were made alike."""

    __slots__ = ("_hash", "operands", "operation")

    def __init__(self, operation: str, *operands: Any) -> None:
        self.operation, self.operands = operation, operands
        self._hash = hash((operation, operands))

    def evaluate(self, **values: float) -> Any:
        """The number that the same formula gives for these ``values`` of its symbols.

        Raises ValueError for a symbol without a value.
        """
        known: dict[int, Any] = {}  # an expression that occurs twice is evaluated once

        def value(node: Any) -> Any:
            if not isinstance(node, Expression):
                return node
            if id(node) not in known:
                known[id(node)] = node._apply(values, value)
            return known[id(node)]

        return value(self)

    def _apply(self, values: dict[str, float], value: Callable[[Any], Any]) -> Any:
        if self.operation == "where":  # the branch not taken may divide by zero
            condition, yes, no = self.operands
            return value(yes) if value(condition) else value(no)
        return _OPERATIONS[self.operation](*(value(operand) for operand in self.operands))

    def __bool__(self) -> bool:
        raise TypeError(f"{self} has no truth value: in a closed form choose with where, minimum or maximum")

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Expression)
            and self._hash == other._hash
            and (self.operation, self.operands) == (other.operation, other.operands)
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        first, *rest = map(_text, self.operands)
        if rest and not self.operation.isalpha():
            return f" {self.operation} ".join([first, *rest])
        return f"{self.operation}({', '.join(map(repr, self.operands))})"

    def __add__(self, other: Any) -> Any:
        return self if _is(other, 0) else Expression("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self if _is(other, 0) else Expression("+", other, self)  # as in sum(), which starts with 0

    def __sub__(self, other: Any) -> Any:
        return self if _is(other, 0) else Expression("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return Expression("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return 0 if _is(other, 0) else self if _is(other, 1) else Expression("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return 0 if _is(other, 0) else self if _is(other, 1) else Expression("*", other, self)

    def __truediv__(self, other: Any) -> Any:
        return Expression("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return 0 if _is(other, 0) else Expression("/", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return Expression("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return Expression("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return Expression("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return Expression("%", other, self)

    def __pow__(self, other: Any) -> Any:
        return Expression("**", self, other)

    def __rpow__(self, other: Any) -> Any:
        return Expression("**", other, self)

    def __neg__(self) -> Any:
        return Expression("-", 0, self)

    def __lt__(self, other: Any) -> Any:
        return Expression("<", self, other)

    def __le__(self, other: Any) -> Any:
        return Expression("<=", self, other)

    def __gt__(self, other: Any) -> Any:
        return Expression("<", other, self)

    def __ge__(self, other: Any) -> Any:
        return Expression("<=", other, self)

    def __ceil__(self) -> Any:
        return Expression("ceil", self)

    def __floor__(self) -> Any:
        return Expression("floor", self)

    def __round__(self, digits: None = None) -> Any:
        return Expression("round", self)


class Symbol(Expression):
    """A number that is not known yet, by its name."""

    __slots__ = ()

    def __init__(self, name: str) -> None:
        super().__init__("symbol", name)

    def _apply(self, values: dict[str, float], value: Callable[[Any], Any]) -> Any:
        name = self.operands[0]
        if name not in values:
            raise ValueError(f"the symbol {name} has no value")
        return values[name]

    def __repr__(self) -> str:
        return str(self.operands[0])


def is_symbolic(*values: Any) -> bool:
    """Whether one of the values is an expression, so that it can be counted with but not looked at."""
    return any(isinstance(value, Expression) for value in values)


def where(condition: Any, yes: Any, no: Any) -> Any:
    """``yes`` if the condition holds, else ``no``; both are computed."""
    return Expression("where", condition, yes, no) if is_symbolic(condition) else yes if condition else no


def log2(x: Any) -> Any:
    return Expression("log2", x) if is_symbolic(x) else math.log2(x)


def minimum(a: Any, b: Any) -> Any:
    return Expression("min", a, b) if is_symbolic(a, b) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    return Expression("max", a, b) if is_symbolic(a, b) else max(a, b)


def _is(value: Any, number: int) -> bool:
    return type(value) in (int, float) and value == number


def _text(operand: Any) -> str:
    compound = isinstance(operand, Expression) and not operand.operation.isalpha()
    return f"({operand})" if compound else repr(operand)
