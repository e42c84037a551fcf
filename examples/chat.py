"""Chat in the terminal with every node of the model on the NPU. An empty line or Ctrl-D ends it.

python examples/chat.py [MODEL]        MODEL: a path, demo (the default) or tiny; prompts are in SmolLM2's format
"""

import codecs
import sys

from ggml_backend_npu import default_backend
from graph_runner.base.models import model_file
from graph_runner.run.session import Sampler, Session, Settings, generate

ANSWER = 200  # tokens at most

backend = default_backend()
backend.options = backend.options.updated({"ops": "all"})
model = sys.argv[1] if len(sys.argv) > 1 else "demo"
with model_file(model) as file, Session(file, Settings(device="npu", n_ctx=4096)) as session:
    sampler = Sampler(temperature=0.7, seed=1)
    while True:
        try:
            question = input("> ")
        except EOFError:
            break
        if not question:
            break
        turn = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in generate(session, session.tokenize(turn), ANSWER, sampler):
            print(decoder.decode(session.piece(token)), end="", flush=True)
        session.decode(session.tokenize("<|im_end|>\n"))  # the context keeps the conversation
        print()
    print(f"{session.npu_nodes.total():,} of {session.nodes.total():,} nodes on the NPU")
