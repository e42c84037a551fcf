"""LLVM: the machine that it makes code for, and object files that it loads where no linker has made a shared object."""

from __future__ import annotations

from llvmlite import binding

from quant.kernels import halves, processor

binding.initialize_native_target()
binding.initialize_native_asmprinter()
if not processor.processor_has("f16c"):
    _halves = halves.define()  # as long as this process


def machine(**options: object) -> binding.TargetMachine:
    """The processor that kernels are compiled for, and options of llvmlite's `create_target_machine`. Its code can lie
    anywhere."""
    target = binding.Target.from_triple(binding.get_process_triple())
    return target.create_target_machine(
        cpu=processor.name(), features=processor.features(), reloc="pic", codemodel="small", **options
    )


def loaded(code: bytes, name: str) -> tuple[int, object]:
    """The address of a function of an object file, and what has to live as long as it."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine(jit=True))
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine.get_function_address(name), engine
