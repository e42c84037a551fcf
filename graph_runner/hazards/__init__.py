"""Hazards of graphs, found from addresses, strides and order alone: `check`, `assert_no_hazards`."""

from graph_runner.hazards.check import HazardError as HazardError
from graph_runner.hazards.check import assert_no_hazards as assert_no_hazards
from graph_runner.hazards.check import check as check
from graph_runner.hazards.findings import Finding as Finding
from graph_runner.hazards.findings import Kind as Kind
from graph_runner.hazards.findings import Report as Report
from graph_runner.hazards.graph import Graph as Graph
from graph_runner.hazards.graph import Node as Node
from graph_runner.hazards.graph import Operand as Operand
from graph_runner.hazards.graph import Step as Step
