// SPDX-License-Identifier: Apache-2.0
"use strict";
/* A square for each row and column, the darker the more; the value is told for the one pointed at. */

const CELL = 14, NAMES = 230, TOP = 18;

function startHeatMap(root, data) {
  root.replaceChildren();
  new HeatMapView(root, data);
}

class HeatMapView {
  constructor(root, data) {
    this.data = data;
    this.most = Math.max(...data.values.flat().filter((value) => value !== null), 0) || 1;
    this.at = null;
    this.canvas = make("canvas", {
      tabindex: "0", role: "application", "aria-roledescription": "map", "aria-label": root.dataset.label + ". Arrow keys pick.",
    });
    this.said = make("p", { class: "count", role: "status" }, "Point at a square, or pick one with the arrow keys.");
    root.append(make("div", { class: "scroll" }, this.canvas), this.said);
    this.canvas.addEventListener("pointermove", (event) => {
      this.pick(Math.floor((event.offsetX - NAMES) / CELL), Math.floor((event.offsetY - TOP) / CELL));
    });
    this.canvas.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!by) return;
      event.preventDefault();
      const [x, y] = this.at ?? [-by[0], -by[1]];
      this.pick(x + by[0], y + by[1]);
    });
    themed.push(() => this.draw());
    this.draw();
  }

  pick(x, y) {
    if (!this.data.values[y] || this.data.values[y][x] === undefined) return;
    this.at = [x, y];
    const value = this.data.values[y][x], what = value === null ? "not measured" : `${Number((value * 100).toPrecision(3))} % ${this.data.word}`;
    this.said.textContent = `${this.data.rows[y]}, ${this.data.column} ${this.data.columns[x]}: ${what}`;
    this.draw();
  }

  draw() {
    const { rows, columns, values } = this.data, ratio = window.devicePixelRatio || 1;
    const wide = NAMES + columns.length * CELL + 12, high = TOP + rows.length * CELL + 6;
    Object.assign(this.canvas, { width: wide * ratio, height: high * ratio });
    Object.assign(this.canvas.style, { width: wide + "px", height: high + "px" });
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue("--" + name).trim();
    pen.scale(ratio, ratio);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.fillStyle = color("muted");
    columns.forEach((name, x) => x % 5 || pen.fillText(name, NAMES + x * CELL, TOP / 2));
    rows.forEach((name, y) => {
      pen.fillStyle = color("ink");
      pen.fillText(name.length > 36 ? "\u2026" + name.slice(-35) : name, 8, TOP + y * CELL + CELL / 2);
      values[y].forEach((value, x) => {
        pen.globalAlpha = value === null ? 0.15 : 0.06 + 0.94 * (value / this.most) ** this.data.power;
        pen.fillStyle = color(value === null ? "muted" : this.data.color);
        pen.fillRect(NAMES + x * CELL, TOP + y * CELL, CELL - 1, value === null ? 1 : CELL - 1);
      });
      pen.globalAlpha = 1;
    });
    if (!this.at) return;
    pen.strokeStyle = color("focus");
    pen.lineWidth = 2;
    pen.strokeRect(NAMES + this.at[0] * CELL - 1, TOP + this.at[1] * CELL - 1, CELL + 1, CELL + 1);
  }
}
