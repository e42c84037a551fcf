"""float16 for processors without instructions for it: x86-64 without F16C, older than 2012.

There LLVM calls two functions of its compiler-rt by name, and ends the process if it does not find them.
"""

from __future__ import annotations

from llvmlite import binding

_SOURCE = """
define float @__extendhfsf2(half %x) {
  %h = bitcast half %x to i16
  %bits = zext i16 %h to i32
  %sign16 = and i32 %bits, 32768
  %sign = shl i32 %sign16, 16
  %magnitude16 = and i32 %bits, 32767
  %shifted = shl i32 %magnitude16, 13
  %normal = add i32 %shifted, 939524096             ; 112 << 23: exponents of float32 begin so much lower
  %special = add i32 %normal, 939524096
  %is_special = icmp uge i32 %magnitude16, 31744
  %is_nan = icmp ugt i32 %magnitude16, 31744
  %quiet = select i1 %is_nan, i32 4194304, i32 0
  %quieted = or i32 %special, %quiet
  %integer = uitofp i32 %magnitude16 to float
  %small = fmul float %integer, 0x3E70000000000000  ; 2 ** -24
  %subnormal = bitcast float %small to i32
  %is_small = icmp ult i32 %magnitude16, 1024
  %number = select i1 %is_small, i32 %subnormal, i32 %normal
  %magnitude = select i1 %is_special, i32 %quieted, i32 %number
  %result = or i32 %magnitude, %sign
  %float = bitcast i32 %result to float
  ret float %float
}

define half @__truncsfhf2(float %x) {
  %bits = bitcast float %x to i32
  %sign32 = lshr i32 %bits, 16
  %sign = and i32 %sign32, 32768
  %magnitude = and i32 %bits, 2147483647
  %payload32 = lshr i32 %magnitude, 13
  %payload = and i32 %payload32, 1023
  %nan = or i32 %payload, 32256
  %odd = and i32 %payload32, 1
  %rebased = sub i32 %magnitude, 939520001           ; (112 << 23) - 4095: half to even
  %rounded = add i32 %rebased, %odd
  %normal = lshr i32 %rounded, 13
  %absolute = bitcast i32 %magnitude to float
  %aligned = fadd float %absolute, 5.000000e-01      ; its last bit is 2 ** -24
  %aligned_bits = bitcast float %aligned to i32
  %subnormal = sub i32 %aligned_bits, 1056964608
  %is_small = icmp ult i32 %magnitude, 947912704     ; 2 ** -14
  %number = select i1 %is_small, i32 %subnormal, i32 %normal
  %is_large = icmp uge i32 %magnitude, 1199570944    ; 65536
  %finite = select i1 %is_large, i32 31744, i32 %number
  %is_nan = icmp ugt i32 %magnitude, 2139095040
  %found = select i1 %is_nan, i32 %nan, i32 %finite
  %result = or i32 %found, %sign
  %low = trunc i32 %result to i16
  %half = bitcast i16 %low to half
  ret half %half
}
"""


def define() -> binding.ExecutionEngine:
    """Defines both for whatever LLVM loads, as long as what it returns lives."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(_SOURCE)
    engine = binding.create_mcjit_compiler(module, binding.Target.from_default_triple().create_target_machine())
    for function in module.functions:
        binding.add_symbol(function.name, engine.get_function_address(function.name))
    return engine
