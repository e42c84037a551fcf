"""The perplexity of a text on ggml's CPU and on the NPU, with exact and with fast matrix products.

python examples/perplexity.py [MODEL] [TEXT.txt]        MODEL: a path, demo (the default) or tiny
"""

import math
import sys
from pathlib import Path

import numpy as np

from ggml_backend_npu import default_backend
from graph_runner.base.models import model_file
from graph_runner.run.session import Session, Settings

TEXT = """The tide rises twice a day because the moon pulls at the sea. On the side that faces the moon the water is
drawn towards it, and on the far side the earth is drawn away from the water. Between the two the sea is low."""


def perplexity(file: Path, text: str, settings: Settings) -> float:
    """Returns exp of the mean of -log p(token | the tokens before it), token by token."""
    with Session(file, settings) as session:
        first, *others = session.tokenize(text)
        loss = 0.0
        session.decode([first])
        for token in others:
            logits = session.logits().astype(np.float64)
            loss += np.logaddexp.reduce(logits) - logits[token]
            session.decode([token])
        return math.exp(loss / len(others))


model = sys.argv[1] if len(sys.argv) > 1 else "demo"
text = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else TEXT
backend = default_backend()
with model_file(model) as file:
    cells = -(-len(text.encode()) // 256) * 256 + 256  # a token is at least a byte
    print(f"CPU          {perplexity(file, text, Settings(n_ctx=cells, flash_attention='on')):.6f}")
    for matmul in ("exact", "fast"):
        backend.options = backend.options.updated({"ops": "all", "matmul": matmul})
        found = perplexity(file, text, Settings(device="npu", n_ctx=cells, flash_attention="on"))
        print(f"NPU, {matmul:6}  {found:.6f}")
