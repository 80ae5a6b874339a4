// SPDX-License-Identifier: Apache-2.0
"use strict";
/* Timelines below each other on one scale, drawn on a canvas: zoom, pan, pick, what hides what. */

const KINDS = {
  matmul: "matmul", attention: "attention", kernel: "other kernels",
  start: "start of an exchange", wait: "waiting: exposed", exchange: "exchange on the links",
};
const ROW = 24, HEAD = 26, GAP = 14, RULER = 22, LEFT = 136;

function startTimeline(root, data) {
  root.replaceChildren();
  new TimelineView(root, data);
}

class TimelineView {
  constructor(root, data) {
    this.charts = data.charts.map((chart) => new Chart(chart));
    this.end = Math.max(1, ...this.charts.map((chart) => chart.end));
    this.from = 0;
    this.to = this.end;
    this.picked = null; // {chart, span}
    this.pinned = false;
    this.build(root);
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    themed.push(() => this.draw());
    this.describe();
  }

  build(root) {
    const button = (text, label, act) => {
      const made = make("button", { type: "button", "aria-label": label, title: label }, text);
      made.addEventListener("click", act);
      return made;
    };
    const tools = make("div", { class: "tools", role: "toolbar", "aria-label": "Zoom" },
      button("+", "Zoom in", () => this.zoom(0.5)),
      button("\u2212", "Zoom out", () => this.zoom(2)),
      button("Fit", "Show the whole step", () => this.show(0, this.end)),
      button("\u2190", "Earlier", () => this.pan(-0.25)),
      button("\u2192", "Later", () => this.pan(0.25)),
      button("Next exposed", "Go to the next wait for an exchange", () => this.nextExposed()),
    );
    this.range = make("span", { class: "count", role: "status" });
    tools.append(this.range);
    const legend = make("ul", { class: "legend" });
    for (const [kind, text] of Object.entries(KINDS)) {
      if (this.charts.some((chart) => chart.kinds.includes(kind))) {
        const swatch = make("span", { class: "swatch", style: `background: var(--${kind})` });
        legend.append(make("li", {}, swatch, text));
      }
    }
    this.overview = make("canvas", { class: "overview", "aria-hidden": "true" });
    this.canvas = make("canvas", {
      class: "chart", tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "aria-label": root.dataset.label + ". Arrow keys pick, plus and minus zoom, 0 shows all.",
    });
    this.detail = make("div", { class: "detail", role: "status", "aria-live": "polite" });
    const keys = make("p", { class: "keys" });
    keys.innerHTML = "Mouse: drag to move, wheel with <kbd>Ctrl</kbd> (or after a click) to zoom, click to keep a span. " +
      "Keyboard: <kbd>\u2190</kbd> <kbd>\u2192</kbd> next span, <kbd>\u2191</kbd> <kbd>\u2193</kbd> other lane, " +
      "<kbd>+</kbd> <kbd>\u2212</kbd> zoom, <kbd>Shift</kbd>+<kbd>\u2190</kbd> <kbd>\u2192</kbd> move, <kbd>0</kbd> all, " +
      "<kbd>e</kbd> next exposed, <kbd>Enter</kbd> zoom to the span.";
    root.append(tools, legend, this.overview, this.canvas, this.detail, keys);
  }

  listen() {
    const canvas = this.canvas;
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      this.drag = { x: event.clientX, from: this.from, to: this.to, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => {
      if (!this.pinned && !this.drag) this.pick(null);
    });
    canvas.addEventListener("dblclick", () => this.zoomToPicked());
    this.overview.addEventListener("pointerdown", (event) => {
      this.brush = this.overviewTime(event);
      this.overview.setPointerCapture(event.pointerId);
    });
    this.overview.addEventListener("pointerup", (event) => {
      const now = this.overviewTime(event), [a, b] = [Math.min(now, this.brush), Math.max(now, this.brush)];
      const half = (this.to - this.from) / 2;
      if (b - a < this.end / 200) this.show(now - half, now + half);
      else this.show(a, b);
    });
  }

  overviewTime(event) {
    const box = this.overview.getBoundingClientRect();
    return ((event.clientX - box.left - LEFT) / (box.width - LEFT - 8)) * this.end;
  }

  key(event) {
    const act = {
      "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.show(0, this.end),
      ArrowLeft: () => (event.shiftKey ? this.pan(-0.2) : this.step(-1)),
      ArrowRight: () => (event.shiftKey ? this.pan(0.2) : this.step(1)),
      ArrowUp: () => this.lane(-1), ArrowDown: () => this.lane(1),
      Home: () => this.show(0, this.to - this.from), End: () => this.show(this.end - (this.to - this.from), this.end),
      e: () => this.nextExposed(), Enter: () => this.zoomToPicked(), Escape: () => this.pick(null),
    }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  }

  wheel(event) {
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / 1000);
    } else if (event.ctrlKey || event.metaKey || document.activeElement === this.canvas) {
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 400), this.timeAt(event.offsetX));
    }
  }

  move(event) {
    if (this.drag && Math.abs(event.clientX - this.drag.x) > 3) this.drag.moved = true;
    if (this.drag && this.drag.moved) {
      const by = ((this.drag.x - event.clientX) / this.wide()) * (this.drag.to - this.drag.from);
      this.show(this.drag.from + by, this.drag.to + by);
    } else if (!this.pinned) {
      this.pick(this.hit(event.offsetX, event.offsetY));
    }
  }

  release(event) {
    if (this.drag && !this.drag.moved) {
      const hit = this.hit(event.offsetX, event.offsetY);
      this.pinned = Boolean(hit);
      this.pick(hit);
    }
    this.drag = null;
  }

  wide() {
    return Math.max(1, this.canvas.clientWidth - LEFT - 8);
  }

  timeAt(x) {
    return this.from + ((x - LEFT) / this.wide()) * (this.to - this.from);
  }

  show(from, to) {
    const least = Math.min(this.end, 1000), span = Math.min(this.end, Math.max(least, to - from));
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(0, middle - span / 2), this.end - span);
    this.to = this.from + span;
    this.draw();
  }

  zoom(factor, around) {
    const picked = this.picked && this.picked.chart.middle(this.picked.span);
    const inside = picked !== null && picked >= this.from && picked <= this.to;
    const at = around ?? (inside ? picked : (this.from + this.to) / 2);
    this.show(at - (at - this.from) * factor, at + (this.to - at) * factor);
  }

  pan(share) {
    const by = (this.to - this.from) * share;
    this.show(this.from + by, this.to + by);
  }

  hit(x, y) {
    for (const chart of this.charts) {
      const row = Math.floor((y - chart.top - HEAD) / ROW);
      if (x < LEFT || row < 0 || row >= chart.rows) continue;
      return chart.at(row, this.timeAt(x), (3 / this.wide()) * (this.to - this.from)) ?? null;
    }
    return null;
  }

  pick(found) {
    this.picked = found;
    this.describe();
    this.draw();
  }

  focusOn(chart, span) {
    this.pinned = true;
    const begin = chart.begin[span], end = begin + chart.lasts[span], wide = this.to - this.from;
    if (begin < this.from || end > this.to) {
      const middle = (begin + end) / 2;
      this.from = Math.min(Math.max(0, middle - wide / 2), this.end - wide);
      this.to = this.from + wide;
    }
    this.pick({ chart, span });
  }

  step(by) {
    if (!this.picked) return this.focusOn(this.charts.at(-1), this.charts.at(-1).firstFrom(0, this.from));
    const { chart, span } = this.picked, next = chart.neighbour(span, by);
    if (next !== null) this.focusOn(chart, next);
  }

  lane(by) {
    if (!this.picked) return this.step(1);
    const rows = this.charts.flatMap((chart) => chart.byRow.map((_, row) => ({ chart, row })));
    const { chart, span } = this.picked;
    const here = rows.findIndex((item) => item.chart === chart && item.row === chart.row[span]);
    const next = rows[here + by];
    if (next) this.focusOn(next.chart, next.chart.firstFrom(next.row, chart.middle(span)));
  }

  nextExposed() {
    const chart = this.charts.at(-1);
    const after = this.picked && this.picked.chart === chart ? chart.begin[this.picked.span] : -1;
    const waits = chart.order.filter((span) => chart.kinds[span] === "wait");
    const next = waits.find((span) => chart.begin[span] > after) ?? waits[0];
    if (next === undefined) return void (this.range.textContent = "nothing is exposed");
    this.focusOn(chart, next);
  }

  zoomToPicked() {
    if (!this.picked) return;
    const { chart, span } = this.picked, wide = Math.max(1000, chart.lasts[span]);
    this.show(chart.begin[span] - wide, chart.begin[span] + 2 * wide);
  }

  describe() {
    this.detail.replaceChildren();
    if (!this.picked) {
      this.detail.append(make("span", { class: "faint" },
        "Move over a span, or pick one with the arrow keys, to see its op, module, estimate, bytes, and what it hides."));
      return;
    }
    const { chart, span } = this.picked;
    const [title, rows] = chart.words(span);
    const swatch = make("span", { class: "swatch", style: `background: var(--${chart.kinds[span]})` });
    const list = make("dl");
    for (const [name, text] of rows) list.append(make("dt", {}, name), make("dd", {}, text));
    this.detail.append(make("b", {}, swatch, title), list);
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    const style = getComputedStyle(document.documentElement);
    const known = {};
    const color = (name) => (known[name] ??= style.getPropertyValue("--" + name).trim());
    let top = RULER;
    for (const chart of this.charts) {
      chart.top = top;
      top += HEAD + chart.rows * ROW + GAP;
    }
    const pen = this.pen(this.canvas, top);
    if (!pen) return;
    this.ruler(pen, color, top);
    for (const chart of this.charts) {
      const picked = this.picked && this.picked.chart === chart ? this.picked.span : -1;
      chart.paint(pen, color, this, picked, picked < 0 ? new Set() : chart.related(picked));
    }
    this.paintOverview(color);
    this.range.textContent = `${time(this.from)} to ${time(this.to)} of ${time(this.end)}`;
  }

  pen(canvas, high) {
    const wide = canvas.clientWidth, ratio = window.devicePixelRatio || 1;
    if (!wide) return null;
    canvas.style.height = high + "px";
    if (canvas.width !== Math.round(wide * ratio) || canvas.height !== Math.round(high * ratio)) {
      canvas.width = Math.round(wide * ratio);
      canvas.height = Math.round(high * ratio);
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, wide, high);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    return pen;
  }

  ruler(pen, color, high) {
    const span = this.to - this.from;
    let step = 10 ** Math.floor(Math.log10(span / 6));
    step *= span / step > 30 ? 5 : span / step > 12 ? 2 : 1;
    pen.lineWidth = 1;
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      const x = LEFT + ((at - this.from) / span) * this.wide();
      pen.strokeStyle = color("line");
      pen.beginPath();
      pen.moveTo(x, RULER - 4);
      pen.lineTo(x, high);
      pen.stroke();
      pen.fillStyle = color("muted");
      pen.textAlign = "center";
      if (x < this.canvas.clientWidth - 24) pen.fillText(time(at), x, RULER / 2 - 1);
    }
    pen.textAlign = "left";
  }

  paintOverview(color) {
    const high = 26, pen = this.pen(this.overview, high), wide = this.overview.clientWidth - LEFT - 8;
    if (!pen) return;
    const chart = this.charts.at(-1), scale = wide / this.end;
    pen.fillStyle = color("muted");
    pen.fillText("whole step", 8, high / 2);
    pen.fillStyle = color("kernel");
    pen.globalAlpha = 0.45;
    pen.fillRect(LEFT, 8, chart.step * scale, 10);
    pen.globalAlpha = 1;
    pen.fillStyle = color("wait-edge");
    chart.begin.forEach((begin, span) => {
      if (chart.kinds[span] === "wait") pen.fillRect(LEFT + begin * scale, 8, Math.max(1, chart.lasts[span] * scale), 10);
    });
    pen.strokeStyle = color("focus");
    pen.lineWidth = 2;
    pen.strokeRect(LEFT + this.from * scale, 3, Math.max(3, (this.to - this.from) * scale), high - 6);
  }
}
