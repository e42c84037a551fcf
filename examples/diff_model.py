"""Compare a model's nodes with ggml's CPU from Python, with quantised caches.

python examples/diff_model.py [MODEL]        MODEL: a path, demo (the default) or tiny
"""

import sys
from collections import Counter

from graph_runner.base.models import model_file
from graph_runner.diff.run import DiffOptions, diff
from graph_runner.run.session import Settings

settings = Settings(flash_attention="on", cache_type_k="q8_0", cache_type_v="q4_0")
with model_file(sys.argv[1] if len(sys.argv) > 1 else "demo") as file:
    result = diff(file, "The three primary colours are", DiffOptions(steps=8, settings=settings))

for (op, types), count in Counter((node.op, node.types) for node in result.compared).items():
    print(f"{op} {types}: {count} nodes")
for node in result.wrong:
    print(f"differs: {node}")
rounded = sum(node.verdict != "exact" for node in result.nodes)
if not result:
    print(f"wrong: {len(result.wrong)} nodes differ")
else:
    print(f"right within rounding: {rounded} nodes differ" if rounded else "right: every byte equal")
sys.exit(not result)
