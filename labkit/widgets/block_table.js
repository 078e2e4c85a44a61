// A KV block pool on a canvas: a player for a whole trace (no kernel needed once it is here), or a live view.
// One block is a cell of three words, as described in block_cells.py.

const MAX_PITCH = 32; // CSS pixels from one block to the next
const MAX_HEIGHT = 384;
const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]; // steps a second
const LEGEND_LENGTH = 14;

const tokensOf = (word) => word & 0xffff;
const refCntOf = (word) => (word >>> 16) & 0x3fff;
const isInFlight = (word) => ((word >>> 30) & 1) === 1; // a copy to or from host memory holds it
const isCached = (word) => word >>> 31 === 1;

// ---------------------------------------------------------------- data

const words = (view) => new Uint32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

async function inflatedColumns(view, count) {
  const stream = new Blob([view]).stream().pipeThrough(new DecompressionStream("deflate"));
  const all = new Uint32Array(await new Response(stream).arrayBuffer());
  const rows = all.length / count;
  return Array.from({ length: count }, (_, i) => all.subarray(i * rows, (i + 1) * rows));
}

// The cells after any step. Copies of the cells are kept every so often on the way, to go back quickly.
class Recording {
  constructor(numBlocks, changes, steps) {
    this.changes = changes;
    [this.ends, this.numbers, this.milliseconds, this.running, this.waiting, this.referenced] = steps;
    this.length = this.ends.length;
    this.spacing = Math.max(16, Math.ceil(this.length / 32));
    this.cells = new Uint32Array(3 * numBlocks);
    this.saved = [this.cells.slice()];
    this.position = 0; // steps that the cells have behind them
  }

  seek(position) {
    if (position < this.position) {
      const index = Math.floor(position / this.spacing);
      this.cells.set(this.saved[index]);
      this.position = index * this.spacing;
    }
    const [blocks, first, second, third] = this.changes;
    while (this.position < position) {
      const end = this.ends[this.position];
      for (let i = this.position ? this.ends[this.position - 1] : 0; i < end; i++) {
        const at = 3 * blocks[i];
        this.cells[at] = first[i];
        this.cells[at + 1] = second[i];
        this.cells[at + 2] = third[i];
      }
      this.position += 1;
      if (this.position === this.saved.length * this.spacing) this.saved.push(this.cells.slice());
    }
    return this.cells;
  }
}

function summarise(cells, blockSize) {
  const sum = { blocks: cells.length / 3, referenced: 0, cached: 0, inFlight: 0, live: 0 };
  const held = new Map(); // request -> blocks
  for (let i = 0; i < cells.length; i += 3) {
    const word = cells[i + 2];
    if (refCntOf(word)) {
      sum.referenced += 1;
      sum.live += tokensOf(word);
      held.set(cells[i], (held.get(cells[i]) ?? 0) + 1);
    } else if (isInFlight(word)) sum.inFlight += 1;
    else if (isCached(word)) sum.cached += 1;
  }
  sum.free = sum.blocks - sum.referenced - sum.cached - sum.inFlight;
  sum.fragmented = sum.referenced * blockSize - sum.live;
  return { ...sum, held };
}

// ---------------------------------------------------------------- painting, in device pixels

function layOut(numBlocks, width, ratio) {
  for (let pitch = Math.round(MAX_PITCH * ratio); ; pitch--) {
    let columns = Math.max(1, Math.min(numBlocks, Math.floor(width / pitch)));
    if (columns > 16) columns -= columns % 8;
    const rows = Math.ceil(numBlocks / columns);
    if (rows * pitch > MAX_HEIGHT * ratio && pitch > 1) continue;
    const gap = pitch >= 10 * ratio ? Math.round(2 * ratio) : pitch >= 4 ? 1 : 0;
    return { pitch, columns, rows, side: pitch - gap, ratio };
  }
}

const pixel = ([r, g, b], alpha = 255) => ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;
const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

function inks(styles) {
  return styles.map(({ fill, hatch }) => ({
    full: pixel(channels(fill)),
    hatch: hatch && pixel(channels(hatch)),
    pale: pixel(channels(fill), 90),
    reserved: pixel(channels(fill), 70),
  }));
}

function paintCells(pixels, stride, { pitch, columns, side }, cells, blockSize, palette, text, chosen) {
  const empty = pixel(text, 30);
  const outline = pixel(text);
  const [black, white] = [pixel([0, 0, 0]), pixel([255, 255, 255])];
  const spacing = Math.max(4, Math.round(side / 4)); // of hatch lines
  for (let block = 0; block < cells.length / 3; block++) {
    const request = cells[3 * block];
    const word = cells[3 * block + 2];
    const corner = Math.floor(block / columns) * pitch * stride + (block % columns) * pitch;
    const box = (x, y, w, h, colour) => {
      for (let row = y; row < y + h; row++) pixels.fill(colour, corner + row * stride + x, corner + row * stride + x + w);
    };
    if (!request) {
      box(0, 0, side, side, empty);
      continue;
    }
    const ink = palette[(request - 1) % palette.length];
    const refCnt = refCntOf(word);
    if (!refCnt) {
      box(0, 0, side, side, ink.pale);
      if (isInFlight(word)) for (let x = 0; x < side; x += 3) box(x, 0, 1, side, ink.full);
      continue;
    }
    const tokens = tokensOf(word);
    const height = tokens ? Math.max(1, Math.round((side * tokens) / blockSize)) : 0;
    box(0, 0, side, side - height, ink.reserved);
    box(0, side - height, side, height, ink.full);
    if (ink.hatch && side >= 4) {
      for (let y = side - height; y < side; y++)
        for (let x = (spacing - (y % spacing)) % spacing; x < side; x += spacing) pixels[corner + y * stride + x] = ink.hatch;
    }
    if (side >= 8) {
      box(0, 0, side, 1, ink.full);
      box(0, 0, 1, side, ink.full);
      box(side - 1, 0, 1, side, ink.full);
    }
    if (refCnt > 1 && side >= 5) {
      const mark = Math.max(3, Math.round(side / 3));
      box(side - mark, 0, mark, mark, black);
      if (mark > 2) box(side - mark + 1, 1, mark - 2, mark - 2, white);
    }
    if (request === chosen && side >= 5) {
      const line = side >= 16 ? 2 : 1;
      box(0, 0, side, line, outline);
      box(0, side - line, side, line, outline);
      box(0, 0, line, side, outline);
      box(side - line, 0, line, side, outline);
    }
  }
}

// ---------------------------------------------------------------- the page

function element(tag, className, properties = {}) {
  return Object.assign(document.createElement(tag), { className, ...properties });
}

const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "0 %");

class View {
  constructor(model, el) {
    this.model = model;
    this.blockSize = model.get("block_size");
    this.styles = model.get("styles");
    this.palette = inks(this.styles);
    this.cells = new Uint32Array(3 * model.get("num_blocks"));
    this.status = [0, 0, 0];
    this.chosen = 0; // number of the request whose blocks are outlined
    this.pointed = -1; // block
    this.announcedAt = 0;
    this.stopped = new AbortController();

    this.root = element("div", "labkit-blocks");
    this.root.dataset.lmSuppressShortcuts = "true"; // else JupyterLab takes the keys for its shortcuts ...
    this.bar = element("div", "labkit-bar", { ariaHidden: "true" });
    this.bar.append(...["live", "fragmented", "cached", "in-flight", "free"].map((kind) => element("span", `labkit-${kind}`)));
    this.summary = element("div", "labkit-summary");
    this.frame = element("div", "labkit-frame");
    this.canvas = element("canvas", "labkit-canvas", { tabIndex: 0, role: "img" });
    this.tip = element("div", "labkit-tip", { hidden: true });
    this.frame.append(this.canvas, this.tip);
    this.legend = element("div", "labkit-legend");
    this.spoken = element("div", "labkit-spoken", { ariaLive: "polite" });
    this.root.append(this.summary, this.bar, this.frame, this.legend, this.spoken);
    el.append(this.root);

    const { signal } = this.stopped;
    this.root.addEventListener("keydown", (event) => event.stopPropagation(), { signal }); // ... or its notebook does
    this.canvas.addEventListener("pointermove", (event) => this.pointAt(this.blockUnder(event)), { signal });
    this.canvas.addEventListener("pointerleave", () => this.pointAt(-1), { signal });
    this.canvas.addEventListener("blur", () => this.pointAt(-1), { signal });
    this.canvas.addEventListener("keydown", (event) => this.onArrow(event), { signal });
    const resized = new ResizeObserver(() => this.redraw());
    resized.observe(this.frame);
    const themed = new MutationObserver(() => this.redraw()); // JupyterLab tells its theme in attributes of body
    themed.observe(document.body, { attributes: true });
    signal.addEventListener("abort", () => {
      resized.disconnect();
      themed.disconnect();
      cancelAnimationFrame(this.request);
      clearTimeout(this.speaking);
    });
  }

  show(cells, status) {
    this.cells = cells;
    this.status = status;
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
    const text = getComputedStyle(this.root).color.match(/[\d.]+/g).slice(0, 3).map(Number);
    paintCells(pixels, w, layout, this.cells, this.blockSize, this.palette, text, this.chosen);
    this.canvas.getContext("2d", { willReadFrequently: true }).putImageData(this.image, 0, 0);
    this.describe();
  }

  describe() {
    const { referenced, cached, inFlight, free, live, fragmented, blocks, held } = summarise(this.cells, this.blockSize);
    const [step, running, waiting] = this.status;
    const slots = blocks * this.blockSize;
    const shares = [live, fragmented, ...[cached, inFlight, free].map((count) => count * this.blockSize)];
    shares.forEach((share, i) => (this.bar.children[i].style.width = `${(100 * share) / slots}%`));
    this.summary.textContent =
      `${referenced.toLocaleString("en")} of ${plural(blocks, "block")} in use · ${plural(live, "live token")} · ` +
      `fragmentation ${percent(fragmented, referenced * this.blockSize)} · ${cached.toLocaleString("en")} cached · ` +
      (inFlight ? `${inFlight.toLocaleString("en")} in flight · ` : "") +
      `${free.toLocaleString("en")} free · ${running} running, ${waiting} waiting`;
    const label = `Block table at step ${step}: ${this.summary.textContent}`;
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
    return this.model.get("request_ids")[request - 1] ?? `number ${request}`;
  }

  writeLegend(held, hasFlights) {
    const shown = [...held].sort(([a], [b]) => a - b).slice(0, LEGEND_LENGTH);
    const key = JSON.stringify([shown, held.size, hasFlights]);
    if (key === this.legendKey) return;
    this.legendKey = key;
    const chips = shown.map(([request, count]) => {
      const { fill, hatch } = this.styles[(request - 1) % this.styles.length];
      const swatch = element("span", "labkit-swatch");
      swatch.style.background = hatch ? `repeating-linear-gradient(135deg, ${hatch} 0 1px, ${fill} 1px 4px)` : fill;
      const chip = element("span", "labkit-chip", { title: plural(count, "block") });
      chip.append(swatch, `request ${this.name(request)}`);
      return chip;
    });
    if (held.size > shown.length) chips.push(element("span", "labkit-chip", { textContent: `+ ${held.size - shown.length} more` }));
    const states = [
      ["reserved", "held, not written"],
      ["shared", "ref_cnt > 1"],
      ["cached", "cached"],
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

  onArrow(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.layout.columns, ArrowDown: this.layout.columns }[event.key];
    if (event.key === "Escape") this.pointAt(-1);
    if (by === undefined) return;
    event.preventDefault();
    const block = this.pointed < 0 ? 0 : this.pointed + by;
    if (block < 0 || block >= this.cells.length / 3) return;
    this.pointAt(block);
    this.speak(this.tip.textContent);
  }

  pointAt(block) {
    if (block === this.pointed) return;
    this.pointed = block;
    this.tip.hidden = block < 0;
    const chosen = block < 0 ? 0 : this.cells[3 * block];
    if (block >= 0) this.writeTip();
    if (chosen === this.chosen) return;
    this.chosen = chosen;
    this.redraw();
  }

  writeTip() {
    const [request, logical, word] = this.cells.subarray(3 * this.pointed, 3 * this.pointed + 3);
    const refCnt = refCntOf(word);
    const lines = [`block ${this.pointed}`];
    if (!request) lines.push("free");
    else {
      lines.push(`${refCnt ? "request" : "last held by request"} ${this.name(request)}`, `logical block ${logical}`);
      lines.push(`${tokensOf(word)} of ${plural(this.blockSize, "token")}`, `ref_cnt ${refCnt}`);
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

// ---------------------------------------------------------------- player

class Player {
  constructor(view, recording) {
    this.view = view;
    this.recording = recording;
    this.controls = element("div", "labkit-controls");
    this.back = this.button("◀", "step back", () => this.jump(-1));
    this.toggle = this.button("▶ Play", "play", () => (this.playing ? this.pause() : this.play()));
    this.forth = this.button("▶|", "step forward", () => this.jump(1));
    this.slider = element("input", "labkit-slider", { type: "range", min: 1, max: recording.length, step: 1, value: 1 });
    this.slider.ariaLabel = "step";
    this.slider.addEventListener("input", () => {
      this.pause();
      this.go(Number(this.slider.value));
    });
    this.speed = element("select", "labkit-speed", { ariaLabel: "steps a second" });
    this.speed.append(...SPEEDS.map((speed) => new Option(`${speed} steps/s`, speed)));
    this.speed.value = SPEEDS.find((speed) => speed >= recording.length / 12) ?? SPEEDS.at(-1);
    this.label = element("output", "labkit-label");
    this.usage = element("canvas", "labkit-usage", { ariaHidden: "true" });
    const track = element("div", "labkit-track");
    track.append(this.usage, this.slider);
    this.controls.append(this.back, this.toggle, this.forth, track, this.label, this.speed);
    view.frame.before(this.controls);
    view.stopped.signal.addEventListener("abort", () => this.pause());
    this.drawUsage();
    this.go(1);
  }

  button(text, label, onclick) {
    return element("button", "labkit-button", { type: "button", textContent: text, ariaLabel: label, title: label, onclick });
  }

  go(position) {
    const { recording } = this;
    this.position = Math.min(recording.length, Math.max(1, position));
    const at = this.position - 1;
    this.slider.value = this.position;
    this.slider.ariaValueText = `step ${recording.numbers[at]} of ${recording.numbers.at(-1)}`;
    this.label.textContent = `step ${recording.numbers[at]} of ${recording.numbers.at(-1)} · ${(recording.milliseconds[at] / 1000).toFixed(2)} s`;
    this.view.show(recording.seek(this.position), [recording.numbers[at], recording.running[at], recording.waiting[at]]);
  }

  jump(by) {
    this.pause();
    this.go(this.position + by);
  }

  play() {
    if (this.position === this.recording.length) this.go(1);
    this.playing = true;
    this.label_(true);
    let [last, owed] = [performance.now(), 0];
    const tick = (now) => {
      if (!this.playing) return;
      owed += ((now - last) / 1000) * Number(this.speed.value);
      last = now;
      if (owed >= 1) this.go(this.position + Math.floor(owed));
      owed %= 1;
      if (this.position === this.recording.length) this.pause();
      else this.ticking = requestAnimationFrame(tick);
    };
    this.ticking = requestAnimationFrame(tick);
  }

  pause() {
    this.playing = false;
    cancelAnimationFrame(this.ticking);
    this.label_(false);
  }

  label_(playing) {
    this.toggle.textContent = playing ? "❚❚ Pause" : "▶ Play";
    this.toggle.ariaLabel = this.toggle.title = playing ? "pause" : "play";
  }

  // Blocks in use over all steps, behind the slider.
  drawUsage() {
    const [width, height] = [600, 24];
    Object.assign(this.usage, { width, height });
    const pen = this.usage.getContext("2d");
    pen.fillStyle = "#0072b2";
    const { referenced, length } = this.recording;
    for (let x = 0; x < width; x++) {
      const share = referenced[Math.floor((x * length) / width)] / (this.view.cells.length / 3);
      pen.fillRect(x, height * (1 - share), 1, height * share);
    }
  }
}

async function render({ model, el }) {
  const view = new View(model, el);
  if (model.get("changes").byteLength) {
    const columns = await Promise.all([inflatedColumns(model.get("changes"), 4), inflatedColumns(model.get("steps"), 6)]);
    if (!view.stopped.signal.aborted) new Player(view, new Recording(model.get("num_blocks"), ...columns));
    return () => {
      view.stopped.abort();
      view.root.remove();
    };
  }
  const showNow = () => view.show(words(model.get("cells")), model.get("status"));
  model.on("change", showNow);
  showNow();
  return () => {
    model.off("change", showNow);
    view.stopped.abort();
    view.root.remove();
  };
}

export default { render };
