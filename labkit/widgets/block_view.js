// One pool on the page: its summary, its picture and its legend, and a closer look at one block.

import { isCached, isInFlight, refCntOf, summarise, tokensOf } from "./block_cells.js";
import { inks, layOut, paintCells } from "./block_paint.js";

const LEGEND_LENGTH = 14;
const NAMES_LENGTH = 6;

export function element(tag, className, properties = {}) {
  return Object.assign(document.createElement(tag), { className, ...properties });
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "0 %");

export class View {
  // pool: { title, num_blocks, block_size, is_arena }; names() gives the request ids; stopped ends all listening.
  constructor(pool, styles, names, stopped) {
    this.pool = pool;
    this.blockSize = pool.block_size;
    this.styles = styles;
    this.names = names;
    this.palette = inks(this.styles);
    this.cells = new Uint32Array(3 * pool.num_blocks);
    this.status = [0, 0, 0];
    this.sharers = () => new Map(); // of the shared blocks now
    this.chosen = new Set(); // numbers of the requests whose blocks are outlined
    this.pointed = -1; // block
    this.isHeld = false; // by a click: the pointer may go elsewhere
    this.announcedAt = 0;

    this.root = element("div", "labkit-pool");
    this.title = element("div", "labkit-title", { hidden: !pool.title });
    this.bar = element("div", "labkit-bar", { ariaHidden: "true" });
    this.bar.append(...["live", "fragmented", "cached", "in-flight", "free"].map((kind) => element("span", `labkit-${kind}`)));
    this.summary = element("div", "labkit-summary");
    this.frame = element("div", "labkit-frame");
    this.canvas = element("canvas", "labkit-canvas", { tabIndex: 0, role: "img" });
    this.tip = element("div", "labkit-tip", { hidden: true });
    this.frame.append(this.canvas, this.tip);
    this.legend = element("div", "labkit-legend");
    this.spoken = element("div", "labkit-spoken", { ariaLive: "polite" });
    this.root.append(this.title, this.summary, this.bar, this.frame, this.legend, this.spoken);

    const listen = (kind, listener) => this.canvas.addEventListener(kind, listener, { signal: stopped });
    listen("pointermove", (event) => this.isHeld || this.pointAt(this.blockUnder(event)));
    listen("pointerleave", () => this.isHeld || this.pointAt(-1));
    listen("click", (event) => this.onClick(this.blockUnder(event)));
    listen("blur", () => this.letGo());
    listen("keydown", (event) => this.onKey(event));
    const resized = new ResizeObserver(() => this.redraw());
    resized.observe(this.frame);
    const themed = new MutationObserver(() => this.redraw()); // JupyterLab tells its theme in attributes of body
    themed.observe(document.body, { attributes: true });
    stopped.addEventListener("abort", () => {
      resized.disconnect();
      themed.disconnect();
      cancelAnimationFrame(this.request);
      clearTimeout(this.speaking);
    });
  }

  show(cells, status, sharers) {
    this.cells = cells;
    this.status = status;
    this.sharers = sharers;
    if (this.pointed >= 0) this.choose();
    this.redraw();
  }

  redraw() {
    cancelAnimationFrame(this.request);
    this.request = requestAnimationFrame(() => this.draw());
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.floor(this.frame.clientWidth * ratio);
    if (!width) return; // not on the page yet; the ResizeObserver calls again
    const layout = (this.layout = layOut(this.cells.length / 3, width, ratio));
    const [w, h] = [layout.columns * layout.pitch, layout.rows * layout.pitch];
    if (this.canvas.width !== w || this.canvas.height !== h) {
      Object.assign(this.canvas, { width: w, height: h });
      Object.assign(this.canvas.style, { width: `${w / ratio}px`, height: `${h / ratio}px` });
      this.image = new ImageData(w, h);
    }
    const pixels = new Uint32Array(this.image.data.buffer);
    pixels.fill(0);
    const { blockSize, palette } = this;
    const text = getComputedStyle(this.root).color.match(/[\d.]+/g).slice(0, 3).map(Number);
    const look = { blockSize, palette, text, outlined: this.outlined(), joinsRuns: this.pool.is_arena };
    paintCells(pixels, w, layout, this.cells, look);
    this.canvas.getContext("2d", { willReadFrequently: true }).putImageData(this.image, 0, 0);
    this.describe();
  }

  describe() {
    const { referenced, cached, inFlight, free, live, fragmented, blocks, held } = summarise(this.cells, this.blockSize);
    const [step, running, waiting] = this.status;
    const slots = blocks * this.blockSize;
    const shares = [live, fragmented, ...[cached, inFlight, free].map((count) => count * this.blockSize)];
    shares.forEach((share, i) => (this.bar.children[i].style.width = `${(100 * share) / slots}%`));
    this.title.textContent = `${this.pool.title} · step ${step}`;
    this.summary.textContent =
      `${referenced.toLocaleString("en")} of ${plural(blocks, "block")} in use · ${plural(live, "live token")} · ` +
      `fragmentation ${percent(fragmented, referenced * this.blockSize)} · ${cached.toLocaleString("en")} cached · ` +
      (inFlight ? `${inFlight.toLocaleString("en")} in flight · ` : "") +
      `${free.toLocaleString("en")} free · ${running} running, ${waiting} waiting`;
    const label = `${this.pool.title || "Block table"} at step ${step}: ${this.summary.textContent}`;
    this.canvas.ariaLabel = label;
    this.writeLegend(held, inFlight > 0);
    if (this.pointed >= 0) this.writeTip();
    this.speak(label);
  }

  // At most once a second, and always the last.
  speak(text) {
    clearTimeout(this.speaking);
    const wait = Math.max(0, this.announcedAt + 1000 - performance.now());
    this.speaking = setTimeout(() => {
      this.announcedAt = performance.now();
      this.spoken.textContent = text;
    }, wait);
  }

  name(request) {
    return (this.names()[request - 1] ?? `number ${request}`).replace(/^request[-_ ]/, ""); // the word stands before it
  }

  writeLegend(held, hasFlights) {
    const shown = [...held].sort(([a], [b]) => a - b).slice(0, LEGEND_LENGTH);
    const key = JSON.stringify([shown, held.size, hasFlights, [...this.chosen]]);
    if (key === this.legendKey) return;
    this.legendKey = key;
    const chips = shown.map(([request, count]) => {
      const { fill, hatch } = this.styles[(request - 1) % this.styles.length];
      const swatch = element("span", "labkit-swatch");
      swatch.style.background = hatch ? `repeating-linear-gradient(135deg, ${hatch} 0 1px, ${fill} 1px 4px)` : fill;
      const chip = element("span", `labkit-chip${this.chosen.has(request) ? " labkit-chosen" : ""}`);
      chip.title = plural(count, "block");
      chip.append(swatch, `request ${this.name(request)}`);
      return chip;
    });
    if (held.size > shown.length) chips.push(element("span", "labkit-chip", { textContent: `+ ${held.size - shown.length} more` }));
    const states = [
      ["reserved", this.pool.is_arena ? "reserved, not written" : "held, not written"],
      ...(this.pool.is_arena ? [] : [["shared", "ref_cnt > 1"], ["cached", "cached"]]),
      ["free", "free"],
      ...(hasFlights ? [["in-flight", "swap in flight"]] : []),
    ].map(([kind, text]) => {
      const chip = element("span", "labkit-chip labkit-state");
      chip.append(element("span", `labkit-swatch labkit-${kind}`), text);
      return chip;
    });
    this.legend.replaceChildren(...states, ...chips);
  }

  // -------------------------------------------------------------- looking at one block

  blockUnder(event) {
    const { pitch, columns, ratio } = this.layout;
    const [column, row] = [event.offsetX, event.offsetY].map((offset) => Math.floor((offset * ratio) / pitch));
    const block = row * columns + column;
    return column >= 0 && column < columns && row >= 0 && block < this.cells.length / 3 ? block : -1;
  }

  onKey(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.layout.columns, ArrowDown: this.layout.columns }[event.key];
    if (event.key === "Escape") this.letGo();
    if (by === undefined) return;
    event.preventDefault();
    const block = this.pointed < 0 ? 0 : this.pointed + by;
    if (block < 0 || block >= this.cells.length / 3) return;
    this.pointAt(block);
    this.speak(this.tip.textContent);
  }

  // A click holds on to a block, a second one lets it go.
  onClick(block) {
    this.isHeld = block >= 0 && !(this.isHeld && block === this.pointed);
    this.pointAt(block);
  }

  letGo() {
    this.isHeld = false;
    this.pointAt(-1);
  }

  pointAt(block) {
    if (block === this.pointed) return;
    this.pointed = block;
    this.tip.hidden = block < 0;
    const before = [...this.chosen].join();
    this.choose();
    if (block >= 0) this.writeTip();
    if ([...this.chosen].join() !== before) this.redraw();
  }

  // The requests that hold the block pointed at.
  choose() {
    const request = this.pointed < 0 ? 0 : this.cells[3 * this.pointed];
    this.chosen = (request && this.sharers().get(this.pointed)) || new Set();
    if (request && !this.chosen.size) this.chosen = new Set([request]);
  }

  // Says of a block whether one of the chosen requests holds it.
  outlined() {
    if (!this.chosen.size) return () => false;
    const sharers = this.sharers();
    return (block) => this.chosen.has(this.cells[3 * block]) || [...(sharers.get(block) ?? [])].some((r) => this.chosen.has(r));
  }

  writeTip() {
    const [request, logical, word] = this.cells.subarray(3 * this.pointed, 3 * this.pointed + 3);
    const refCnt = refCntOf(word);
    const lines = [`block ${this.pointed}`];
    if (!request) lines.push("free");
    else {
      lines.push(`${refCnt ? "request" : "last held by request"} ${this.name(request)}`, `logical block ${logical}`);
      lines.push(`${tokensOf(word)} of ${plural(this.blockSize, "token")}`, `ref_cnt ${refCnt}`);
      const others = [...this.chosen].filter((other) => other !== request).map((other) => this.name(other));
      const more = others.length - NAMES_LENGTH;
      if (others.length) lines.push(`shared with ${others.slice(0, NAMES_LENGTH).join(", ")}${more > 0 ? ` and ${more} more` : ""}`);
      if (isInFlight(word)) lines.push("in flight to or from host memory");
      if (isCached(word)) lines.push("in the prefix cache");
    }
    this.tip.textContent = lines.join(" · ");
    const { pitch, columns, ratio } = this.layout;
    const left = ((this.pointed % columns) * pitch) / ratio;
    const top = ((Math.floor(this.pointed / columns) + 1) * pitch) / ratio;
    this.tip.style.top = `${top + 4}px`;
    this.tip.style.left = `${Math.max(0, Math.min(left, this.frame.clientWidth - this.tip.offsetWidth - 4))}px`;
  }
}
