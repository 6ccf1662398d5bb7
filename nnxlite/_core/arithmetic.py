"""Operators of a Variable: each acts on the values and returns a value, never a Variable.

Comparisons are elementwise, as for arrays, so Variables are unhashable. The in-place operators are
errors: `model.count += 1` would put an array in the place of the Variable.
"""

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Operator = Callable[..., Any]


def _named(method: Operator, name: str) -> Operator:
    method.__name__ = name
    method.__qualname__ = f"Arithmetic.{name}"
    return method


def _unary(function: Operator, name: str) -> Operator:
    def method(self: Any) -> Any:
        return function(self.get_value())

    return _named(method, name)


def _binary(function: Operator, name: str) -> Operator:
    def method(self: Any, other: Any) -> Any:
        return function(self.get_value(), value_of(other))

    return _named(method, name)


def _reflected(function: Operator, name: str) -> Operator:
    def method(self: Any, other: Any) -> Any:
        return function(value_of(other), self.get_value())

    return _named(method, name)


def _in_place(symbol: str, name: str) -> Operator:
    def method(self: Any, other: Any) -> Any:
        raise TypeError(
            f"`variable {symbol} x` would put an array in the place of the {type(self).__name__}. "
            f"Write `variable[...] {symbol} x` to change its value."
        )

    return _named(method, name)


def value_of(operand: Any) -> Any:
    """Returns the value of a Variable, and anything else as it is."""
    return operand.get_value() if isinstance(operand, Arithmetic) else operand


class Arithmetic:
    """What makes an object with `get_value` behave as its value in expressions."""

    __slots__ = ()

    # NumPy then leaves `array * variable` to the Variable.
    __array_priority__ = 100

    def get_value(self) -> Any:
        """Returns the value to calculate with."""
        raise NotImplementedError

    __add__ = _binary(operator.add, "__add__")
    __sub__ = _binary(operator.sub, "__sub__")
    __mul__ = _binary(operator.mul, "__mul__")
    __matmul__ = _binary(operator.matmul, "__matmul__")
    __truediv__ = _binary(operator.truediv, "__truediv__")
    __floordiv__ = _binary(operator.floordiv, "__floordiv__")
    __mod__ = _binary(operator.mod, "__mod__")
    __divmod__ = _binary(divmod, "__divmod__")
    __pow__ = _binary(operator.pow, "__pow__")
    __lshift__ = _binary(operator.lshift, "__lshift__")
    __rshift__ = _binary(operator.rshift, "__rshift__")
    __and__ = _binary(operator.and_, "__and__")
    __or__ = _binary(operator.or_, "__or__")
    __xor__ = _binary(operator.xor, "__xor__")

    __radd__ = _reflected(operator.add, "__radd__")
    __rsub__ = _reflected(operator.sub, "__rsub__")
    __rmul__ = _reflected(operator.mul, "__rmul__")
    __rmatmul__ = _reflected(operator.matmul, "__rmatmul__")
    __rtruediv__ = _reflected(operator.truediv, "__rtruediv__")
    __rfloordiv__ = _reflected(operator.floordiv, "__rfloordiv__")
    __rmod__ = _reflected(operator.mod, "__rmod__")
    __rdivmod__ = _reflected(divmod, "__rdivmod__")
    __rpow__ = _reflected(operator.pow, "__rpow__")
    __rlshift__ = _reflected(operator.lshift, "__rlshift__")
    __rrshift__ = _reflected(operator.rshift, "__rrshift__")
    __rand__ = _reflected(operator.and_, "__rand__")
    __ror__ = _reflected(operator.or_, "__ror__")
    __rxor__ = _reflected(operator.xor, "__rxor__")

    __iadd__ = _in_place("+=", "__iadd__")
    __isub__ = _in_place("-=", "__isub__")
    __imul__ = _in_place("*=", "__imul__")
    __imatmul__ = _in_place("@=", "__imatmul__")
    __itruediv__ = _in_place("/=", "__itruediv__")
    __ifloordiv__ = _in_place("//=", "__ifloordiv__")
    __imod__ = _in_place("%=", "__imod__")
    __ipow__ = _in_place("**=", "__ipow__")
    __ilshift__ = _in_place("<<=", "__ilshift__")
    __irshift__ = _in_place(">>=", "__irshift__")
    __iand__ = _in_place("&=", "__iand__")
    __ior__ = _in_place("|=", "__ior__")
    __ixor__ = _in_place("^=", "__ixor__")

    __eq__ = _binary(operator.eq, "__eq__")
    __ne__ = _binary(operator.ne, "__ne__")
    __lt__ = _binary(operator.lt, "__lt__")
    __le__ = _binary(operator.le, "__le__")
    __gt__ = _binary(operator.gt, "__gt__")
    __ge__ = _binary(operator.ge, "__ge__")
    __hash__ = None  # type: ignore[assignment]

    __neg__ = _unary(operator.neg, "__neg__")
    __pos__ = _unary(operator.pos, "__pos__")
    __abs__ = _unary(operator.abs, "__abs__")
    __invert__ = _unary(operator.invert, "__invert__")

    __bool__ = _unary(bool, "__bool__")
    __int__ = _unary(int, "__int__")
    __float__ = _unary(float, "__float__")
    __complex__ = _unary(complex, "__complex__")
    __index__ = _unary(operator.index, "__index__")
    __floor__ = _unary(math.floor, "__floor__")
    __ceil__ = _unary(math.ceil, "__ceil__")

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(self.get_value(), ndigits)

    def __len__(self) -> int:
        return len(self.get_value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get_value())

    def __contains__(self, item: Any) -> bool:
        return value_of(item) in self.get_value()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the value."""
        return self.get_value()(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        return format(self.get_value(), spec) if spec else repr(self)

    def __jax_array__(self) -> Any:
        return self.get_value()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return (
            np.array(self.get_value(), dtype=dtype)
            if copy
            else np.asarray(self.get_value(), dtype=dtype)
        )
