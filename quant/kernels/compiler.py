"""The compiler: numba and LLVM make machine code of a kernel. A process that finds all its kernels kept never imports
this."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba.core import event, sigutils
from numba.core.compiler import Compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import _FunctionCompiler  # type: ignore[attr-defined,unused-ignore]
from numba.core.registry import cpu_target

from quant.folders import FolderError
from quant.kernels import cache, llvm, processor
from quant.kernels.late import Signature
from quant.kernels.objects import SYMBOL, Kept, Loaded

numba.config.CPU_NAME, numba.config.CPU_FEATURES = processor.name(), processor.features()


class _Passes(event.Listener):  # type: ignore[misc,unused-ignore]
    """Tells whoever wants to know that numba begins or ends a pass."""

    def __init__(self, told: Sequence[Callable[[], None]]) -> None:
        self._told = told

    def on_start(self, _: Any) -> None:
        for tell in self._told:
            tell()

    on_end = on_start


class _Announcement:
    """Says once per process, on stderr, that kernels are being compiled."""

    said = False

    @classmethod
    def make(cls) -> None:
        if cls.said:
            return
        cls.said = True
        try:
            where = f"kept in {cache.kept_in()}"
        except FolderError as error:
            where = f"not kept: {error}"
        print(f"ggml-npu: compiling kernels not used before; {where}", file=sys.stderr)


def compiled(
    function: Callable[..., Any], signature: Signature, kept: Kept, told: Sequence[Callable[[], None]]
) -> Loaded:
    """Compiles a C function, and keeps it if that is possible.

    told  called at the start and the end of each pass of numba
    """
    _Announcement.make()
    with event.install_listener("numba:run_pass", _Passes(told)):
        return kept.keep(_object_of(function, signature))


class _Compiler(_FunctionCompiler):  # type: ignore[misc,unused-ignore]
    """Compiles the function alone: `_export` makes it one of C."""

    def _customize_flags(self, flags: Any) -> Any:
        flags.no_cpython_wrapper = flags.no_cfunc_wrapper = flags.no_compile = True
        return flags


def _object_of(function: Callable[..., Any], signature: Signature) -> bytes:
    """The object file of a C function, which has the name SYMBOL in it."""
    made = _Compiler(function, cpu_target, {"nopython": True, "error_model": "numpy"}, {}, Compiler)
    arguments, result = sigutils.normalize_signature(signature.real)
    with global_compiler_lock:
        found = made.compile(arguments, result)
        found.library.add_ir_module(_exported(found.fndesc, cpu_target.target_context))
        found.library._finalize_final_module = lambda: None  # it is not to run from here
        found.library.finalize()
    module = found.library._final_module
    foreign = [each.name for each in module.functions if each.is_declaration and each.name.startswith(_FOREIGN)]
    if foreign:
        raise NotImplementedError(f"kernel {function.__qualname__}: needs {', '.join(foreign)}, which only numba has")
    code: bytes = llvm.machine(opt=numba.config.OPT).emit_object(module)
    return code


def _exported(function: Any, context: Any) -> ir.Module:
    """A function of C that calls one of numba. No exception reaches C: one ends the process, as an assertion that fails
    does."""
    module = context.create_module(SYMBOL)
    kind = context.call_conv.get_function_type(function.restype, function.argtypes)
    callee = ir.Function(module, kind, function.llvm_func_name)
    result, arguments = context.get_value_type(function.restype), map(context.get_value_type, function.argtypes)
    exported = ir.Function(module, ir.FunctionType(result, [*arguments]), SYMBOL)
    builder = ir.IRBuilder(exported.append_basic_block())
    status, out = context.call_conv.call_function(builder, callee, function.restype, function.argtypes, exported.args)
    with builder.if_then(status.is_error, likely=False):
        builder.call(module.declare_intrinsic("llvm.trap", (), ir.FunctionType(ir.VoidType(), [])), [])
    builder.ret(out)
    freed = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()]), "NRT_MemInfo_call_dtor")
    ir.IRBuilder(freed.append_basic_block()).ret_void()  # never called: arrays of kernels lie in memory of others
    return module


_FOREIGN = ("NRT_", "numba_", "Py", "_Py")
