"""Makes the pictures of README.md from real output: python docs/pictures.py"""

from pathlib import Path

from graph_runner.console import Console
from graph_runner.diff import diff
from graph_runner.diff_report import print_diff
from graph_runner.models import demo_file

console = Console(record=True, width=96, force_terminal=True, color_system="truecolor")
print_diff(diff(demo_file(), "The capital of France is"), console)
console.save_svg(str(Path(__file__).with_name("diff-demo.svg")), title="ggml-npu diff demo")
