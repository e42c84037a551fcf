"""LLVM vectors for blocks: a function on them reads like its formula, and is inlined into the kernels that call it.

LLVM's own vectoriser fails on loops over the 32 elements of a block, above all if they end in bytes. Here the 32
lanes are written down, and LLVM cuts them into the vectors that the processor has. `part` makes functions that kernels
can call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

from quant.kernels.jit import fetch_line
from quant.kernels.late import Late, cgutils, intrinsic, ir, real, types
from quant.kernels.processor import (
    adds_pairs,
    computes_with_float16,
    multiplies_unsigned,
    processor_has,
    scales_pairs,
)

# kinds of scalars, and of the lanes of vectors
HALF, FLOAT = Late(lambda: ir.HalfType()), Late(lambda: ir.FloatType())
BIT, INT8, INT16, INT32, INT64 = (Late(partial(lambda bits: ir.IntType(bits), n)) for n in (1, 8, 16, 32, 64))


class Value:
    """A scalar or vector of a kernel that is being compiled. Integers are unsigned, except where a method says
    signed."""

    def __init__(self, builder: Any, value: Any) -> None:
        self._builder, self._value = builder, value

    @property
    def lanes(self) -> int:
        """How many elements a vector has; 0 for a scalar."""
        return self._value.type.count if isinstance(self._value.type, ir.VectorType) else 0

    @property
    def _element(self) -> Any:
        return self._value.type.element if self.lanes else self._value.type

    @property
    def _is_float(self) -> bool:
        return not isinstance(self._element, ir.IntType)

    def _of(self, value: Any) -> Value:
        return Value(self._builder, value)

    def _shaped(self, element: Any) -> Any:
        return ir.VectorType(real(element), self.lanes) if self.lanes else real(element)

    def _pair(self, other: Value | float) -> tuple[Any, Any]:
        """Both operands, in one type: numbers become constants, scalars fill vectors."""
        if not isinstance(other, Value):
            constant = ir.Constant(self._element, other)
            other = self._of(constant)
        a, b = (side.filled(self.lanes or other.lanes) for side in (self, other))
        return a._value, b._value

    def filled(self, lanes: int) -> Value:
        """A vector with this scalar in every lane; a vector is returned as it is."""
        if self.lanes or not lanes:
            return self
        kind = ir.VectorType(self._element, lanes)
        first = self._builder.insert_element(ir.Constant(kind, ir.Undefined), self._value, ir.Constant(INT32.real, 0))
        everywhere = ir.Constant(ir.VectorType(INT32.real, lanes), [0] * lanes)
        return self._of(self._builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), everywhere))

    def __add__(self, other: Value | float) -> Value:
        return self._of((self._builder.fadd if self._is_float else self._builder.add)(*self._pair(other)))

    def __sub__(self, other: Value | float) -> Value:
        return self._of((self._builder.fsub if self._is_float else self._builder.sub)(*self._pair(other)))

    def __mul__(self, other: Value | float) -> Value:
        return self._of((self._builder.fmul if self._is_float else self._builder.mul)(*self._pair(other)))

    def __truediv__(self, other: Value | float) -> Value:
        return self._of(self._builder.fdiv(*self._pair(other)))

    def __rtruediv__(self, other: float) -> Value:
        numerator, denominator = self._of(ir.Constant(self._element, other)), self
        return numerator / denominator

    def __and__(self, other: Value | int) -> Value:
        return self._of(self._builder.and_(*self._pair(other)))

    def __or__(self, other: Value | int) -> Value:
        return self._of(self._builder.or_(*self._pair(other)))

    def __xor__(self, other: Value | int) -> Value:
        return self._of(self._builder.xor(*self._pair(other)))

    def __lshift__(self, other: int) -> Value:
        return self._of(self._builder.shl(*self._pair(other)))

    def __rshift__(self, other: int) -> Value:
        return self._of(self._builder.lshr(*self._pair(other)))

    def equals(self, other: Value | float) -> Value:
        """Whether self == other, lane by lane; NaN equals nothing."""
        compare = self._builder.fcmp_ordered if self._is_float else self._builder.icmp_unsigned
        return self._of(compare("==", *self._pair(other)))

    def differs(self, other: Value | float) -> Value:
        """Whether self != other, lane by lane; NaN differs from everything."""
        compare = self._builder.fcmp_unordered if self._is_float else self._builder.icmp_unsigned
        return self._of(compare("!=", *self._pair(other)))

    def exceeds(self, other: Value | float) -> Value:
        """Whether self > other, lane by lane, of floats; NaN exceeds nothing, and nothing exceeds it."""
        return self._of(self._builder.fcmp_ordered(">", *self._pair(other)))

    def at_most(self, other: int) -> Value:
        """Whether self <= other, lane by lane, unsigned."""
        return self._of(self._builder.icmp_unsigned("<=", *self._pair(other)))

    def limited(self, low: int, high: int) -> Value:
        """min(max(self, low), high), lane by lane, signed."""
        value = self
        for sign, bound in ((">", low), ("<", high)):
            a, b = value._pair(bound)
            value = self._of(self._builder.select(self._builder.icmp_signed(sign, a, b), a, b))
        return value

    def where(self, condition: Value, other: Value | float) -> Value:
        """Self if the condition holds, else the other; lane by lane."""
        return self._of(self._builder.select(condition._value, *self._pair(other)))

    def bits(self) -> Value:
        """A float's bits as an integer; for a vector of conditions one integer, the first lane in its lowest bit."""
        if self._element == ir.IntType(1):
            return self._of(self._builder.bitcast(self._value, ir.IntType(self.lanes)))
        return self._of(
            self._builder.bitcast(self._value, self._shaped({FLOAT.real: INT32, HALF.real: INT16}[self._element]))
        )

    def conditions(self) -> Value:
        """An integer's bits as a vector of conditions, the lowest as the first lane; the other way round of `bits`."""
        return self._of(self._builder.bitcast(self._value, ir.VectorType(ir.IntType(1), self._element.width)))

    def as_float(self) -> Value:
        """The float that has these bits."""
        return self._of(self._builder.bitcast(self._value, self._shaped({32: FLOAT, 16: HALF}[self._element.width])))

    def as_bytes(self) -> Value:
        """The 4 bytes of each int32, the lowest first."""
        return self._of(self._builder.bitcast(self._value, ir.VectorType(INT8.real, 4 * max(self.lanes, 1))))

    def as_words(self) -> Value:
        """Each 4 bytes as one int32, the first the lowest; the other way round of `as_bytes`."""
        return self._of(self._builder.bitcast(self._value, ir.VectorType(INT32.real, self.lanes // 4)))

    def widened(self) -> Value:
        """float16 -> float32."""
        return self._of(self._builder.fpext(self._value, self._shaped(FLOAT)))

    def narrowed(self) -> Value:
        """float32 -> float16: nearest, ties to even."""
        return self._of(self._builder.fptrunc(self._value, self._shaped(HALF)))

    def to_float(self) -> Value:
        """Signed integer -> float32."""
        return self._of(self._builder.sitofp(self._value, self._shaped(FLOAT)))

    def to_int32(self) -> Value:
        """C's (int32_t) of a float; out of range and NaN give what the processor's conversion gives."""
        return self._of(self._builder.fptosi(self._value, self._shaped(INT32)))

    def to(self, kind: Late) -> Value:
        """Integers of another width: the low bits, or zeros above."""
        resize = self._builder.trunc if kind.real.width < self._element.width else self._builder.zext
        return self._of(resize(self._value, self._shaped(kind)))

    def signed(self, kind: Late) -> Value:
        """Signed integers of a greater width."""
        return self._of(self._builder.sext(self._value, self._shaped(kind)))

    def sums_of_fours(self) -> Value:
        """Sums of four neighbouring lanes: a quarter of the lanes."""
        first, *others = (self.lanes_from(i, 4, self.lanes // 4) for i in range(4))
        for other in others:
            first = first + other
        return first

    def plus_fours(self, x: Value, y: Value, *, positive: bool = False, times: Value | None = None) -> Value:
        """Self, 4, 8 or 16 int32, plus the sums of fours of the products of bytes x, unsigned if
        `multiplies_unsigned()`, else signed, and as many signed bytes y above -128.

        positive  no byte of x exceeds 127, and none is negative
        times     times these numbers, as `as_factors` gives them; then x is positive
        """
        widest = 16 if multiplies_unsigned() else 8
        if self.lanes > (4 if processor_has("dotprod") else widest):
            half = self.lanes // 2
            parts = [
                self.lanes_from(i, 1, half).plus_fours(
                    *(each.lanes_from(4 * i, 1, 4 * half) for each in (x, y)),
                    positive=positive,
                    times=times and times.filled(self.lanes).lanes_from(i, 1, half),
                )
                for i in (0, half)
            ]
            return parts[0].followed_by(parts[1])
        if self.lanes == 8 and adds_pairs():
            return self._plus_pairs(x, y, positive, times)
        if times is not None and self.lanes >= 8 and multiplies_unsigned():
            return self._plus_scaled_pairs(x, y, times)
        if times is not None:
            return self + self._of(ir.Constant(self._value.type, None)).plus_fours(x, y, positive=positive) * times
        kind, bytes_ = self._value.type, x._value.type
        if processor_has("dotprod"):
            shape = ir.FunctionType(kind, [kind, bytes_, bytes_])
            function = self._builder.module.declare_intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", (), shape)
            return self._of(self._builder.call(function, [self._value, x._value, y._value]))
        if multiplies_unsigned():
            words = (self._builder.bitcast(each._value, kind) for each in (x, y))
            return self._of(self._x86(f"avx512.vpdpbusd.{32 * self.lanes}", kind, self._value, *words))
        products = x.signed(INT16).signed(INT32) * y.signed(INT16).signed(INT32)
        pairs = products.lanes_from(0, 2, 2 * self.lanes) + products.lanes_from(1, 2, 2 * self.lanes)
        return self + pairs.lanes_from(0, 2, self.lanes) + pairs.lanes_from(1, 2, self.lanes)

    def plus_words(self, xs: Sequence[Value], ys: Sequence[Value], largest: int, times: Value | None = None) -> Value:
        """Self plus the sums of fours of each x with its y, as `plus_fours` adds them.

        largest  of the bytes of x, of which none is negative; 0: x is as `plus_fours` takes it
        """
        if self.lanes == 8 and adds_pairs() and largest:
            together, total = 32767 // (2 * 127 * largest), self  # sums of two products that int16 holds
            pairs = [self._pairs(x._value, y._value) for x, y in zip(xs, ys, strict=True)]
            for begin in range(0, len(pairs), together):
                total = total._plus_twos(reduce(self._builder.add, pairs[begin : begin + together]), times)
            return total
        total = self
        for x, y in zip(xs, ys, strict=True):
            total = total.plus_fours(x, y, positive=largest > 0, times=times)
        return total

    def _plus_pairs(self, x: Value, y: Value, positive: bool, times: Value | None) -> Value:
        """`plus_fours` of 8 int32 by AVX2, which multiplies unsigned bytes: of a negative x, both signs are changed."""
        sizes, signed = x._value, y._value
        if not positive:
            sizes, signed = (self._x86("avx2.psign.b", each.type, each, x._value) for each in (sizes, signed))
        return self._plus_twos(self._pairs(sizes, signed), times)

    def _pairs(self, unsigned: Any, signed: Any) -> Any:
        """Sums of two products of bytes, as int16."""
        kind = ir.VectorType(INT16.real, unsigned.type.count // 2)
        name = "avx512.pmaddubs.w.512" if kind.count == 32 else "avx2.pmadd.ub.sw"
        return self._x86(name, kind, unsigned, signed)

    def _plus_scaled_pairs(self, x: Value, y: Value, times: Value) -> Value:
        """`plus_fours` of 8 or 16 int32 by AVX-512 VNNI, which multiplies sums of pairs by factors and adds them up."""
        kind, pairs = self._value.type, self._pairs(x._value, y._value)
        words = (self._builder.bitcast(each, kind) for each in (pairs, times.filled(self.lanes)._value))
        return self._of(self._x86(f"avx512.vpdpwssd.{32 * self.lanes}", kind, self._value, *words))

    def _plus_twos(self, pairs: Any, times: Value | None) -> Value:
        """Self plus the sums of two int16, each times a factor of `as_factors`."""
        factors = ir.Constant(pairs.type, [1] * 16)
        if times is not None:
            factors = self._builder.bitcast(times.filled(8)._value, pairs.type)
        return self + self._of(self._x86("avx2.pmadd.wd", self._value.type, pairs, factors))

    def _x86(self, name: str, result: Any, *operands: Any) -> Any:
        """An instruction of AVX2 or AVX-512."""
        shape = ir.FunctionType(result, [operand.type for operand in operands])
        return self._builder.call(self._builder.module.declare_intrinsic(f"llvm.x86.{name}", (), shape), operands)

    def as_factors(self) -> Value:
        """Int32 numbers that int16 holds, as `plus_fours` takes factors: one for all sums, or one each."""
        return (self & 0xFFFF) | (self << 16) if scales_pairs() else self

    def total(self, neighbours: bool = False) -> Value:
        """The sum of the float lanes, pairwise.

        neighbours  each lane is added to the one beside it, and not to the one half a vector away
        """
        value = self
        while value.lanes > 1:
            half = value.lanes // 2
            step, second = (2, 1) if neighbours else (1, half)
            value = value.lanes_from(0, step, half) + value.lanes_from(second, step, half)
        return value.lane(self._of(ir.Constant(INT32.real, 0)))

    def rounded(self, how: str) -> Value:
        """A float rounded to a whole number.

        how  "rint": half goes to even; "round": half goes away from zero
        """
        return self._call(f"llvm.{how}", self._value.type)

    def largest(self) -> Value:
        """The largest lane, unsigned."""
        return self._call("llvm.vector.reduce.umax", self._element)

    def first_set(self) -> Value:
        """The index of the lowest bit that is set."""
        function = self._declare("llvm.cttz", self._value.type, [self._value.type, ir.IntType(1)])
        return self._of(self._builder.call(function, [self._value, ir.Constant(ir.IntType(1), 0)]))

    def _declare(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        kind = self._value.type
        overload = f"v{kind.count}{_letter(kind.element)}" if self.lanes else _letter(kind)
        module = self._builder.module
        return module.declare_intrinsic(f"{name}.{overload}", (), ir.FunctionType(result, arguments))

    def _call(self, name: str, result: Any) -> Value:
        return self._of(self._builder.call(self._declare(name, result, [self._value.type]), [self._value]))

    def times_powers_of_2(self, powers: Value) -> Value:
        """16 float32, each times 2 ** a power, rounded once. Powers are whole numbers, as float32, below 256; what is
        given for others is not said."""
        kind, mask, how = self._value.type, ir.IntType(16), ir.IntType(32)
        if processor_has("avx512f"):
            shape = ir.FunctionType(kind, [kind, kind, kind, mask, how])
            function = self._builder.module.declare_intrinsic("llvm.x86.avx512.mask.scalef.ps.512", (), shape)
            options = self._value, ir.Constant(mask, -1), ir.Constant(how, 4)  # every lane, and rounded as usual
            return self._of(self._builder.call(function, [self._value, powers._value, *options]))
        is_near = powers.constant(256.0).exceeds((powers.bits() & 0x7FFFFFFF).as_float())
        power = powers.where(is_near, 0.0).to_int32()
        half = ((power + 256) >> 1) - 128
        first, last = (((each + 127) << 23).as_float() for each in (half, power - half))
        return self * first * last

    def constant(self, number: float) -> Value:
        """A number in every lane of a value of this kind."""
        return self._of(ir.Constant(self._element, number)).filled(self.lanes)

    def fused_multiply_add(self, factor: Value | float, addend: Value | float) -> Value:
        """self * factor + addend, rounded once; a scalar counts for every lane."""
        kind = self._value.type
        if self._element is HALF.real and not computes_with_float16():
            factor, addend = (self._of(self._pair(each)[1]) for each in (factor, addend))
            return (self.widened() * factor.widened())._plus_half(addend.widened())
        function = self._declare("llvm.fma", kind, [kind] * 3)
        return self._of(self._builder.call(function, [self._value, self._pair(factor)[1], self._pair(addend)[1]]))

    def _plus_half(self, other: Value) -> Value:
        """The sum of two float32 as a float16, rounded once. Between, float32 has an odd last bit where it rounds the
        sum: then it lies on no boundary of float16."""
        total = self + other
        part = total - self
        error = (self - (total - part)) + (other - part)  # what total lacks, or NaN
        beyond = (error.bits() ^ total.bits()) >> 31  # total is larger than the sum
        odd = (total.bits() - beyond) | 1
        return odd.where(error.differs(0.0) & error.equals(error), total.bits()).as_float().narrowed()

    def as_address(self) -> Address:
        """This int64 as a number that addresses are computed with."""
        return Address(self._builder, self._value)

    def lane(self, index: Value) -> Value:
        """The lane at an index, which is a scalar."""
        return self._of(self._builder.extract_element(self._value, index._value))

    def lanes_from(self, first: int, step: int, count: int) -> Value:
        """`count` lanes: first, first + step, ..."""
        return self.picked(self, [first + step * i for i in range(count)])

    def followed_by(self, other: Value) -> Value:
        """The lanes of self, then those of the other."""
        return self.picked(other, list(range(2 * self.lanes)))

    def interleaved(self, other: Value) -> Value:
        """Lane 0 of self, lane 0 of the other, lane 1 of self, ..."""
        return self.picked(other, [i // 2 + i % 2 * self.lanes for i in range(2 * self.lanes)])

    def picked(self, other: Value, order: list[int]) -> Value:
        """A vector of lanes by number: first those of self are numbered, then those of the other."""
        picks = ir.Constant(ir.VectorType(INT32.real, len(order)), order)
        return self._of(self._builder.shuffle_vector(self._value, other._value, picks))


def _letter(kind: Any) -> str:
    return {FLOAT.real: "f32", HALF.real: "f16"}.get(kind) or f"i{kind.width}"


class Address:
    """An address that a part reads from or writes to, or another int64; memory need not be aligned."""

    def __init__(self, builder: Any, value: Any) -> None:
        self._builder, self._value = builder, value

    def _number(self, other: Address | int) -> Any:
        return other._value if isinstance(other, Address) else ir.Constant(self._value.type, other)

    def __add__(self, n_bytes: Address | int) -> Address:
        """The address n_bytes further on; n_bytes may be an Address too."""
        return Address(self._builder, self._builder.add(self._value, self._number(n_bytes)))

    def __mul__(self, factor: Address | int) -> Address:
        """The number, times another."""
        return Address(self._builder, self._builder.mul(self._value, self._number(factor)))

    def number_at(self, index: int) -> Address:
        """The int64 number `index` of those at this address."""
        return Address(self._builder, (self + 8 * index).load(INT64)._value)

    def value(self, kind: Late) -> Value:
        """The low bits of the number, as a scalar of a kind."""
        return Value(self._builder, self._builder.trunc(self._value, kind.real))

    def load(self, kind: Late, lanes: int = 0) -> Value:
        """The scalar of a kind at this address; with `lanes` a vector of so many."""
        whole = ir.VectorType(kind.real, lanes) if lanes else kind.real
        return Value(
            self._builder, self._builder.load(self._builder.inttoptr(self._value, whole.as_pointer()), align=1)
        )

    def store(self, value: Value) -> None:
        """Writes a scalar or vector to this address."""
        pointer = self._builder.inttoptr(self._value, value._value.type.as_pointer())
        self._builder.store(value._value, pointer, align=1)

    def prefetch(self, *, near: bool = True) -> None:
        """Has the processor fetch the cache line here, which is read soon; an address outside of memory does no harm.

        near  into its first cache; else into the second one
        """
        fetch_line(self._builder, self._value, near=near)

    def count(self, body: Callable[[Address, Sequence[Value]], Sequence[Value]], *start: Value) -> Sequence[Value]:
        """A loop over i = 0, 1, ... below this number. Values begin as `start`; body(i, values) returns the next ones.
        Returns the last."""
        variables = [Variable(value) for value in start]
        with cgutils.for_range(self._builder, self._value) as loop:
            values = body(Address(self._builder, loop.index), [variable.value for variable in variables])
            for variable, value in zip(variables, values, strict=True):
                variable.value = value
        return [variable.value for variable in variables]

    def zeros(self, kind: Late, lanes: int = 0) -> Value:
        """A constant: 0 in every lane, or as a scalar."""
        return Value(self._builder, ir.Constant(ir.VectorType(kind.real, lanes) if lanes else kind.real, None))


class Variable:
    """A value that changes from one round of a loop to the next; LLVM keeps it in a register."""

    def __init__(self, first: Value) -> None:
        self._builder = first._builder
        self._place = cgutils.alloca_once_value(self._builder, first._value)

    @property
    def value(self) -> Value:
        """The value at this place in the code."""
        return Value(self._builder, self._builder.load(self._place))

    @value.setter
    def value(self, value: Value) -> None:
        """Sets the value from here on."""
        self._builder.store(value._value, self._place)


def part(function: Callable[..., None]) -> Any:
    """Decorator: turns a function of two to seven Addresses into one that a kernel calls with that many int64."""

    def typed(n_addresses: int) -> tuple[Any, Any]:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            function(*(Address(builder, argument) for argument in arguments))
            return context.get_dummy_value()

        return types.void(*[types.int64] * n_addresses), emit

    def of_two(typing_context: Any, a: Any, b: Any) -> Any:
        return typed(2)

    def of_three(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        return typed(3)

    def of_four(typing_context: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return typed(4)

    def of_five(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any) -> Any:
        return typed(5)

    def of_six(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        return typed(6)

    def of_seven(typing_context: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any) -> Any:
        return typed(7)

    kinds: dict[int, Any] = {2: of_two, 3: of_three, 4: of_four, 5: of_five, 6: of_six, 7: of_seven}
    return intrinsic(kinds[function.__code__.co_argcount])


def gathered(values: Sequence[Value]) -> Value:
    """A vector of scalars."""
    first = values[0]
    builder, kind = first._builder, first._value.type
    vector = ir.Constant(ir.VectorType(kind, len(values)), ir.Undefined)
    for i, value in enumerate(values):
        vector = builder.insert_element(vector, value._value, ir.Constant(INT32.real, i))
    return Value(builder, vector)


def transposed(rows: list[Value]) -> list[Value]:
    """Transposes a square matrix, given as vectors of as many lanes as there are vectors, a power of 2: lane j of
    vector i becomes lane i of vector j."""
    n = half = len(rows)
    while half > 1:
        half //= 2
        swapped = list(rows)
        for i in range(n):
            if not i & half:
                low, high = rows[i], rows[i + half]
                swapped[i] = low.picked(high, [j if not j & half else j - half + n for j in range(n)])
                swapped[i + half] = low.picked(high, [j + half if not j & half else j + n for j in range(n)])
        rows = swapped
    return rows
