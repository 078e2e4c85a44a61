// Two stacked bars, a line of numbers and the last minute of the KV pool. Python sends at most ten pictures a second.

const [LIVE, FRAGMENTED] = ["#0072b2", "#d55e00"];

function element(tag, className, properties = {}) {
  return Object.assign(document.createElement(tag), { className, ...properties });
}

function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; size >= 1024 && unit < 4; unit++) size /= 1024;
  return unit ? `${size.toFixed(2)} ${units[unit]}` : `${size} B`;
}

function headline({ state, running, waiting, generated, tokens_per_second: rate }) {
  const tokens = `${generated.toLocaleString("en")} tokens generated`;
  const speed = `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`;
  if (state === "running") return `running · ${running} running, ${waiting} waiting · ${speed} · ${tokens}`;
  if (state === "closed") return `the LLM is closed; this is what was seen last · ${tokens}`;
  return generated ? `idle · ${tokens}, ${speed} on average` : "idle · nothing generated yet";
}

// A bar that keeps its elements: only widths and texts change.
class Bar {
  constructor([title, parts], parent) {
    this.parts = parts;
    this.title = element("div", "labkit-monitor-title", { textContent: title });
    this.name = title;
    this.bar = element("div", "labkit-monitor-bar", { ariaHidden: "true" });
    this.key = element("div", "labkit-monitor-key");
    this.items = parts.map(([, label, colour]) => {
      const span = element("span", "");
      span.style.background = colour;
      const item = element("span", "");
      const swatch = element("i", "");
      swatch.style.background = colour;
      const text = element("span", "");
      item.append(swatch, text);
      this.bar.append(span);
      this.key.append(item);
      return { span, item, text, label };
    });
    parent.append(this.title, this.bar, this.key);
  }

  show(sizes, of = "") {
    const total = this.parts.reduce((sum, [name]) => sum + (sizes[name] ?? 0), 0);
    this.title.textContent = `${this.name}${of}: ${bytes(total)}`;
    this.parts.forEach(([name], i) => {
      const { span, item, text, label } = this.items[i];
      const size = sizes[name] ?? 0;
      span.style.width = `${total ? (100 * size) / total : 0}%`;
      span.title = `${label} ${bytes(size)}`;
      text.textContent = `${label} ${bytes(size)}`;
      // Once seen, a part stays in the key, so that the lines below do not jump.
      this.items[i].seen ||= size > 0;
      item.hidden = !this.items[i].seen;
    });
  }
}

function drawHistory(canvas, view) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
  if (!width) return;
  Object.assign(canvas, { width, height });
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const samples = view.byteLength / 4;
  const step = width / 600;
  for (let i = 0; i < samples; i++) {
    const [live, held] = [0, 2].map((at) => Math.round((view.getUint16(4 * i + at, true) / 10000) * height));
    const [x, w] = [Math.floor(width - (samples - i) * step), Math.ceil(step)];
    pen.fillStyle = FRAGMENTED;
    pen.fillRect(x, height - held, w, held - live);
    pen.fillStyle = LIVE;
    pen.fillRect(x, height - live, w, live);
  }
}

function render({ model, el }) {
  const stopped = new AbortController();
  const root = element("div", "labkit-monitor");
  const head = element("div", "labkit-monitor-head");
  const text = element("div", "labkit-monitor-status");
  const button = element("button", "", { type: "button", textContent: "■ Stop", ariaLabel: "stop the run", disabled: true });
  const spoken = element("div", "labkit-monitor-spoken", { ariaLive: "polite" });
  head.append(text, button);
  root.append(head);
  const bars = model.get("bars").map((bar) => new Bar(bar, root));
  const canvas = element("canvas", "labkit-monitor-history", { role: "img" });
  root.append(element("div", "labkit-monitor-title", { textContent: "KV pool over the last minute of running" }), canvas, spoken);
  el.append(root);
  button.addEventListener("click", () => model.send("stop"));
  root.addEventListener("keydown", (event) => event.stopPropagation()); // else the notebook takes Space and Enter

  let [frame, speaking, spokenAt] = [0, 0, 0];
  function draw() {
    const [status, sizes] = [model.get("status"), model.get("parts")];
    if (!status.state) return;
    text.textContent = headline(status);
    button.disabled = !status.stoppable;
    const device = model.get("device");
    bars[0].show(sizes, ` (${device === "cpu" ? "this machine's RAM" : device})`);
    bars[1].show(sizes);
    const history = model.get("history");
    drawHistory(canvas, new DataView(history.buffer, history.byteOffset, history.byteLength));
    const pool = sizes.kv_pool || 1;
    canvas.ariaLabel =
      `KV pool over the last minute of running; now ${((100 * sizes.kv_live) / pool).toFixed(1)} % live tokens, ` +
      `${((100 * sizes.kv_fragmentation) / pool).toFixed(1)} % fragmentation`;
    canvas.title = canvas.ariaLabel;
    clearTimeout(speaking); // at most once a second, and always the last
    speaking = setTimeout(() => {
      spokenAt = performance.now();
      spoken.textContent = text.textContent;
    }, Math.max(0, spokenAt + 1000 - performance.now()));
  }
  function redraw() {
    cancelAnimationFrame(frame);
    frame = requestAnimationFrame(draw);
  }
  const resized = new ResizeObserver(redraw);
  resized.observe(root);
  model.on("change", redraw);
  stopped.signal.addEventListener("abort", () => {
    resized.disconnect();
    model.off("change", redraw);
    cancelAnimationFrame(frame);
    clearTimeout(speaking);
    root.remove();
  });
  redraw();
  return () => stopped.abort();
}

export default { render };
