// Three canvases for one tile of K or V [num_tokens, head_dim]: values, codes, error. Point at a cell for its numbers.
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
  text.style.minHeight = "1.5em";
  const row = document.createElement("div");
  row.style.cssText = "display:flex;flex-wrap:wrap;gap:16px";
  const canvases = PANELS.map(([name, label]) => {
    const figure = document.createElement("figure");
    figure.style.margin = "0";
    const caption = document.createElement("figcaption");
    const canvas = document.createElement("canvas");
    canvas.setAttribute("role", "img");
    canvas.style.cssText = "border:1px solid var(--jp-border-color2);image-rendering:pixelated;max-width:100%";
    canvas.addEventListener("mousemove", (event) => point(event, canvas));
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
      caption.textContent = `${label}: ${tokens} tokens down, ${channels} channels across; largest ${largest.toPrecision(3)}`;
      canvas.setAttribute("aria-label", caption.textContent);
    }
    text.textContent = model.get("summary");
  }

  function point(event, canvas) {
    const [tokens, channels] = model.get("shape");
    const box = canvas.getBoundingClientRect();
    const channel = Math.floor(((event.clientX - box.left) / box.width) * channels);
    const token = Math.floor(((event.clientY - box.top) / box.height) * tokens);
    if (channel < 0 || token < 0 || channel >= channels || token >= tokens) return;
    const at = token * channels + channel;
    const [value, code, error] = PANELS.map(([name]) => floats(model, name)[at]);
    text.textContent = `token ${token}, channel ${channel}: value ${value.toPrecision(4)}, code ${code}, error ${error.toPrecision(2)}`;
  }

  model.on("change:summary", draw); // set last, in one message with the rest
  draw();
  return () => model.off("change:summary", draw);
}

export default { render };
