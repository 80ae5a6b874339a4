// SPDX-License-Identifier: Apache-2.0
"use strict";
/* What every part of the page shares: data, themes, folding, groups. */

const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

function make(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

async function unpack(name) {
  const text = document.getElementById(name).textContent;
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

function time(ns) {
  if (ns >= 1e9) return (ns / 1e9).toFixed(2) + " s";
  return ns >= 1e6 ? (ns / 1e6).toFixed(2) + " ms" : (ns / 1e3).toFixed(1) + " us";
}

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let at = 0;
  for (; bytes >= 1024 && at < 3; at++) bytes /= 1024;
  return (at ? bytes.toFixed(1) : bytes) + " " + units[at];
}

const themed = []; // what is drawn anew when colors change

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  const button = $("#theme");
  button.setAttribute("aria-pressed", String(theme === "dark"));
  button.textContent = theme === "dark" ? "Light" : "Dark";
  for (const draw of themed) draw();
}

function remembered(value) {
  try {
    if (value) localStorage.setItem("cocodiff-theme", value);
    return localStorage.getItem("cocodiff-theme");
  } catch {
    return null; // a page opened from a folder may have no storage
  }
}

function startTheme() {
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  setTheme(remembered() || (preferred.matches ? "dark" : "light"));
  preferred.addEventListener("change", (event) => {
    if (!remembered()) setTheme(event.matches ? "dark" : "light");
  });
  $("#theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    setTheme(theme);
    remembered(theme);
  });
}

const shown = () => $$("details.section").filter((section) => !section.closest("[hidden]"));

function startFolding() {
  const button = $("#fold");
  const name = () => {
    button.textContent = shown().some((section) => section.open) ? "Fold all" : "Unfold all";
  };
  button.addEventListener("click", () => {
    const open = !shown().some((section) => section.open);
    for (const section of shown()) section.open = open;
  });
  for (const section of $$("details.section")) section.addEventListener("toggle", name);
  document.addEventListener("click", (event) => {
    const link = event.target.closest("nav a");
    if (link) openAt(link.hash);
  });
  if (location.hash) openAt(location.hash);
}

function openAt(hash) {
  const section = document.getElementById(decodeURIComponent(hash.slice(1)));
  if (section && section.tagName === "DETAILS") section.open = true;
}

function startPicker() {
  const picker = $("#picker");
  if (!picker) return;
  picker.addEventListener("change", () => {
    for (const item of $$("[data-group]")) item.hidden = item.dataset.group !== picker.value;
    wake();
  });
}

/* Timelines and diffs are unpacked when their section is first looked at. */
const sleeping = new Map();

function wakes(element, start) {
  sleeping.set(element, start);
}

function wake() {
  for (const [element, start] of sleeping) {
    const section = element.closest("details.section");
    if (element.closest("[hidden]") || (section && !section.open)) continue;
    sleeping.delete(element);
    unpack(element.dataset.blob).then(
      (data) => start(element, data),
      (error) => (element.textContent = "This browser cannot unpack the data: " + error),
    );
  }
}

function startPrinting() {
  let folded = [];
  let theme = "";
  addEventListener("beforeprint", () => {
    folded = shown().filter((section) => !section.open && section.dataset.print !== "no");
    for (const section of folded) section.open = true;
    theme = document.documentElement.dataset.theme;
    setTheme("light");
  });
  addEventListener("afterprint", () => {
    for (const section of folded) section.open = false;
    setTheme(theme);
  });
}

function startNavigation() {
  const links = new Map($$("nav a").map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watch = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) seen[entry.isIntersecting ? "add" : "delete"](entry.target.id);
      const first = shown().find((section) => seen.has(section.id));
      for (const [id, link] of links) {
        if (first && id === first.id) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    },
    { rootMargin: "-80px 0px -40% 0px" },
  );
  for (const section of $$("details.section")) watch.observe(section);
}

addEventListener("DOMContentLoaded", () => {
  startTheme();
  startFolding();
  startPicker();
  startPrinting();
  startNavigation();
  for (const table of $$(".table")) startTable(table);
  for (const element of $$(".timeline")) wakes(element, startTimeline);
  for (const element of $$(".diff")) wakes(element, startDiff);
  for (const element of $$(".heatmap")) wakes(element, startHeatMap);
  for (const section of $$("details.section")) section.addEventListener("toggle", wake);
  wake();
});
