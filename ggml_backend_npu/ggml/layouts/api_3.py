"""llama.cpp's pull request 23671, where it is not ggml_0_25. Written by tests/tools/layouts.py."""

from ggml_backend_npu.ggml.layouts import ggml_0_25

LAYOUT = ggml_0_25.LAYOUT.but(
    versions=(),
    api_version=3,
    tables={
        "ggml_backend_buffer_type_i": {
            "get_name": "text(pointer)",
            "alloc_buffer": "pointer(pointer, size_t)",
            "alloc_buffer_n": "pointer(pointer, pointer, int)",
            "get_alignment": "size_t(pointer)",
            "get_max_size": "size_t(pointer)",
            "get_alloc_size": "size_t(pointer, pointer)",
            "get_alloc_size_n": "size_t(pointer, pointer, int)",
            "is_host": "bool(pointer)",
        }
    },
    structs={
        "ggml_backend_buffer_type": {
            "iface": (0, "ggml_backend_buffer_type_i"),
            "device": (64, "pointer"),
            "context": (72, "pointer"),
        }
    },
)
