(() => {
const data = JSON.parse(document.getElementById("data").textContent);
if (!byId("drift")) return;

const count = (n) => n.toLocaleString("en");
const number = (x) => (x === null || x === Infinity ? "not finite" : x === 0 ? "0" : x.toExponential(1));
const finite = (x) => x ?? Infinity;  // JSON has null where an error is no finite number

// what is drawn: of each layer or step the nodes, of each step the logits too

const ends = new Map(data.ends.map((each) => [each.step, each]));
const drifts = new Map(data.by_step.map((each) => [each.step, each]));
const GROUPS = {
  layers: data.layers.map((nodes) => ({ name: nodes.layer === null ? "none" : String(nodes.layer), nodes })),
  steps: [...new Set([...drifts.keys(), ...ends.keys()])].sort((a, b) => a - b)
    .map((step) => ({ name: String(step), nodes: drifts.get(step), logits: ends.get(step) })),
};
const DEFAULTS = { along: data.layers.length ? "layers" : "steps" };
let groups = [];
for (const option of [...byId("along").options]) if (!GROUPS[option.value].length) option.remove();

const nodesError = ({ nodes }) => (nodes ? finite(nodes.nmse) : undefined);
const logitsError = ({ logits }) => (logits ? finite(logits.nmse) : undefined);

function dots(area) {
  const errors = [groups.map(nodesError), groups.map(logitsError)];
  const axis = errorAxis(errors.flat().filter((error) => error !== undefined), area);
  const path = (kind, values, shape) => draw("path", { class: `dots ${kind}`, d: values.map((error, i) =>
    (error === undefined ? "" : `M${area.x(i).toFixed(1)} ${axis.y(error).toFixed(1)}${shape}`)).join("") });
  return [...axis.lines, path("isolated", errors[0], "h0"), path("cumulative", errors[1], "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0")];
}

/* Where the runs part first. */
function parting() {
  if (!data.first) return null;
  const { layer, step } = data.first, name = byId("along").value === "steps" ? String(step) : layer === null ? "none" : String(layer);
  const i = groups.findIndex((group) => group.name === name);
  return i < 0 ? null : i;
}

function say(i) {
  const { name, nodes, logits } = groups[i], along = byId("along").value === "layers" ? "layer" : "step";
  const lines = [make("p", {}, name === "none" ? "in no layer" : `${along} ${name}`)];
  if (nodes) {
    lines.push(make("p", {}, `${count(nodes.differing)} of ${count(nodes.compared)} nodes differ`));
    if (nodes.differing) {
      const at = along === "layer" ? `step ${nodes.step}` : nodes.layer === null ? "in no layer" : `layer ${nodes.layer}`;
      lines.push(make("p", {}, `worst NMSE ${number(nodes.nmse)} at ${nodes.worst}, ${at}`));
    }
  }
  if (logits) {
    const kl = logits.kl === null ? "" : `, KL divergence ${number(logits.kl)}`;
    const token = logits.same_token ? "" : "; another most likely token";
    lines.push(make("p", {}, logits.is_equal ? "logits are equal" : `logits: NMSE ${number(logits.nmse)}${kl}${token}`));
  }
  if (i === parting()) lines.push(make("p", {}, "here the runs part first"));
  return lines;
}

const drift = chart(byId("drift"), { name: (i) => groups[i].name, say, parts: dots, chosen: parting });

function show() {
  const { along } = fromAddress(DEFAULTS, ["along"]);
  byId("along").value = along;
  byId("of-logits").hidden = along !== "steps";
  groups = GROUPS[along];
  drift.show(groups.length);
}

byId("along").addEventListener("change", () => {
  toAddress({ along: byId("along").value }, DEFAULTS);
  show();
});
addEventListener("hashchange", show);
show();
})();
