"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const reading = document.getElementById("reading");
  const canvas = document.getElementById("drawing"), pen = canvas.getContext("2d");
  const end = Math.max(data.end, 1), view = { from: 0, to: end };
  const AXIS = 22, MEMORY = 200, LABEL = 18, ROW = 16, GAP = 8, SHORTEST = 5;
  /* In the order in which they are drawn: a dashed line over a wider one lets that show. */
  const SERIES = [
    { key: "host", name: "in host memory", column: 2 },
    { key: "disk", name: "on disk", column: 3 },
    { key: "device", name: "on the device", column: 1 },
    { key: "without", name: "without offload", column: 4 },
  ].map((one) => ({ ...one, most: data.memory.reduce((most, row) => Math.max(most, row[one.column]), 0) }))
    .filter((one) => one.most > 0);

  let height = MEMORY + GAP;
  for (const track of data.tracks) {
    track.top = height;
    height += LABEL + track.depth * ROW + GAP;
    /* Slices of one depth do not overlap, so that they can be searched by time. */
    track.rows = Array.from({ length: track.depth }, () => []);
    for (const slice of track.slices) track.rows[slice[2]].push(slice);
  }
  height += AXIS;
  canvas.style.height = height + "px";
  const several = new Set(data.tracks.map((track) => track.device)).size > 1;
  Object.assign(canvas.dataset, {
    samples: data.memory.length,
    tracks: data.tracks.length,
    slices: data.tracks.reduce((n, track) => n + track.slices.length, 0),
  });

  const bytes = (n) => data.sizes[after(data.sizes, n) - 1][1];
  const time = (us) => us >= 1e6 ? (us / 1e6).toFixed(3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us.toFixed(1) + " µs";
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  /* -- drawing ----------------------------------------------------------------------------------------------- */

  let width = 1, pointed = {};
  const toX = (us) => (us - view.from) / (view.to - view.from) * width;
  const toTime = (x) => view.from + x / width * (view.to - view.from);
  const toY = (n) => MEMORY - n / data.most * (MEMORY - 24);
  /* The first place in sorted rows whose time (column 0) is later than t. */
  const after = (rows, t) => {
    let low = 0, high = rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rows[middle][0] > t) high = middle; else low = middle + 1;
    }
    return low;
  };
  const stroke = (style, ...points) => {
    pen.strokeStyle = color(style);
    pen.lineWidth = 1;
    pen.beginPath();
    points.forEach(([x, y], place) => place ? pen.lineTo(x, y) : pen.moveTo(x, y));
    pen.stroke();
  };
  /* A text with the card behind it, so that no line crosses it. */
  const label = (text, style, x, top, tall) => {
    pen.fillStyle = color("card");
    pen.fillRect(x, top, pen.measureText(text).width + 4, tall);
    pen.fillStyle = color(style);
    pen.fillText(text, x, top + tall / 2 + 1);
  };

  function draw() {
    const scale = window.devicePixelRatio || 1;
    width = canvas.clientWidth;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    drawTimes();
    drawSizes();
    SERIES.forEach(drawSeries);
    if (data.budget) stroke("stall", [0, toY(data.budget)], [width, toY(data.budget)]);
    for (const track of data.tracks) {
      label((several ? track.device + " · " : "") + track.name, "text", 0, track.top, LABEL);
      track.rows.forEach((row, depth) => drawRow(track, row, track.top + LABEL + depth * ROW));
    }
    if (pointed.time !== undefined) stroke("text", [toX(pointed.time), 0], [toX(pointed.time), MEMORY]);
    document.documentElement.dataset.view = view.from + " " + view.to;
  }
  function drawTimes() {
    const rough = (view.to - view.from) / Math.min(Math.max(2, Math.floor(width / 60)), 12);
    const power = 10 ** Math.floor(Math.log10(rough)), step = [1, 2, 5, 10].find((n) => n * power >= rough) * power;
    const unit = view.to >= 1e6 ? [1e6, "s"] : view.to >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    const digits = Math.max(0, -Math.floor(Math.log10(step / unit[0]) + 1e-9));
    for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
      const x = Math.round(toX(t)) + 0.5, text = (t / unit[0]).toFixed(digits) + " " + unit[1];
      stroke("line", [x, 0], [x, height - AXIS + 4]);
      const wide = pen.measureText(text).width;
      pen.fillStyle = color("muted");
      pen.fillText(text, Math.min(Math.max(x - wide / 2, 0), width - wide), height - AXIS + 13);
    }
  }
  function drawSizes() {
    for (let n = 0; n <= data.most; n += data.step) {
      const y = Math.round(toY(n)) + 0.5;
      stroke("line", [0, y], [width, y]);
      if (n > 0) label(bytes(n), "muted", 0, y - 16, 15);
    }
  }
  function drawSeries(one) {
    const rows = data.memory, right = toX(Math.min(end, view.to));
    let at = Math.max(0, after(rows, view.from) - 1), y = toY(0);
    pen.beginPath();
    pen.moveTo(0, at < rows.length && rows[at][0] <= view.from ? toY(rows[at][one.column]) : y);
    for (; at < rows.length && rows[at][0] <= view.to; at++) {
      const x = Math.max(0, toX(rows[at][0]));
      if (rows[at][0] > view.from) pen.lineTo(x, y);
      y = toY(rows[at][one.column]);
      pen.lineTo(x, y);
    }
    pen.lineTo(right, y);
    pen.strokeStyle = pen.fillStyle = color(one.key);
    pen.lineWidth = one.key === "host" || one.key === "disk" ? 5 : 2;
    pen.setLineDash(one.key === "without" ? [4, 7] : []);
    pen.stroke();
    pen.setLineDash([]);
    if (one.key !== "device") return;
    pen.lineTo(right, toY(0));
    pen.lineTo(0, toY(0));
    pen.globalAlpha = 0.18;
    pen.fill();
    pen.globalAlpha = 1;
  }
  function drawRow(track, row, top) {
    let reached = -1;
    for (let i = Math.max(0, after(row, view.from) - 1); i < row.length && row[i][0] <= view.to; i++) {
      const slice = row[i], left = Math.max(toX(slice[0]), 0);
      const right = Math.min(Math.max(toX(slice[0] + slice[1]), left + 2), width);
      if (right < 0 || right - reached < 0.5) continue;
      const from = Math.max(left, reached), gap = right - from > 3 ? 0.75 : 0;
      pen.fillStyle = color(track.kind);
      pen.fillRect(from, top, right - from - gap, ROW - 2);
      reached = right;
      if (right - left > 28) drawName(data.texts[slice[4]], left + 4, top + ROW / 2 - 0.5, right - left - 8);
      if (slice !== pointed.slice) continue;
      pen.strokeStyle = color("text");
      pen.lineWidth = 2;
      pen.strokeRect(from + 1, top + 1, Math.max(right - from - 2, 1), ROW - 4);
    }
  }
  function drawName(text, x, y, room) {
    /* Of the path of a module its end says most. */
    const parts = text.split("."), last = parts.at(-1);
    let shown = [text, parts.slice(-2).join("."), last].find((one) => pen.measureText(one).width <= room);
    if (!shown) {
      const length = Math.floor(last.length * room / pen.measureText(last).width) - 1;
      if (length < 2) return;
      shown = last.slice(0, length) + "…";
    }
    pen.fillStyle = color("on-data");
    pen.fillText(shown, x, y);
  }

  /* -- reading ----------------------------------------------------------------------------------------------- */

  function point(x, y) {
    const at = toTime(x);
    pointed = y < MEMORY ? { time: at } : find(at, y);
    if (pointed.time !== undefined) {
      const row = data.memory[after(data.memory, at) - 1];
      const values = SERIES.map((one) => bytes(row ? row[one.column] : 0) + " " + one.name);
      reading.textContent = "at " + time(at) + ": " + values.join(", ");
    } else if (pointed.slice) {
      const [start, duration, , nbytes, ...places] = pointed.slice;
      const [name, module, operation, tier, error] = places.map((place) => data.texts[place]);
      const parts = [pointed.track.device + " " + pointed.track.name + ": " + name, time(duration) + " at " + time(start)];
      if (nbytes) parts.push(bytes(nbytes));
      parts.push(...[operation, module, tier, error].filter((text) => text && text !== name));
      reading.textContent = parts.join(" · ");
    }
    redraw();
  }
  function find(t, y) {
    const slack = (view.to - view.from) / width * 2;
    for (const track of data.tracks) {
      const row = track.rows[Math.floor((y - track.top - LABEL) / ROW)];
      if (!row) continue;
      for (let i = after(row, t + slack) - 1; i >= 0 && i > after(row, t) - 3; i--) {
        if (row[i][0] + row[i][1] >= t - slack) return { track, slice: row[i] };
      }
    }
    return {};
  }

  /* -- moving about ------------------------------------------------------------------------------------------ */

  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  }
  const look = (from, to) => {
    const span = Math.min(Math.max(to - from, SHORTEST), end);
    view.from = Math.min(Math.max(from, 0), end - span);
    view.to = view.from + span;
    redraw();
  };
  const zoom = (factor, middle = (view.from + view.to) / 2) =>
    look(middle - (middle - view.from) * factor, middle + (view.to - middle) * factor);
  const move = (part) => look(view.from + part * (view.to - view.from), view.to + part * (view.to - view.from));
  const ACTIONS = { in: () => zoom(0.5), out: () => zoom(2), left: () => move(-0.5), right: () => move(0.5), all: () => look(0, end) };
  const KEYS = { "+": "in", "=": "in", "-": "out", "−": "out", "0": "all", ArrowLeft: "left", ArrowRight: "right" };

  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", ACTIONS[button.dataset.zoom]);
  canvas.addEventListener("keydown", (event) => {
    const action = ACTIONS[KEYS[event.key]];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (event.ctrlKey || event.metaKey) zoom(1.002 ** event.deltaY, toTime(event.offsetX));
    else if (sideways) move(event.deltaX / width);
    else return;
    event.preventDefault();
  }, { passive: false });
  let held;
  canvas.addEventListener("pointerdown", (event) => {
    held = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
    point(event.offsetX, event.offsetY);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (held === undefined) {
      point(event.offsetX, event.offsetY);
      return;
    }
    move((held - event.offsetX) / width);
    held = event.offsetX;
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { held = undefined; });
  canvas.addEventListener("pointerleave", () => {
    if (held !== undefined) return;
    pointed = {};
    redraw();
  });
  canvas.addEventListener("dblclick", (event) => zoom(0.5, toTime(event.offsetX)));
  new ResizeObserver(redraw).observe(document.getElementById("drawings"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
})();
