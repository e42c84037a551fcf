// Runs queries in Perfetto's trace_processor, a wasm made for a worker of a browser, on a trace.
//
//     node perfetto.mjs FOLDER TRACE QUERY...    prints a JSON array of rows for each query, a line each
//
// FOLDER has engine_bundle.js and trace_processor*.wasm. What is sent and answered is TraceProcessorRpcStream of
// protos/perfetto/trace_processor/trace_processor.proto. Ends with 1 where Perfetto says an error.

import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const [folder, trace, ...queries] = process.argv.slice(2);
const [APPEND, FINALIZE, QUERY] = [1, 2, 3];

// what a browser's worker has

const read = (url) => new Uint8Array(fs.readFileSync(path.join(folder, path.basename(String(url)))));
globalThis.XMLHttpRequest = class {
  open(method, url) { this.url = url; }
  send() { [this.response, this.status] = [read(this.url).buffer, 200]; }
};
globalThis.fetch = async (url) => new Response(read(url), { headers: { "content-type": "application/wasm" } });
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: "http://localhost/engine_bundle.js" };
console.log = () => {};
console.warn = console.error;

// protobuf

const varint = (n) => n < 128 ? [n] : [(n % 128) | 128, ...varint(Math.floor(n / 128))];
const number = (field, n) => Buffer.from([...varint(8 * field), ...varint(n)]);
const bytes = (field, data) => Buffer.concat([Buffer.from([...varint(8 * field + 2), ...varint(data.length)]), data]);

function varints(data) {
  const found = [];
  for (let i = 0; i < data.length; i++) {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n, i++) {
      value |= BigInt(data[i] & 127) << shift;
      if (data[i] < 128) break;
    }
    found.push(Number(BigInt.asIntN(64, value)));
  }
  return found;
}

function* fields(data) {
  for (let i = 0; i < data.length;) {
    const next = () => { const begin = i; while (data[i++] > 127); return varints(data.subarray(begin, i))[0]; };
    const tag = next();
    const length = [0, 8, 0, 0, 0, 4][tag % 8];
    const size = tag % 8 === 2 ? next() : length;
    yield [tag >> 3, tag % 8 === 0 ? next() : data.subarray(i, (i += size))];
  }
}

// trace_processor

let sent = 0;
const request = (method, ...parts) => bytes(1, Buffer.concat([number(1, sent++), number(2, method), ...parts]));

function fail(what) {
  process.stderr.write(`${what}\n`);
  process.exit(1);
}

function answered(field, data) {
  if (field === 5) fail(`fatal: ${data}`);
  if (field === 201 || field === 204) for (const [at, text] of fields(data)) if (at === 2) fail(`trace: ${text}`);
  if (field !== 203) return;
  const names = [], cells = [];
  for (const [at, value] of fields(data)) {
    if (at === 1) names.push(String(value));
    if (at === 2) fail(`query: ${value}`);
    if (at !== 3) continue;
    const batch = Object.fromEntries(fields(value));
    const whole = batch[2] ? varints(batch[2]) : [], texts = batch[5] ? String(batch[5]).split("\0") : [];
    for (const kind of batch[1] ? varints(batch[1]) : []) cells.push(kind === 2 ? whole.shift() : kind === 4 ? texts.shift() : null);
  }
  const rows = [];
  while (cells.length) rows.push(cells.splice(0, names.length));
  process.stdout.write(`${JSON.stringify(rows)}\n`);
}

const port = {
  postMessage: (data) => {
    for (const [, message] of fields(Buffer.from(data))) for (const each of fields(message)) answered(...each);
  },
};

const kept = process;
vm.runInThisContext(`process = undefined;\n${fs.readFileSync(path.join(folder, "engine_bundle.js"))}`);
globalThis.process = kept;
globalThis.onmessage({ data: port });
const begin = () => {
  const asked = [
    request(APPEND, bytes(101, fs.readFileSync(trace))),
    request(FINALIZE),
    ...queries.map((text) => request(QUERY, bytes(103, bytes(1, Buffer.from(text))))),
  ];
  for (const each of asked) port.onmessage({ data: new Uint8Array(each) });
};
const waiting = setInterval(() => {
  if (!port.onmessage) return;  // it is there once the wasm is
  clearInterval(waiting);
  begin();
}, 5);
