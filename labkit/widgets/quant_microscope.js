// Three canvases for one tile of K or V [num_tokens, head_dim]: values, codes, error. Point at a cell, or focus a canvas
// and use the arrow keys, for its numbers.
const PANELS = [["values", "value"], ["codes", "code"], ["errors", "error"]];
const CELL = 6;

// Blue - white - orange around 0 (colour-blind safe); errors from white to red.
function colour(x, largest, isError) {
  const t = largest ? Math.min(1, Math.abs(x) / largest) : 0;
  const end = isError ? [213, 94, 0] : x < 0 ? [0, 114, 178] : [230, 159, 0];
  return end.map((c) => Math.round(255 + (c - 255) * t));
}

function floats(model, name) {
  const bytes = model.get(name);
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
}

function render({ model, el }) {
  el.classList.add("labkit-microscope");
  const text = document.createElement("div");
  text.setAttribute("role", "status");
  text.style.minHeight = "2.6em";
  text.className = "labkit-microscope-status";
  el.style.color = "var(--jp-ui-font-color1, CanvasText)";
  el.dataset.lmSuppressShortcuts = "true"; // else JupyterLab takes the arrow keys ...
  el.addEventListener("keydown", (event) => event.stopPropagation()); // ... or its notebook does
  const row = document.createElement("div");
  row.style.cssText = "display:grid;grid-template-columns:repeat(auto-fit,minmax(240px,1fr));gap:8px 16px";
  let [token, channel] = [0, 0]; // of the cell that was pointed at last
  const canvases = PANELS.map(([name, label]) => {
    const figure = document.createElement("figure");
    figure.style.cssText = "margin:0;max-width:420px"
    const caption = document.createElement("figcaption");
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    canvas.tabIndex = 0;
    canvas.style.cssText = "display:block;box-sizing:border-box;border:1px solid var(--jp-border-color2);image-rendering:pixelated;width:100%";
    canvas.addEventListener("mousemove", (event) => pointAt(...cellUnder(event, canvas)));
    canvas.addEventListener("mouseleave", summarise);
    canvas.addEventListener("focus", () => pointAt(token, channel));
    canvas.addEventListener("blur", summarise);
    canvas.addEventListener("keydown", onArrow);
    figure.append(caption, canvas);
    row.append(figure);
    return { name, label, caption, canvas };
  });
  el.append(row, text);

  function draw() {
    const [tokens, channels] = model.get("shape");
    for (const { name, label, caption, canvas } of canvases) {
      const data = floats(model, name);
      if (data.length !== tokens * channels) return; // a message is still on its way
      const largest = data.reduce((most, x) => Math.max(most, Math.abs(x)), 0);
      canvas.width = channels * CELL;
      canvas.height = tokens * CELL;
      const context = canvas.getContext("2d");
      data.forEach((x, i) => {
        const [r, g, b] = colour(x, largest, name === "errors");
        context.fillStyle = `rgb(${r},${g},${b})`;
        context.fillRect((i % channels) * CELL, Math.floor(i / channels) * CELL, CELL, CELL);
      });
      caption.textContent = `${label}, largest ${largest.toPrecision(3)}`;
      canvas.setAttribute("aria-label", `${caption.textContent}: ${tokens} tokens down, ${channels} channels across`);
    }
    summarise();
  }

  function summarise() {
    const [tokens, channels] = model.get("shape");
    text.textContent = `${tokens} tokens down, ${channels} channels across · ${model.get("summary")}`;
  }

  function cellUnder(event, canvas) {
    const [tokens, channels] = model.get("shape");
    const box = canvas.getBoundingClientRect();
    return [((event.clientY - box.top) / box.height) * tokens, ((event.clientX - box.left) / box.width) * channels].map(Math.floor);
  }

  function onArrow(event) {
    const by = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!by) return;
    event.preventDefault();
    pointAt(token + by[0], channel + by[1]);
  }

  function pointAt(row, column) {
    const [tokens, channels] = model.get("shape");
    token = Math.min(tokens - 1, Math.max(0, row));
    channel = Math.min(channels - 1, Math.max(0, column));
    const at = token * channels + channel;
    const [value, code, error] = PANELS.map(([name]) => floats(model, name)[at]);
    text.textContent = `token ${token}, channel ${channel}: value ${value.toPrecision(4)}, code ${code}, error ${error.toPrecision(2)}`;
  }

  model.on("change", draw); // once for all traits of a message
  draw();
  return () => model.off("change", draw);
}

export default { render };
