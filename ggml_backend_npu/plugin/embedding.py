"""The backend as a plugin: a small shared library that starts Python inside any program that loads it with ggml.

`GGML_BACKEND_PATH=$(ggml-npu plugin) program` makes ggml_backend_load_all open the library and call its
ggml_backend_init. That starts the Python environment in which the library was built, ignoring PYTHONHOME and
PYTHONPATH, and asks `default.registry` for the backend. Where something is missing, one line on stderr says what, and
ggml gets NULL: the program goes on without the device. cffi generates the C code around it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from quant import folders
from quant.errors import UserError
from quant.kernels import kept

_API = "void * npu_registry(void * caller);"

# Runs when npu_registry is called for the first time.
_PYTHON = """
import sys
import _ggml_npu
from _ggml_npu import ffi

def say_why(kind, error, trace):
    while error.__cause__ is not None:
        error = error.__cause__
    reason = " ".join(str(error).split()) or kind.__name__
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in reason)
    print(f"ggml-npu: no device NPU: {shown}", file=sys.stderr)

@ffi.def_extern(onerror=say_why)
def npu_registry(caller):
    _ggml_npu.caller = int(ffi.cast("uintptr_t", caller))
    from ggml_backend_npu import default
    return ffi.cast("void *", default.registry(_ggml_npu.caller))
"""

_C = """
#include <dlfcn.h>

static void * npu_registry(void * caller);

static int npu_refuse(const char * why) {
    fprintf(stderr, "ggml-npu: no device NPU: %s\\n", why);
    return 0;
}

static int npu_start_python(void) {
    PyPreConfig before;
    PyConfig config;
    PyStatus status;
    PyPreConfig_InitIsolatedConfig(&before);
    before.utf8_mode = 1;
    PyConfig_InitIsolatedConfig(&config);
    config.user_site_directory = 1;
    config.buffered_stdio = 0;  /* nothing flushes Python's buffers when the program ends */
    status = Py_PreInitialize(&before);
    if (!PyStatus_Exception(status)) status = PyConfig_SetBytesString(&config, &config.executable, NPU_EXECUTABLE);
    if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
    PyConfig_Clear(&config);
    if (PyStatus_Exception(status)) return npu_refuse(status.err_msg);
    PyEval_SaveThread();
    return 1;
}

static int npu_find_cffi(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject * module = PyImport_ImportModule("_cffi_backend");
    PyErr_Clear();
    Py_XDECREF(module);
    PyType_Modified(&PyCapsule_Type);  /* cffi takes a version tag of this type for another thread's lock */
    PyGILState_Release(state);
    return module != NULL;
}

/* what is imported is no garbage: to look for some in it would take 12 ms of one of the first graphs */
static void npu_keep_imported(void) {
    PyGILState_STATE state = PyGILState_Ensure();
    PyRun_SimpleString("import gc; gc.freeze()");
    PyGILState_Release(state);
}

CFFI_DLLEXPORT void * ggml_backend_init(void) {
    void * registry;
    int starts = 0;
    /* extension modules look for Python's symbols in the global scope; ggml opens its plugins in scopes of their own */
    if (dlopen(NPU_LIBPYTHON, RTLD_NOW | RTLD_GLOBAL) == NULL) return npu_refuse(dlerror()), NULL;
    if (!Py_IsInitialized() && !(starts = npu_start_python())) return NULL;
    if (strncmp(Py_GetVersion(), NPU_VERSION, strlen(NPU_VERSION)) != 0)
        return npu_refuse("the plugin was built for Python " NPU_VERSION "x, the program runs another one"), NULL;
    if (!npu_find_cffi()) return npu_refuse("cffi is missing from the Python environment of " NPU_EXECUTABLE), NULL;
    registry = npu_registry(__builtin_return_address(0));
    if (starts) npu_keep_imported();
    return registry;
}
"""


class PluginError(UserError):
    """The plugin cannot be built: one line that says why."""


def plugin() -> Path:
    """The plugin's library, built at the first call and kept in the user's cache directory.

    There is one per Python environment and content of this module. Raises PluginError where there is no C compiler, no
    shared libpython to link with, or no folder to keep it in.
    """
    libpython = _libpython()
    command = [
        *("-shared", "-fPIC", "-O1", "-DNDEBUG", f"-I{sysconfig.get_path('include')}"),
        f"-DNPU_EXECUTABLE={json.dumps(sys.executable, ensure_ascii=False)}",
        f"-DNPU_LIBPYTHON={json.dumps(str(libpython), ensure_ascii=False)}",
        f'-DNPU_VERSION="{sys.version_info.major}.{sys.version_info.minor}."',
        *(f"-Wl,-rpath,{libpython.parent}", "-Wl,-z,nodelete"),
    ]
    parts = [sys.version, _API, _C, _PYTHON, *command]
    digest = hashlib.sha256("\0".join(parts).encode(errors="surrogateescape")).hexdigest()[:16]
    try:
        library = folders.kept(folders.cache_root() / f"plugin-{digest}") / "libggml-npu.so"
    except folders.FolderError as error:
        raise PluginError(f"plugin: cannot be kept: {error}") from None
    wrong = kept.damage(library.parent)
    if wrong is not None:
        if library.exists():
            kept.say_damaged(f"the plugin in {library.parent}: {wrong}")
        with folders.temporary_folder(library.parent.parent) as folder:
            source, built = folder / "plugin.c", folder / library.name
            _write_source(source)
            _compile([*command, str(source), str(libpython), "-o", str(built)])
            built.replace(library)
        kept.seal(library.parent)
    return library


def check_package() -> None:
    """Raises PluginError where the plugin's Python finds another package than the running one: where this one is of a
    checkout on PYTHONPATH or in the working directory, which the plugin ignores.

    Nothing is started to find that out where this package is installed.
    """
    own = Path(__file__).resolve().parents[1]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if own.parent in installed or own.parent not in {Path(entry).resolve() for entry in sys.path}:
        return  # where a finder of an editable install finds it, sys.path does not have it
    code = "from importlib.util import find_spec; print(find_spec('ggml_backend_npu').origin)"
    done = subprocess.run([sys.executable, "-E", "-P", "-c", code], capture_output=True, text=True, errors="replace")
    found = None if done.returncode else Path(done.stdout.strip()).resolve().parent
    if found != own:
        what = f"{own} is not installed" if found is None else f"would run what is installed, {found}, and not {own}"
        raise PluginError(f"plugin: {what}: pip install -e {own.parent}")


def _libpython() -> Path:
    """The shared library of the running Python."""
    name = str(sysconfig.get_config_var("INSTSONAME"))
    folders = [sysconfig.get_config_var("LIBDIR"), os.path.join(sys.base_prefix, "lib")]
    for folder in folders:
        if ".so" in name and folder and os.path.exists(os.path.join(folder, name)):
            return Path(folder, name)
    raise PluginError(
        f"plugin: Python {sys.version.split()[0]} of {sys.base_prefix} has no shared libpython, which a plugin needs"
    )


def _write_source(path: Path) -> None:
    from cffi import FFI

    ffi = FFI()
    ffi.embedding_api(_API.replace("(void * caller)", "(void *)"))
    ffi.set_source("_ggml_npu", _C, compiler_verbose=0)
    ffi.embedding_init_code(_PYTHON)
    ffi.emit_c_code(str(path))


def _compile(arguments: list[str]) -> None:
    candidates = [os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"]
    found = [command for name in candidates if name and shutil.which((command := shlex.split(name))[0])]
    if not found:
        raise PluginError("plugin: no C compiler is installed (tried $CC, cc, gcc, clang)")
    done = subprocess.run([*found[0], *arguments], capture_output=True, text=True, errors="replace")
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise PluginError(f"plugin: {found[0][0]} failed: {errors[0] if errors else done.returncode}")
