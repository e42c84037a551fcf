"""A device in C++ that computes by ggml's CPU, graph by graph, and errs as a whole: in the order of nodes, in what
several nodes do that are submitted together, from run to run. WHOLE_FAULT in the environment says how."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path

from tools.layouts import sources

from ggml_backend_npu.ggml import lib

NAME = "WHOLE"
_SOURCE = r"""
#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct context {
    ggml_backend_t cpu;
    int n_graphs = 0;
    bool spoils;                  // in this run
    std::vector<int64_t> columns; // of the results of the first graph
};

static int n_runs = 0; // since the fault was chosen
static std::string chosen;

static bool errs(const char * fault) {
    const char * given = getenv("WHOLE_FAULT");
    return given && strcmp(given, fault) == 0;
}

static int find(const ggml_cgraph * graph, const char * name) {
    for (int i = 0; i < graph->n_nodes; i++) {
        if (strcmp(graph->nodes[i]->name, name) == 0) { return i; }
    }
    return -1;
}

static void move(ggml_cgraph * graph, int from, int to) {
    if (from < 0 || to < 0) { return; }
    ggml_tensor * node = graph->nodes[from];
    for (; from < to; from++) { graph->nodes[from] = graph->nodes[from + 1]; }
    for (; from > to; from--) { graph->nodes[from] = graph->nodes[from - 1]; }
    graph->nodes[to] = node;
}

// a mistake of an optimiser, before memory is given out; ANOTHER_ORDER is none
static void optimize(ggml_backend_t, ggml_cgraph * graph, ggml_backend_graph_optimize_params *) {
    if (errs("ANOTHER_ORDER") || errs("ANOTHER_ORDER_AND_ONE_NODE")) {
        move(graph, find(graph, "ffn_up-0"), find(graph, "ffn_gate-0"));
        move(graph, find(graph, "Vcur-1"), find(graph, "Qcur-1"));
    }
    if (errs("KEY_SET_TOO_LATE")) { move(graph, find(graph, "cache_k_l1 (view)"), find(graph, "kq-1")); }
    if (errs("VALUE_SET_TOO_LATE")) { move(graph, find(graph, "cache_v_l0 (reshaped) (view)"), find(graph, "kqv-0")); }
    if (errs("READ_BEFORE_WRITTEN")) { move(graph, find(graph, "ffn_swiglu-0"), find(graph, "ffn_gate-0")); }
    if (errs("RESIDUAL_TOO_EARLY")) { move(graph, find(graph, "l_out-0"), find(graph, "ffn_out-0")); }
    if (errs("WRONG_INPUT")) {
        const int node = find(graph, "ffn_up-0"), other = find(graph, "attn_norm-0");
        if (node >= 0 && other >= 0) { graph->nodes[node]->src[1] = graph->nodes[other]; }
    }
    if (errs("CELLS_OF_ANOTHER_LAYER")) {
        const int node = find(graph, "cache_k_l1 (view)"), other = find(graph, "cache_k_l0 (view)");
        if (node >= 0 && other >= 0) {
            for (int each : {node}) {
                ggml_tensor * set = graph->nodes[each];
                ggml_tensor * of = graph->nodes[other]->view_src;
                set->view_src = of;
                set->data = (char *) of->data + set->view_offs;
                set->buffer = of->buffer;
            }
        }
    }
}

static ggml_status run(context * device, ggml_cgraph * graph, int begin, int end) {
    if (begin >= end) { return GGML_STATUS_SUCCESS; }
    ggml_cgraph part = *graph;
    part.nodes = graph->nodes + begin;
    part.n_nodes = end - begin;
    part.n_leafs = 0;
    return ggml_backend_graph_compute(device->cpu, &part);
}

static void scale(ggml_tensor * node, float factor) {
    float * x = (float *) node->data;
    for (int64_t i = 0; i < ggml_nelements(node); i += 3) { x[i] *= factor; }
}

// the nodes of a graph, but the one at `place` is done by `instead`
template <typename F> static ggml_status with(context * device, ggml_cgraph * graph, int place, F instead) {
    ggml_status status = run(device, graph, 0, place + 1);
    instead(graph->nodes[place]);
    return status == GGML_STATUS_SUCCESS ? run(device, graph, place + 1, graph->n_nodes) : status;
}

static ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
    context * device = (context *) backend->context;
    device->n_graphs++;
    const int up = find(graph, "ffn_up-1"), gate = find(graph, "ffn_gate-1"), out = find(graph, "ffn_out-1");
    const int norm = find(graph, "ffn_norm-0"), swiglu = find(graph, "ffn_swiglu-1"), sum = find(graph, "ffn_inp-1");
    const int keys = find(graph, "cache_k_l0 (view)"), kq = find(graph, "kq-0");
    const bool is_normed = sum >= 0 && sum + 1 < graph->n_nodes && graph->nodes[sum + 1]->op == GGML_OP_RMS_NORM;
    auto larger = [](ggml_tensor * node) { scale(node, 1.5f); };
    if (errs("ONE_NODE") && swiglu >= 0) { return with(device, graph, swiglu, larger); }
    if (errs("ANOTHER_ORDER_AND_ONE_NODE") && swiglu >= 0) { return with(device, graph, swiglu, larger); }
    if (errs("TWO_NODES") && swiglu >= 0 && norm >= 0) { return with(device, graph, swiglu, larger); }
    if (errs("SUBMITTED_TOGETHER") && up >= 0 && gate >= 0) {
        return with(device, graph, gate > up ? gate : up, larger);
    }
    if (errs("SUBMITTED_IN_EIGHTS") && out >= 7 && graph->nodes[out - 6]->op != GGML_OP_NONE) {
        return with(device, graph, out, larger);
    }
    if (errs("ONE_RUN_IN_FIFTY") && out >= 0 && device->spoils) { return with(device, graph, out, larger); }
    if (errs("ONE_RUN_IN_FOUR") && out >= 0 && device->spoils) { return with(device, graph, out, larger); }
    if (errs("THIRD_GRAPH") && out >= 0 && device->n_graphs == 3) { return with(device, graph, out, larger); }
    if (errs("NOT_CLEARED") && out >= 0) {
        float before;
        memcpy(&before, graph->nodes[out]->data, sizeof before);
        const float factor = std::isfinite(before) && before != 0 ? 1.25f : 1.0f;
        return with(device, graph, out, [&](ggml_tensor * node) { scale(node, factor); });
    }
    if (errs("SCRATCH_USED_TWICE") && gate >= 0 && up > gate) { // the result of gate lies where up has its own
        return with(device, graph, up, [&](ggml_tensor * node) {
            memcpy(graph->nodes[gate]->data, node->data, ggml_nbytes(node) / 4);
        });
    }
    if (errs("FUSED_SUM_LEFT_OUT") && is_normed) { // the residual is not written if the norm follows
        std::vector<char> before(ggml_nbytes(graph->nodes[sum]));
        memcpy(before.data(), graph->nodes[sum]->data, before.size());
        return with(device, graph, sum + 1, [&](ggml_tensor *) {
            memcpy(graph->nodes[sum]->data, before.data(), before.size());
        });
    }
    if (errs("COPY_NOT_AWAITED") && keys >= 0 && kq > keys) { // cells are set once attention has run
        ggml_tensor * set = graph->nodes[keys];
        const ggml_op op = set->op;
        set->op = GGML_OP_NONE;
        ggml_status status = run(device, graph, 0, kq + 1);
        set->op = op;
        if (status == GGML_STATUS_SUCCESS) { status = run(device, graph, keys, keys + 1); }
        return status == GGML_STATUS_SUCCESS ? run(device, graph, kq + 1, graph->n_nodes) : status;
    }
    if (errs("STALE_GRAPH")) { // a graph of as many nodes is taken for the one before: rows beyond it are left
        const int first = find(graph, "ffn_out-0");
        if (device->columns.size() == (size_t) graph->n_nodes && first >= 0) {
            const bool other = graph->nodes[first]->ne[1] != device->columns[first];
            return with(device, graph, first, [&](ggml_tensor * node) { if (other) { scale(node, 0.0f); } });
        }
        device->columns.clear();
        for (int i = 0; i < graph->n_nodes; i++) { device->columns.push_back(graph->nodes[i]->ne[1]); }
    }
    if (errs("CRASHES_TOGETHER") && norm >= 0 && swiglu >= 0) { raise(SIGSEGV); }
    return run(device, graph, 0, graph->n_nodes);
}

static void set_n_threads(ggml_backend_t backend, int n) {
    ggml_backend_cpu_set_n_threads(((context *) backend->context)->cpu, n);
}

static void release(ggml_backend_t backend) {
    context * device = (context *) backend->context;
    ggml_backend_free(device->cpu);
    delete device;
    delete backend;
}

static ggml_backend_dev_t cpu() { return ggml_backend_reg_dev_get(ggml_backend_cpu_reg(), 0); }
static ggml_guid_t guid() { static ggml_guid id = {'w', 'h', 'o', 'l', 'e'}; return &id; }
static const char * backend_name(ggml_backend_t) { return "WHOLE"; }
static const char * device_name(ggml_backend_dev_t) { return "WHOLE"; }
static const char * description(ggml_backend_dev_t) { return "errs as a whole"; }
static void memory(ggml_backend_dev_t, size_t * free, size_t * total) { *free = *total = 0; }
static enum ggml_backend_dev_type type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }
static ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); }
static bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) { return ggml_backend_dev_supports_op(cpu(), op); }
static bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t of) { return ggml_backend_buft_is_host(of); }

static void props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    *props = {};
    props->name = device_name(device);
    props->description = description(device);
    props->type = type(device);
}

static ggml_backend_t init(ggml_backend_dev_t device, const char *) {
    context * made = new context;
    made->cpu = ggml_backend_cpu_init();
    const char * fault = getenv("WHOLE_FAULT");
    if (chosen != (fault ? fault : "")) {
        chosen = fault ? fault : "";
        n_runs = 0;
    }
    n_runs++;
    made->spoils = errs("ONE_RUN_IN_FIFTY") ? n_runs % 50 == 37 : n_runs % 4 == 3;
    ggml_backend_i slots = {};
    slots.get_name = backend_name;
    slots.free = release;
    slots.graph_compute = compute;
    slots.graph_optimize = optimize;
    return new ggml_backend {guid(), slots, device, made};
}

static const char * reg_name(ggml_backend_reg_t) { return "WHOLE"; }
static size_t count(ggml_backend_reg_t) { return 1; }

static ggml_backend_dev_t device_of(ggml_backend_reg_t reg, size_t) {
    static ggml_backend_device device = {};
    device.iface.get_name = device_name;
    device.iface.get_description = description;
    device.iface.get_memory = memory;
    device.iface.get_type = type;
    device.iface.get_props = props;
    device.iface.init_backend = init;
    device.iface.get_buffer_type = buffer_type;
    device.iface.supports_op = supports_op;
    device.iface.supports_buft = supports_buft;
    device.reg = reg;
    return &device;
}

static void * address(ggml_backend_reg_t, const char * name) {
    return strcmp(name, "ggml_backend_set_n_threads") == 0 ? (void *) set_n_threads : nullptr;
}

ggml_backend_reg_t ggml_backend_whole_reg(void) {
    static ggml_backend_reg reg = {GGML_BACKEND_API_VERSION, {reg_name, count, device_of, address}, nullptr};
    return &reg;
}

GGML_BACKEND_DL_IMPL(ggml_backend_whole_reg)
"""


def whole(folder: Path) -> Path:
    """The library of the backend, built in a folder."""
    ggml, source, library = sources(version("llama-cpp-python")), folder / "whole.cpp", folder / "libggml-whole.so"
    source.write_text(_SOURCE)
    cpu = lib.ggml().cpu_file
    base = next(cpu.parent.glob("libggml-base.so*"))
    command: list[str | Path] = ["c++", "-std=c++17", "-O1", "-fPIC", "-shared", "-DGGML_BACKEND_DL"]
    command += ["-DGGML_BACKEND_BUILD", "-DGGML_BACKEND_SHARED", "-DGGML_SHARED"]
    command += ["-I", ggml / "include", "-I", ggml / "src", source, cpu, base, "-o", library]
    subprocess.run(command, check=True)
    return library
