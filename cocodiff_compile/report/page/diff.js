// SPDX-License-Identifier: Apache-2.0
"use strict";
/* The graph after each pass, compared with the one before: only the lines in sight are elements. */

const LINE = 20, CONTEXT = 3;
const MARKS = { "+": "added", "-": "removed", ">": "here", "<": "away" };
const SHOWN = { "+": "+", "-": "\u2212", ">": "\u21b3", "<": "\u21b0", "=": " " };

function startDiff(root, data) {
  for (const stage of data.stages) {
    let at = 0;
    stage.lines = stage.lines.map((step) => (at += step));
  }
  root.replaceChildren();
  new DiffLines(root, data);
}

class DiffLines {
  constructor(root, data) {
    this.data = data;
    this.build(root);
    this.choose(Math.min(1, data.stages.length - 1));
  }

  build(root) {
    this.select = make("select", { "aria-label": "Stage" });
    this.data.stages.forEach((stage, at) => {
      const changes = at ? `: +${stage.added} \u2212${stage.removed}, ${stage.moved} moved` : `: ${stage.lines.length} lines`;
      this.select.append(make("option", { value: at }, stage.name + changes));
    });
    this.select.addEventListener("change", () => this.choose(Number(this.select.value)));
    this.input = make("input", { type: "search", placeholder: "node, op, module", "aria-label": "Search the graph" });
    this.input.addEventListener("input", () => this.search());
    this.input.addEventListener("keydown", (event) => event.key === "Enter" && this.next(event.shiftKey ? -1 : 1));
    const button = (text, act) => {
      const made = make("button", { type: "button" }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.unfold = button("Unfold all", () => this.foldAll());
    this.status = make("span", { class: "count", role: "status" });
    const tools = make("div", { class: "tools" },
      make("label", {}, "Stage ", this.select), make("label", {}, "Search ", this.input),
      button("Previous", () => this.next(-1)), button("Next", () => this.next(1)), this.unfold, this.status);
    this.window = make("div", { class: "window" });
    this.sizer = make("div", { class: "sizer" }, this.window);
    this.view = make("div", { class: "lines", tabindex: "0", role: "region", "aria-label": root.dataset.label }, this.sizer);
    this.view.addEventListener("scroll", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(this.view);
    root.append(tools, this.view);
  }

  choose(at) {
    this.select.value = at;
    this.stage = this.data.stages[at];
    this.isWhole = at === 0;
    this.open = new Set();
    this.found = new Set();
    this.current = -1;
    this.layOut();
    this.view.scrollTop = 0;
    if (this.input.value) this.search();
    else this.tell("");
  }

  /* Rows in sight: numbers of lines, or {from, to} for lines that are folded. */
  layOut() {
    const { marks } = this.stage, rows = [];
    const near = new Uint8Array(marks.length);
    for (let at = 0; at < marks.length; at++) {
      const changed = marks[at] !== "=" || this.found.has(at);
      if (!this.isWhole && changed) near.fill(1, Math.max(0, at - CONTEXT), Math.min(marks.length, at + CONTEXT + 1));
    }
    for (let at = 0; at < marks.length; ) {
      if (this.isWhole || near[at]) {
        rows.push(at++);
        continue;
      }
      const from = at;
      while (at < marks.length && !near[at]) at++;
      if (this.open.has(from) || at - from < 3) for (let line = from; line < at; line++) rows.push(line);
      else rows.push({ from, to: at });
    }
    this.rows = rows;
    this.sizer.style.height = rows.length * LINE + "px";
    this.unfold.textContent = this.isWhole ? "Fold" : "Unfold all";
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  paint() {
    const first = Math.max(0, Math.floor(this.view.scrollTop / LINE) - 10);
    const count = Math.ceil(this.view.clientHeight / LINE) + 20;
    const focus = document.activeElement && document.activeElement.dataset.from;
    this.window.style.top = first * LINE + "px";
    this.window.replaceChildren(...this.rows.slice(first, first + count).map((row) => this.element(row)));
    if (focus) $(`[data-from="${focus}"]`, this.window)?.focus({ preventScroll: true });
  }

  element(row) {
    if (typeof row === "object") {
      const text = `  \u22ef ${row.to - row.from} unchanged lines, in ${this.between(row)}`;
      const button = make("button", { type: "button", class: "fold", "data-from": row.from }, text);
      button.addEventListener("click", () => {
        this.open.add(row.from);
        this.layOut();
      });
      return button;
    }
    const mark = this.stage.marks[row], line = this.stage.lines[row];
    const names = ["line", MARKS[mark], this.found.has(row) && "found", row === this.hits?.[this.current] && "current"];
    const parts = [make("span", { class: "mark" }, SHOWN[mark]), make("span", {}, this.data.text[line])];
    const module = this.data.modules[this.data.module[line]];
    if (module) parts.push(make("span", { class: "at" }, module));
    return make("div", { class: names.filter(Boolean).join(" "), "data-row": row }, ...parts);
  }

  between(row) {
    const at = (line) => this.data.modules[this.data.module[this.stage.lines[line]]];
    const [from, to] = [at(row.from), at(row.to - 1)];
    return from === to ? from || "no module" : `${from || "the inputs"} to ${to || "the outputs"}`;
  }

  search() {
    const words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    const { text, module, modules } = this.data;
    this.hits = [];
    if (words.length) {
      const holds = text.map((own, line) => {
        const whole = (own + " " + modules[module[line]]).toLowerCase();
        return words.every((word) => whole.includes(word));
      });
      this.stage.lines.forEach((line, at) => holds[line] && this.hits.push(at));
    }
    this.found = new Set(this.hits.length <= 2000 ? this.hits : this.hits.slice(0, 2000));
    this.current = -1;
    this.layOut();
    if (words.length) this.next(1);
    else this.tell("");
  }

  next(by) {
    if (!this.hits || !this.hits.length) return this.tell(this.input.value ? "nothing found" : "");
    this.current = (this.current + by + this.hits.length) % this.hits.length;
    if (this.current >= 2000) this.current = by > 0 ? 0 : Math.min(this.hits.length, 2000) - 1;
    const row = this.rows.indexOf(this.hits[this.current]);
    if (row >= 0) this.view.scrollTop = Math.max(0, row * LINE - this.view.clientHeight / 2);
    this.tell(`${this.current + 1} of ${this.hits.length} found`);
    this.draw();
  }

  foldAll() {
    this.isWhole = !this.isWhole;
    this.open.clear();
    this.layOut();
  }

  tell(text) {
    const changed = this.stage.marks.replaceAll("=", "").length;
    this.status.textContent = text || (changed ? `${changed} of ${this.stage.marks.length} lines changed or moved` : `${this.stage.marks.length} lines`);
  }
}
