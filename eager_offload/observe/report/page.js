"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const told = document.getElementById("told");
  const end = Math.max(data.end, 1);
  const view = { from: 0, to: end };
  /* In the order in which they are drawn: a dashed line lets those under it show. */
  const SERIES = [
    { key: "host", name: "in host memory", column: 2 },
    { key: "disk", name: "on disk", column: 3 },
    { key: "device", name: "on the device", column: 1 },
    { key: "without", name: "without offload", column: 4 },
  ];
  const AXIS = 22, LABEL = 18, ROW = 16, GAP = 8, SHORTEST = 5;

  const bytes = (n) => {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (n < 1024) return (unit === "B" ? n : n.toFixed(1)) + " " + unit;
      n /= 1024;
    }
    return n.toFixed(1) + " TiB";
  };
  const time = (us) => us >= 1e6 ? (us / 1e6).toFixed(3) + " s" : us >= 1e3 ? (us / 1e3).toFixed(2) + " ms" : us.toFixed(1) + " µs";
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  /* The first place in sorted rows whose time (column 0) is later than t. */
  const after = (rows, t) => {
    let low = 0, high = rows.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rows[middle][0] > t) high = middle; else low = middle + 1;
    }
    return low;
  };

  class Drawing {
    constructor(id, height) {
      this.canvas = document.getElementById(id);
      this.height = height;
      this.context = this.canvas.getContext("2d");
      this.canvas.style.height = height + "px";
    }
    begin() {
      const scale = window.devicePixelRatio || 1;
      this.width = this.canvas.clientWidth;
      this.canvas.width = Math.round(this.width * scale);
      this.canvas.height = Math.round(this.height * scale);
      const pen = this.context;
      pen.setTransform(scale, 0, 0, scale, 0, 0);
      pen.font = "12px system-ui, sans-serif";
      pen.textBaseline = "middle";
      return pen;
    }
    x(us) { return (us - view.from) / (view.to - view.from) * this.width; }
    at(x) { return view.from + x / this.width * (view.to - view.from); }
    axis(pen) {
      const y = this.height - AXIS, most = Math.min(Math.max(2, Math.floor(this.width / 60)), 12);
      const rough = (view.to - view.from) / most, power = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 5, 10].find((n) => n * power >= rough) * power;
      const unit = view.to >= 1e6 ? [1e6, "s"] : view.to >= 1e3 ? [1e3, "ms"] : [1, "µs"];
      const digits = Math.max(0, -Math.floor(Math.log10(step / unit[0]) + 1e-9));
      pen.strokeStyle = color("line");
      pen.lineWidth = 1;
      pen.fillStyle = color("muted");
      for (let t = Math.ceil(view.from / step) * step; t <= view.to; t += step) {
        const x = Math.round(this.x(t)) + 0.5, text = (t / unit[0]).toFixed(digits) + " " + unit[1];
        pen.beginPath();
        pen.moveTo(x, 0);
        pen.lineTo(x, y + 4);
        pen.stroke();
        const half = pen.measureText(text).width / 2;
        pen.textAlign = "left";
        pen.fillText(text, Math.min(Math.max(x - half, 0), this.width - 2 * half), y + 13);
      }
    }
  }

  /* -- memory ------------------------------------------------------------------------------------------------ */

  class Memory extends Drawing {
    constructor() {
      super("memory", 220);
      this.shown = SERIES.filter((one) => data.memory.some((row) => row[one.column] > 0));
      this.most = Math.max(1, ...this.shown.map((one) => data.memory.reduce((a, row) => Math.max(a, row[one.column]), 0)));
      this.canvas.dataset.samples = data.memory.length;
    }
    y(n) { return this.height - AXIS - n / this.most * (this.height - AXIS - 24); }
    draw() {
      const pen = this.begin();
      this.axis(pen);
      this.grid(pen);
      for (const one of this.shown) this.line(pen, one);
      if (this.pointed !== undefined) {
        pen.strokeStyle = color("text");
        pen.lineWidth = 1;
        pen.beginPath();
        pen.moveTo(this.x(this.pointed), 0);
        pen.lineTo(this.x(this.pointed), this.height - AXIS);
        pen.stroke();
      }
    }
    grid(pen) {
      let step = 2 ** Math.floor(Math.log2(this.most / 3));
      if (this.most / step > 5) step *= 2;
      pen.strokeStyle = color("line");
      pen.textAlign = "left";
      for (let n = 0; n <= this.most; n += step) {
        const y = Math.round(this.y(n)) + 0.5;
        pen.beginPath();
        pen.moveTo(0, y);
        pen.lineTo(this.width, y);
        pen.stroke();
        if (n > 0) {
          const text = bytes(n);
          pen.fillStyle = color("card");
          pen.fillRect(0, y - 16, pen.measureText(text).width + 4, 15);
          pen.fillStyle = color("muted");
          pen.fillText(text, 0, y - 8);
        }
      }
    }
    line(pen, one) {
      const rows = data.memory, first = Math.max(0, after(rows, view.from) - 1);
      pen.beginPath();
      let y = this.y(0), x = 0;
      pen.moveTo(0, first < rows.length && rows[first][0] <= view.from ? this.y(rows[first][one.column]) : y);
      for (let i = first; i < rows.length && rows[i][0] <= view.to; i++) {
        x = Math.max(0, this.x(rows[i][0]));
        if (rows[i][0] > view.from) pen.lineTo(x, y);
        y = this.y(rows[i][one.column]);
        pen.lineTo(x, y);
      }
      pen.lineTo(this.x(Math.min(end, view.to)), y);
      pen.strokeStyle = color(one.key);
      pen.lineWidth = 2;
      pen.setLineDash(one.key === "without" ? [4, 7] : []);
      pen.stroke();
      pen.setLineDash([]);
      if (one.key === "device") {
        pen.lineTo(this.x(Math.min(end, view.to)), this.y(0));
        pen.lineTo(0, this.y(0));
        pen.globalAlpha = 0.18;
        pen.fillStyle = color(one.key);
        pen.fill();
        pen.globalAlpha = 1;
      }
    }
    point(x) {
      this.pointed = this.at(x);
      const row = data.memory[after(data.memory, this.pointed) - 1];
      const values = this.shown.map((one) => bytes(row ? row[one.column] : 0) + " " + one.name);
      told.textContent = "at " + time(this.pointed) + ": " + values.join(", ");
      this.draw();
    }
    leave() {
      this.pointed = undefined;
      this.draw();
    }
  }

  /* -- timeline ---------------------------------------------------------------------------------------------- */

  class Timeline extends Drawing {
    constructor() {
      let top = 0;
      for (const track of data.tracks) {
        track.top = top;
        top += LABEL + track.depth * ROW + GAP;
        /* Slices of one depth do not overlap, so that they can be searched by time. */
        track.rows = Array.from({ length: track.depth }, () => []);
        for (const slice of track.slices) track.rows[slice[2]].push(slice);
      }
      super("timeline", top + AXIS);
      this.several = new Set(data.tracks.map((track) => track.device)).size > 1;
      this.canvas.dataset.tracks = data.tracks.length;
      this.canvas.dataset.slices = data.tracks.reduce((n, track) => n + track.slices.length, 0);
    }
    draw() {
      const pen = this.begin();
      this.axis(pen);
      for (const track of data.tracks) {
        const name = (this.several ? track.device + " · " : "") + track.name;
        pen.textAlign = "left";
        pen.fillStyle = color("card");
        pen.fillRect(0, track.top, pen.measureText(name).width + 4, LABEL);
        pen.fillStyle = color("text");
        pen.fillText(name, 0, track.top + LABEL / 2 + 1);
        track.rows.forEach((row, depth) => this.row(pen, track, row, track.top + LABEL + depth * ROW));
      }
    }
    row(pen, track, row, top) {
      const fill = color(track.kind), ink = color("on-data");
      let reached = -1;
      for (let i = Math.max(0, after(row, view.from) - 1); i < row.length && row[i][0] <= view.to; i++) {
        const slice = row[i], left = Math.max(this.x(slice[0]), 0);
        const right = Math.min(Math.max(this.x(slice[0] + slice[1]), left + 2), this.width);
        if (right < 0 || right - reached < 0.5) continue;
        const from = Math.max(left, reached), gap = right - from > 3 ? 0.75 : 0;
        pen.fillStyle = fill;
        pen.fillRect(from, top, right - from - gap, ROW - 2);
        reached = right;
        if (right - left > 28) this.write(pen, data.texts[slice[4]], left + 4, top + ROW / 2 - 0.5, right - left - 8, ink);
        if (slice === this.pointed) {
          pen.strokeStyle = color("text");
          pen.lineWidth = 2;
          pen.strokeRect(from + 1, top + 1, Math.max(right - from - 2, 1), ROW - 4);
        }
      }
    }
    write(pen, text, x, y, width, ink) {
      /* Of the path of a module its end tells most. */
      const parts = text.split(".");
      const fits = (shown) => pen.measureText(shown).width <= width;
      let shown = [text, parts.slice(-2).join("."), parts.at(-1)].find(fits);
      if (!shown) {
        const last = parts.at(-1), length = Math.floor(last.length * width / pen.measureText(last).width) - 1;
        if (length < 2) return;
        shown = last.slice(0, length) + "…";
      }
      pen.fillStyle = ink;
      pen.fillText(shown, x, y);
    }
    find(x, y) {
      for (const track of data.tracks) {
        const depth = Math.floor((y - track.top - LABEL) / ROW);
        if (depth < 0 || depth >= track.depth) continue;
        const row = track.rows[depth], slack = (view.to - view.from) / this.width * 2, t = this.at(x);
        for (let i = after(row, t + slack) - 1; i >= 0 && i > after(row, t) - 3; i--) {
          if (row[i][0] + row[i][1] >= t - slack) return [track, row[i]];
        }
      }
      return [undefined, undefined];
    }
    point(x, y) {
      const [track, slice] = this.find(x, y);
      if (slice !== this.pointed) {
        this.pointed = slice;
        this.draw();
      }
      if (!slice) return;
      const [start, duration, , nbytes, name, module, operation, tier, error] = slice;
      const parts = [track.device + " " + track.name + ": " + data.texts[name], time(duration) + " at " + time(start)];
      if (nbytes) parts.push(bytes(nbytes));
      for (const place of [operation, module, tier, error]) {
        if (data.texts[place] && data.texts[place] !== data.texts[name]) parts.push(data.texts[place]);
      }
      told.textContent = parts.join(" · ");
    }
    leave() {
      this.pointed = undefined;
      this.draw();
    }
  }

  /* -- moving about ------------------------------------------------------------------------------------------ */

  const drawings = [new Memory(), new Timeline()];
  let waiting = false;
  const redraw = () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      for (const one of drawings) one.draw();
      document.documentElement.dataset.view = view.from + " " + view.to;
    });
  };
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

  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", ACTIONS[button.dataset.zoom]);
  }
  for (const drawing of drawings) {
    const canvas = drawing.canvas;
    let held;
    canvas.addEventListener("keydown", (event) => {
      const action = ACTIONS[KEYS[event.key]];
      if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      action();
    });
    canvas.addEventListener("wheel", (event) => {
      if (event.ctrlKey || event.metaKey) {
        event.preventDefault();
        zoom(1.002 ** event.deltaY, drawing.at(event.offsetX));
      } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        event.preventDefault();
        move(event.deltaX / drawing.width);
      }
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      held = event.offsetX;
      canvas.setPointerCapture(event.pointerId);
      drawing.point(event.offsetX, event.offsetY);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (held === undefined) {
        drawing.point(event.offsetX, event.offsetY);
        return;
      }
      move((held - event.offsetX) / drawing.width);
      held = event.offsetX;
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { held = undefined; });
    canvas.addEventListener("pointerleave", () => { if (held === undefined) drawing.leave(); });
    canvas.addEventListener("dblclick", (event) => zoom(0.5, drawing.at(event.offsetX)));
  }
  new ResizeObserver(redraw).observe(document.getElementById("drawings"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
})();
