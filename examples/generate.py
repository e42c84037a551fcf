"""Generate text with a GGUF model. This project's kernels compute its data movement.

python examples/generate.py [MODEL] [PROMPT]        MODEL: a path, demo (the default) or tiny
"""

import sys

from graph_runner.base.models import model_file
from graph_runner.run.session import Sampler, Session, Settings, generate

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
prompt = sys.argv[2] if len(sys.argv) > 2 else "Once upon a time"

with model_file(model) as file, Session(file, Settings(device="npu")) as session:
    print(prompt, end="")
    for token in generate(session, session.tokenize(prompt), 48, Sampler()):
        print(session.piece(token).decode(errors="replace"), end="", flush=True)
    print()
    for op, count in session.npu_nodes.most_common():
        print(f"{op}: {count} nodes on the NPU")
