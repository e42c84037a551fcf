"""ggml 0.13.1, 0.15.3, where it is not ggml_0_25. Written by tests/tools/layouts.py."""

from ggml_backend_npu.ggml.layouts import ggml_0_25

LAYOUT = ggml_0_25.LAYOUT.but(
    versions=("0.13.1", "0.15.3"),
    tables={
        "ggml_backend_i": {
            "get_name": "text(pointer)",
            "free": "void(pointer)",
            "set_tensor_async": "void(pointer, pointer, pointer, size_t, size_t)",
            "get_tensor_async": "void(pointer, pointer, pointer, size_t, size_t)",
            "set_tensor_2d_async": "void(pointer, pointer, pointer, size_t, size_t, size_t, size_t, size_t)",
            "get_tensor_2d_async": "void(pointer, pointer, pointer, size_t, size_t, size_t, size_t, size_t)",
            "cpy_tensor_async": "bool(pointer, pointer, pointer, pointer)",
            "synchronize": "void(pointer)",
            "graph_plan_create": "pointer(pointer, pointer)",
            "graph_plan_free": "void(pointer, pointer)",
            "graph_plan_update": "void(pointer, pointer, pointer)",
            "graph_plan_compute": "int(pointer, pointer)",
            "graph_compute": "int(pointer, pointer)",
            "event_record": "void(pointer, pointer)",
            "event_wait": "void(pointer, pointer)",
            "graph_optimize": "void(pointer, pointer)",
        }
    },
    structs={
        "ggml_backend_dev_caps": {
            "async": (0, "bool"),
            "host_buffer": (1, "bool"),
            "buffer_from_host_ptr": (2, "bool"),
            "events": (3, "bool"),
        }
    },
)
