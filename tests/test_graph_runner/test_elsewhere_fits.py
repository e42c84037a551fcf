"""Does a libllama fit the Python package that calls it?"""

from __future__ import annotations

import pytest
from llama_cpp import llama_cpp

from graph_runner.base.errors import BadInputError
from graph_runner.elsewhere.fits import refuse_other_structs


class Shifted:
    """llama_cpp, with a libllama whose context parameters have four bytes more at their begin."""

    llama_model_default_params = llama_cpp.llama_model_default_params

    @staticmethod
    def llama_context_default_params() -> llama_cpp.llama_context_params:
        plain = bytes(llama_cpp.llama_context_default_params())
        return llama_cpp.llama_context_params.from_buffer_copy((bytes(4) + plain)[: len(plain)])


def test_the_installed_one_fits() -> None:
    refuse_other_structs(llama_cpp)


def test_another_struct_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"another llama_context_params than llama-cpp-python [\d.]+: n_ctx is not"):
        refuse_other_structs(Shifted)
