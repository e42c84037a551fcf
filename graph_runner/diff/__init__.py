"""Two runs of one model in step, each node judged."""

from graph_runner.diff.run import DiffOptions as DiffOptions
from graph_runner.diff.run import DiffResult as DiffResult
from graph_runner.diff.run import chosen_ops as chosen_ops
from graph_runner.diff.run import diff as diff
from graph_runner.diff.run import run_in_step as run_in_step
