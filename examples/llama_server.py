"""llama.cpp's own llama-server on the NPU: starts it with the plugin, requests a text, and stops it.

python examples/llama_server.py MODEL.gguf [LLAMA_SERVER]        LLAMA_SERVER: its path; by default that on PATH

It needs a llama-server with a shared ggml of a version that the plugin knows.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

from ggml_backend_npu.plugin.embedding import plugin

if not 2 <= len(sys.argv) <= 3:
    print("usage: python examples/llama_server.py MODEL.gguf [LLAMA_SERVER]", file=sys.stderr)
    sys.exit(2)
model, server = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "llama-server"
if shutil.which(server) is None:
    print(f"{server}: no such program; name llama-server's path after the model", file=sys.stderr)
    sys.exit(2)
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
address = f"http://127.0.0.1:{port}"
environment = os.environ | {"GGML_BACKEND_PATH": str(plugin()), "GGML_NPU_OPS": "all"}
command = [server, "-m", model, "-dev", "NPU", "-c", "512", "--host", "127.0.0.1", "--port", port]
with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process:
    try:
        while True:
            if process.poll() is not None:
                log.seek(0)
                sys.exit(f"llama-server ended with {process.returncode}:\n{log.read()}")
            try:
                urlopen(f"{address}/health")
                break
            except URLError:  # it loads the model
                time.sleep(0.2)
        body = json.dumps({"prompt": "The capital of France is", "n_predict": 16, "temperature": 0}).encode()
        with urlopen(Request(f"{address}/completion", body, {"Content-Type": "application/json"})) as answer:
            print(json.load(answer)["content"])
        log.seek(0)
        print(*(line.strip() for line in log if "NPU" in line), sep="\n", file=sys.stderr)
    finally:
        process.terminate()
