/* When offloading pays: the formulas, which know no page, and below them the calculator that shows them. */
"use strict";

const GB = 1e9, GIB = 2 ** 30, MIB = 2 ** 20;

/* A transformer block of width d without dropout does 24 d^2 operations for a token and saves 16 d numbers; causal
   attention over s tokens adds 2 s d operations and saves nothing of that size where it never writes its matrix. */
const BLOCK_FLOP = 24, BLOCK_NUMBERS = 16;

/* Operations of forward, and bytes that autograd saves, of a stack of blocks for one step; a checkpointed block saves
   its d inputs alone. */
function transformer({ layers, width, tokens, sequence, itemsize }, checkpointed = false) {
  return {
    flop: layers * tokens * (BLOCK_FLOP * width ** 2 + 2 * sequence * width),
    savedBytes: layers * tokens * (checkpointed ? 1 : BLOCK_NUMBERS) * width * itemsize,
  };
}

/* Operations in the time that a saved byte takes to be hidden: it leaves during forward and comes back during
   backward, which takes twice as long. */
function flopPerByte(flops, out, back) {
  return flops * Math.max(1 / out, 1 / (2 * back));
}

/* The width from which everything that a block saves is hidden, attention left out. */
function hiddenFromWidth(perByte, itemsize, checkpointed = false) {
  return Math.round(perByte * itemsize / (checkpointed ? BLOCK_FLOP : BLOCK_FLOP / BLOCK_NUMBERS));
}

/* What a step can be at best. Seconds, bytes, bytes a second. The newest bytes stay: backward asks for them at once. */
function roofline({ forward, backward, savedBytes, out, back, window, newest }) {
  const moved = Math.max(0, savedBytes - newest);
  const outSeconds = moved / out, inSeconds = moved / back;
  const plain = forward + backward;
  const step = Math.max(forward, outSeconds) + Math.max(backward, inSeconds);
  return {
    moved, outSeconds, inSeconds, plain, step,
    hidden: outSeconds <= forward && inSeconds <= backward,
    checkpointed: plain + forward,
    left: Math.min(savedBytes, window + newest),
  };
}

if (typeof module !== "undefined") {
  module.exports = { transformer, flopPerByte, hiddenFromWidth, roofline, report };
}

/* ---- the page ---- */

/* Bytes a second. What was not measured here says so. */
const LINKS = {
  "PCIe 5 x16, pinned memory": [52, 52],
  "PCIe 4 x16 (half of PCIe 5, not measured)": [26, 26],
  "PCIe 3 x16 (a quarter, not measured)": [13, 13],
  "NVMe of the CPU benchmark, direct I/O": [3.7, 3.1],
};
const DEVICES = {
  "H200, bf16 (598 TFLOP/s, an estimate)": [598, 2],
  "Two CPU cores, float32 (0.14 TFLOP/s, an estimate)": [0.14, 4],
};

const FIELDS = {
  shape: [
    ["layers", "Layers", 32], ["width", "Width", 4096], ["tokens", "Tokens a step", 32768],
    ["sequence", "Tokens a sequence", 8192], ["itemsize", "Bytes a number", 2], ["flops", "Device, TFLOP/s", 598],
  ],
  measured: [
    ["forward", "Forward, seconds", 3.5], ["saved", "Saved by autograd, GiB", 1.6],
  ],
  link: [["out", "Out, GB/s", 52], ["back", "Back, GB/s", 52]],
  library: [["window", "max_inflight_bytes, MiB", 256], ["newest", "keep_last_bytes, MiB", 256]],
};

function bytes(value) {
  return value >= GIB ? `${(value / GIB).toPrecision(3)} GiB` : `${Math.round(value / MIB)} MiB`;
}

function seconds(value) {
  return value >= 1 ? `${value.toPrecision(3)} s` : `${(value * 1000).toPrecision(3)} ms`;
}

/* Text for the verdict and rows for the table; `given` are the fields' numbers, `shaped` tells whether work and bytes
   follow from the shape. Backward takes twice as long as forward, and once more where it recomputes. */
function report(given, shaped, checkpointed) {
  const shape = shaped ? transformer(given, checkpointed) : null;
  const forward = shaped ? shape.flop / (given.flops * 1e12) : given.forward;
  const savedBytes = shaped ? shape.savedBytes : given.saved * GIB;
  const out = given.out * GB, back = given.back * GB, backward = (checkpointed ? 3 : 2) * forward;
  const found = roofline({
    forward, backward, savedBytes, out, back, window: given.window * MIB, newest: given.newest * MIB,
  });
  const rows = [
    ["Forward computes for", seconds(forward)],
    ["The bytes leave in", seconds(found.outSeconds)],
    ["Backward computes for", seconds(backward)],
    ["The bytes come back in", seconds(found.inSeconds)],
    ["A step without offload", seconds(found.plain)],
    ["A step with it, at best", seconds(found.step)],
    ...(checkpointed ? [] : [["A step with full checkpointing instead", seconds(found.checkpointed)]]),
    ["Saved on the device without offload", bytes(savedBytes)],
    ["Saved on the device with it, at most about", bytes(found.left)],
    ["Room taken in host memory or on disk", bytes(found.moved)],
  ];
  if (shaped) {
    const width = hiddenFromWidth(flopPerByte(given.flops * 1e12, out, back), given.itemsize, checkpointed);
    rows.push(["Hidden from this width on, attention left out", width.toLocaleString("en")]);
  }
  return { verdict: verdict(found, forward, backward, checkpointed), rows };
}

function verdict(found, forward, backward, checkpointed) {
  if (found.moved === 0) return "Nothing leaves: all of it is among the newest bytes, which stay.";
  if (found.hidden) {
    const busy = Math.max(found.outSeconds / forward, found.inSeconds / backward);
    return `Hidden: the link needs ${Math.round(100 * busy)} % of the time that there is.`;
  }
  const limit = `The link is the limit: a step takes at least ${(found.step / found.plain).toFixed(2)} times as long`;
  if (checkpointed) return `${limit}.`;
  return limit + (found.step > found.checkpointed
    ? ". Full checkpointing takes less time; try both together."
    : ", which is less than with full checkpointing.");
}

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function group(title, ...children) {
  return element("fieldset", {}, element("legend", {}, title), element("div", { className: "fields" }, ...children));
}

function choice(label, texts, act) {
  const select = element("select", {}, ...texts.map((text) => new Option(text, text)));
  select.addEventListener("change", () => act(select.value));
  return element("label", { className: "field" }, label, select);
}

function calculator(place) {
  const inputs = {};
  const fields = (part) => FIELDS[part].map(([name, label, value]) => {
    inputs[name] = element("input", { type: "number", min: "0", step: "any", value, required: true, name });
    return element("label", { className: "field" }, label, inputs[name]);
  });
  const set = (values) => { for (const name in values) inputs[name].value = values[name]; show(); };
  const shape = group("Model and device", choice("Device, for example", Object.keys(DEVICES), (name) =>
    set({ flops: DEVICES[name][0], itemsize: DEVICES[name][1] })), ...fields("shape"));
  const measured = group("What I measured", ...fields("measured"));
  const sources = { "a transformer's shape": shape, "what I measured": measured };
  const ways = { "everything": false, "inputs of checkpointed blocks": true };
  let source = "a transformer's shape", way = "everything";
  const start = group("Begin with",
    choice("Work and bytes from", Object.keys(sources), (name) => { source = name; show(); }),
    choice("Autograd saves", Object.keys(ways), (name) => { way = name; show(); }));
  const link = group("Link", choice("For example", Object.keys(LINKS), (name) =>
    set({ out: LINKS[name][0], back: LINKS[name][1] })), ...fields("link"));
  const answer = element("p", { className: "verdict" }), body = element("tbody");
  const result = element("output", {}, answer, element("table", {}, body));
  result.setAttribute("aria-live", "polite");

  function show() {
    for (const name in sources) sources[name].hidden = name !== source;
    const used = Object.values(inputs).filter((input) => !input.closest("fieldset").hidden);
    if (!used.every((input) => input.validity.valid) || !(Number(inputs.out.value) > 0 && Number(inputs.back.value) > 0)) {
      answer.textContent = "Each field takes a number, 0 or more; a link moves something.";
      body.replaceChildren();
      return;
    }
    const given = Object.fromEntries(Object.entries(inputs).map(([name, input]) => [name, Number(input.value)]));
    const { verdict: text, rows } = report(given, sources[source] === shape, ways[way]);
    answer.textContent = text;
    body.replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell)))));
  }

  place.replaceChildren(start, shape, measured, link, group("Library", ...fields("library")), result);
  place.addEventListener("input", show);
  show();
}

if (typeof document !== "undefined") {
  const start = () => { const place = document.getElementById("roofline"); if (place) calculator(place); };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
