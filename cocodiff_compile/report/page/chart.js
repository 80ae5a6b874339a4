// SPDX-License-Identifier: Apache-2.0
"use strict";
/* One timeline: its spans in rows, found by time, and what each of them hides. */

class Chart {
  constructor(data) {
    this.data = data;
    this.tasks = data.tasks;
    this.begin = data.spans.at;
    this.lasts = data.spans.for;
    this.kinds = data.spans.kind;
    this.lanes = data.spans.lane;
    this.task = data.spans.task;
    this.step = data.step_ns;
    this.end = this.begin.reduce((end, begin, span) => Math.max(end, begin + this.lasts[span]), data.step_ns);
    this.exposed = new Map(data.exchanges.map((item) => [item.task, item.exposed_ns]));
    this.queued = new Map(data.exchanges.map((item) => [item.task, item.queued_ns]));
    this.spanOf = new Map();
    this.kinds.forEach((kind, span) => kind === "exchange" && this.spanOf.set(this.task[span], span));
    this.place();
    this.order = this.begin.map((_, span) => span).sort((a, b) => this.begin[a] - this.begin[b]);
  }

  /* Puts spans of a lane that overlap into rows of their own. */
  place() {
    this.row = [];
    this.byRow = [];
    this.titles = [];
    let first = 0;
    this.data.lanes.forEach((name, lane) => {
      const ends = [0];
      this.begin.forEach((begin, span) => {
        if (this.lanes[span] !== lane) return;
        let row = ends.findIndex((end) => end <= begin + 1);
        if (row < 0) row = ends.length < 3 ? ends.push(0) - 1 : 2;
        ends[row] = begin + this.lasts[span];
        this.row[span] = first + row;
        (this.byRow[first + row] ??= []).push(span);
      });
      this.titles[first] = name;
      first += ends.length;
    });
    this.rows = first;
    for (let row = 0; row < first; row++) this.byRow[row] ??= [];
  }

  middle(span) {
    return this.begin[span] + this.lasts[span] / 2;
  }

  /* The place in a row of the first span that ends after a time. */
  search(row, time) {
    const spans = this.byRow[row];
    let low = 0, high = spans.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.begin[spans[middle]] + this.lasts[spans[middle]] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  at(row, time, near) {
    const spans = this.byRow[row];
    let best = null;
    for (let at = this.search(row, time - near); at < spans.length && this.begin[spans[at]] <= time + near; at++) {
      const span = spans[at];
      const off = Math.max(0, this.begin[span] - time, time - this.begin[span] - this.lasts[span]);
      if (best === null || off < best.off) best = { chart: this, span, off };
    }
    return best && { chart: this, span: best.span };
  }

  firstFrom(row, time) {
    const spans = this.byRow[row];
    return spans[Math.min(this.search(row, time), spans.length - 1)];
  }

  neighbour(span, by) {
    const spans = this.byRow[this.row[span]];
    return spans[spans.indexOf(span) + by] ?? null;
  }

  isWork(span) {
    return ["matmul", "attention", "kernel"].includes(this.kinds[span]);
  }

  /* What runs beside a span on the other side, the longest first: [span, shared time]. */
  beside(span) {
    const begin = this.begin[span], end = begin + this.lasts[span];
    const wanted = this.kinds[span] === "exchange" ? (other) => this.isWork(other) : (other) => this.kinds[other] === "exchange";
    const found = [];
    this.byRow.forEach((spans, row) => {
      for (let at = this.search(row, begin); at < spans.length && this.begin[spans[at]] < end; at++) {
        const other = spans[at];
        const shared = Math.min(end, this.begin[other] + this.lasts[other]) - Math.max(begin, this.begin[other]);
        if (wanted(other) && shared > Math.min(this.lasts[span], this.lasts[other]) / 500) found.push([other, shared]);
      }
    });
    return found.sort((a, b) => b[1] - a[1]);
  }

  /* The exchange that a wait or a start belongs to. */
  exchangeOf(span) {
    const task = this.task[span];
    if (this.kinds[span] === "wait") return this.spanOf.get(this.tasks.of[task]);
    return this.kinds[span] === "start" ? this.spanOf.get(task) : undefined;
  }

  related(span) {
    const exchange = this.exchangeOf(span);
    if (exchange !== undefined) return new Set([exchange, ...this.beside(exchange).map((item) => item[0])]);
    return new Set(this.beside(span).map((item) => item[0]));
  }

  called(span) {
    const task = this.task[span], role = this.tasks.role[task];
    const what = role ? `${role} ` : "";
    return `${what}${this.tasks.name[task]}${this.tasks.module[task] ? " in " + this.tasks.module[task] : ""}`;
  }

  listed(found) {
    const some = found.slice(0, 6).map(([other, shared]) => `${this.called(other)}: ${time(shared)}`);
    if (found.length > 6) some.push(`and ${found.length - 6} more`);
    return some.join("; ");
  }

  words(span) {
    const task = this.task[span], tasks = this.tasks, kind = this.kinds[span], rows = [];
    rows.push(["op", `${tasks.op[task]} \u2192 ${tasks.value[task]}`]);
    if (tasks.module[task]) rows.push(["module", tasks.module[task]]);
    const light = this.isWork(span) && tasks.light_ns[task] ? ` (light kernels that feed it: ${time(tasks.light_ns[task])})` : "";
    rows.push(["estimate", `${time(this.lasts[span])}${light}, from ${time(this.begin[span])}`]);
    if (tasks.bytes[task]) rows.push(["sends", size(tasks.bytes[task])]);
    if (this.isWork(span)) {
      rows.push(["hides", this.listed(this.beside(span)) || "no exchange: the links are idle meanwhile"]);
      return [tasks.name[task], rows];
    }
    const exchange = kind === "exchange" ? span : this.exchangeOf(span);
    if (exchange === undefined) return [tasks.name[task], rows];
    const exposed = this.exposed.get(this.task[exchange]) || 0;
    if (kind !== "exchange") rows.push(["exchange", `${this.called(exchange)}: ${time(this.lasts[exchange])} on the links, ${size(tasks.bytes[this.task[exchange]])}`]);
    const queued = this.queued.get(this.task[exchange]);
    if (queued > 0) rows.push(["queued", `${time(queued)}, until other exchanges left its links`]);
    rows.push(["hides behind", this.listed(this.beside(exchange)) || "nothing"]);
    rows.push(["exposed", exposed ? `${time(exposed)}: the rank stands still` : "not at all"]);
    return [`${kind === "wait" ? "waits for " : ""}${this.called(exchange)}`, rows];
  }

  paint(pen, color, view, picked, related) {
    const wide = view.wide(), scale = wide / (view.to - view.from);
    pen.fillStyle = color("ink");
    pen.font = "600 12px system-ui, sans-serif";
    pen.fillText(this.data.title, 8, this.top + 11);
    const beside = Math.max(LEFT + 90, 24 + pen.measureText(this.data.title).width);
    pen.font = "12px system-ui, sans-serif";
    pen.fillStyle = color("muted");
    const figures = `${time(this.step)} a step, ${time(this.data.exposed_ns)} exposed`;
    pen.fillText(figures, beside, this.top + 11);
    this.titles.forEach((title, row) => {
      const y = this.top + HEAD + row * ROW + ROW / 2;
      pen.fillStyle = color("muted");
      pen.fillText(title.length > 20 ? title.slice(0, 19) + "\u2026" : title, 8, y);
    });
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, this.top, wide, HEAD + this.rows * ROW);
    pen.clip();
    for (let row = 0; row < this.rows; row++) this.paintRow(pen, color, view, row, scale, picked, related);
    pen.restore();
  }

  paintRow(pen, color, view, row, scale, picked, related) {
    const y = this.top + HEAD + row * ROW + 2, high = ROW - 4, spans = this.byRow[row];
    let done = -1; // the pixel up to which something too small to be seen was drawn
    for (let at = this.search(row, view.from); at < spans.length && this.begin[spans[at]] <= view.to; at++) {
      const span = spans[at], x = LEFT + (this.begin[span] - view.from) * scale, wide = this.lasts[span] * scale;
      const marked = span === picked || related.has(span);
      if (wide < 1 && x < done && !marked) continue;
      done = Math.max(done, Math.floor(x) + 1);
      const shown = Math.max(1, wide - (wide > 3 ? 1 : 0)), kind = this.kinds[span];
      pen.globalAlpha = picked >= 0 && !marked ? 0.5 : 1;
      pen.fillStyle = color(kind);
      pen.fillRect(x, y, shown, high);
      if (kind === "wait") {
        pen.fillStyle = color("wait-edge");
        pen.fillRect(x, y, Math.min(shown, 2), high);
        pen.fillRect(x, y + high - 3, shown, 3);
      }
      if (marked) {
        pen.strokeStyle = color(span === picked ? "focus" : "ink");
        pen.lineWidth = span === picked ? 2 : 1;
        pen.strokeRect(x + 0.5, y + 0.5, Math.max(2, shown - 1), high - 1);
      }
      if (wide > 13) this.label(pen, color, span, Math.max(x, LEFT), y + high / 2, x + wide);
    }
    pen.globalAlpha = 1;
  }

  label(pen, color, span, x, y, end) {
    const task = this.task[span], room = end - x - 10, role = this.tasks.role[task];
    const module = this.tasks.module[task].split(".").slice(role || this.kinds[span] === "attention" ? -2 : -3).join(".");
    const full = [role, module || this.tasks.name[task]].filter(Boolean).join(" ");
    const letters = Math.floor(room / 6.4);
    const short = letters < role.length + 3 ? role : full.slice(0, letters - 1) + "\u2026";
    const text = full.length <= letters ? full : short;
    if (!text || text.length * 5 > room + 8) return;
    const pale = ["wait", "kernel", "start", "exchange"].includes(this.kinds[span]);
    pen.fillStyle = this.kinds[span] === "wait" ? color("ink") : pale ? "#1b1206" : "#ffffff";
    pen.font = "11px system-ui, sans-serif";
    pen.fillText(text, x + 5, y);
    pen.font = "12px system-ui, sans-serif";
  }
}
