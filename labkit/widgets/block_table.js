// Draws a block table and, for a recording, plays it. frames.py says what the bytes mean.

const HEADER = 8, RECORD = 4;
const MAX_CELL = 28, MAX_HEIGHT = 340; // CSS pixels
const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, 500];
const ICONS = {
    back: "M4 3h2v10H4z M13 3v10L6.5 8z",
    play: "M4 2.5v11l9-5.5z",
    pause: "M4 3h3v10H4z M9 3h3v10H9z",
    forward: "M3 3v10l6.5-5z M10 3h2v10h-2z",
};

const number = new Intl.NumberFormat("en-US");

function words(view) {
    // A copy, because what arrives need not begin at a multiple of four.
    return new Uint32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
}

function icon(name) {
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    for (const [key, value] of [["viewBox", "0 0 16 16"], ["width", 16], ["height", 16], ["aria-hidden", "true"]])
        svg.setAttribute(key, value);
    path.setAttribute("d", ICONS[name]);
    path.setAttribute("fill", "currentColor");
    svg.append(path);
    return svg;
}

// ---------------------------------------------------------------------------------------------- what the blocks hold

class Blocks {
    constructor(count) {
        this.count = count;
        this.request = new Uint32Array(count); // number + 1; 0 is nobody
        this.logical = new Uint32Array(count);
        this.packed = new Uint32Array(count);
        this.header = new Uint32Array(HEADER);
    }
    clear() {
        for (const column of [this.request, this.logical, this.packed, this.header]) column.fill(0);
    }
    tokens(block) { return this.packed[block] & 0xffff; }
    refCnt(block) { return (this.packed[block] >>> 16) & 0x7fff; }
    isCached(block) { return this.packed[block] >>> 31 === 1; }
    applyRecords(data, from, count) {
        for (let at = from; at < from + count * RECORD; at += RECORD) {
            const block = data[at];
            this.request[block] = data[at + 1];
            this.logical[block] = data[at + 2];
            this.packed[block] = data[at + 3];
        }
    }
    applyFrame(data, at) {
        this.header.set(data.subarray(at, at + HEADER));
        this.applyRecords(data, at + HEADER, data[at]);
    }
}

// A recording: knows where each frame begins, and moves Blocks to any of them. Position 0 is the empty pool.
class Recording {
    constructor(data, blocks) {
        this.data = data;
        this.blocks = blocks;
        this.starts = [];
        this.position = 0;
        this.peak = 0;
        let most = -1;
        for (let at = 0; at < data.length; at += HEADER + data[at] * RECORD) {
            this.starts.push(at);
            if (data[at + 3] > most) [most, this.peak] = [data[at + 3], this.starts.length];
        }
    }
    get length() { return this.starts.length; }
    seek(position) {
        if (position < this.position) {
            this.blocks.clear();
            this.position = 0;
        }
        while (this.position < position) this.blocks.applyFrame(this.data, this.starts[this.position++]);
    }
}

// ---------------------------------------------------------------------------------------------- the picture

class Picture {
    constructor(canvas, blocks, blockSize, palette) {
        Object.assign(this, { canvas, blocks, blockSize, palette, cell: 0, columns: 0, marked: -1 });
        this.pen = canvas.getContext("2d");
        this.rgb = palette.map(c => [1, 3, 5].map(i => parseInt(c.slice(i, i + 2), 16)));
        this.small = document.createElement("canvas"); // one pixel a block, for cells too small to draw into
    }

    layOut(width) {
        const count = this.blocks.count;
        let cell = Math.floor(Math.sqrt((width * MAX_HEIGHT) / count));
        cell = Math.max(1, Math.min(MAX_CELL, cell));
        this.cell = cell;
        this.columns = Math.max(1, Math.min(count, Math.floor(width / cell)));
        this.rows = Math.ceil(count / this.columns);
        const scale = window.devicePixelRatio || 1;
        const [w, h] = [this.columns * cell, this.rows * cell];
        this.canvas.width = Math.round(w * scale);
        this.canvas.height = Math.round(h * scale);
        this.canvas.style.width = `${w}px`;
        this.canvas.style.height = `${h}px`;
        this.pen.setTransform(this.canvas.width / w, 0, 0, this.canvas.height / h, 0, 0);
    }

    at(x, y) {
        const [column, row] = [Math.floor(x / this.cell), Math.floor(y / this.cell)];
        const block = row * this.columns + column;
        return column >= 0 && row >= 0 && column < this.columns && block < this.blocks.count ? block : -1;
    }

    draw() {
        if (!this.cell) return;
        this.ink = getComputedStyle(this.canvas).color;
        this.paper = getComputedStyle(this.canvas).outlineColor;
        this.pen.clearRect(0, 0, this.canvas.width, this.canvas.height);
        if (this.cell < 5) this.drawPixels();
        else for (let block = 0; block < this.blocks.count; block++) this.drawCell(block);
        if (this.marked >= 0) this.drawMarks();
    }

    drawCell(block) {
        const { pen, cell, blocks } = this;
        const gap = cell >= 10 ? 2 : 1, size = cell - gap;
        const x = (block % this.columns) * cell, y = Math.floor(block / this.columns) * cell;
        const owner = blocks.request[block], refCnt = blocks.refCnt(block);
        pen.fillStyle = owner ? this.palette[(owner - 1) % this.palette.length] : this.ink;
        if (!refCnt) {
            pen.globalAlpha = owner ? 0.35 : 0.1;
            pen.fillRect(x, y, size, size);
            pen.globalAlpha = 1;
            return;
        }
        const filled = Math.round((size * blocks.tokens(block)) / this.blockSize);
        pen.globalAlpha = 0.3;
        pen.fillRect(x, y, size, size - filled);
        pen.globalAlpha = 1;
        pen.fillRect(x, y + size - filled, size, filled);
        if (size >= 9) { // a held block has an edge all round, however empty
            pen.fillRect(x, y, size, 1);
            pen.fillRect(x, y, 1, size - filled);
            pen.fillRect(x + size - 1, y, 1, size - filled);
        }
        if (refCnt > 1) this.drawRefCnt(x, y, size, refCnt);
    }

    drawRefCnt(x, y, size, refCnt) {
        const pen = this.pen;
        if (size < 14) { // a dark corner with a light edge is seen on every colour
            const corner = Math.max(2, Math.round(size * 0.45));
            pen.fillStyle = this.paper;
            pen.fillRect(x + size - corner, y, corner, corner);
            pen.fillStyle = this.ink;
            pen.fillRect(x + size - corner + 1, y, corner - 1, corner - 1);
            return;
        }
        const text = refCnt > 99 ? "99+" : String(refCnt);
        const height = Math.min(13, Math.round(size * 0.55));
        pen.font = `600 ${height - 2}px sans-serif`;
        const width = Math.min(size, Math.ceil(pen.measureText(text).width) + 4);
        pen.fillStyle = this.paper;
        pen.fillRect(x + size - width, y, width, height);
        pen.fillStyle = this.ink;
        pen.textAlign = "center";
        pen.textBaseline = "middle";
        pen.fillText(text, x + size - width / 2, y + height / 2 + 0.5, width);
    }

    drawPixels() {
        const { blocks, columns, rows, small } = this;
        if (small.width !== columns || small.height !== rows) Object.assign(small, { width: columns, height: rows });
        const image = new ImageData(columns, rows);
        const ink = (this.ink.match(/[\d.]+/g) ?? [128, 128, 128]).map(Number);
        for (let block = 0; block < blocks.count; block++) {
            const owner = blocks.request[block];
            const [r, g, b] = owner ? this.rgb[(owner - 1) % this.rgb.length] : ink;
            const share = blocks.tokens(block) / this.blockSize;
            const alpha = !owner ? 0.1 : blocks.refCnt(block) ? 0.4 + 0.6 * share : 0.35;
            image.data.set([r, g, b, Math.round(255 * alpha)], block * 4);
        }
        small.getContext("2d").putImageData(image, 0, 0);
        this.pen.imageSmoothingEnabled = false;
        this.pen.drawImage(small, 0, 0, columns * this.cell, rows * this.cell);
    }

    // The marked block, and the others of the same request.
    drawMarks() {
        const { pen, blocks, columns, cell, marked } = this;
        const owner = blocks.request[marked];
        const size = cell >= 10 ? cell - 2 : cell;
        pen.strokeStyle = this.ink;
        for (let block = 0; block < blocks.count; block++) {
            const same = owner && blocks.request[block] === owner && blocks.refCnt(block) && cell >= 5;
            if (block !== marked && !same) continue;
            pen.lineWidth = block === marked ? 2 : 1;
            const inset = block === marked ? 0 : 0.5;
            const x = (block % columns) * cell, y = Math.floor(block / columns) * cell;
            pen.strokeRect(x + inset, y + inset, size - 2 * inset, size - 2 * inset);
        }
    }
}

// ---------------------------------------------------------------------------------------------- words around it

function splitLine() {
    const kinds = ["live", "fragmentation", "cached", "free"];
    const names = ["live tokens", "internal fragmentation", "cached", "free"];
    const values = kinds.map(() => element("b", {}, "0"));
    const bars = kinds.map(kind => element("span", { class: `labkit-bar labkit-${kind}` }));
    const items = kinds.map((kind, i) =>
        element("span", { class: "labkit-item" }, element("i", { class: `labkit-swatch labkit-${kind}` }), values[i], ` ${names[i]}`));
    const node = element("div", { class: "labkit-split" },
        element("div", { class: "labkit-bars", "aria-hidden": "true" }, ...bars), element("div", { class: "labkit-items" }, ...items));
    return {
        node,
        show(slots) {
            const total = slots.reduce((a, b) => a + b, 0);
            slots.forEach((count, i) => {
                values[i].textContent = number.format(count);
                bars[i].style.width = `${(100 * count) / total}%`;
            });
        },
    };
}

function requestLegend(palette, namesOf) {
    const node = element("div", { class: "labkit-requests" });
    let shown = "";
    return {
        node,
        show(blocks) {
            const counts = new Map();
            for (let block = 0; block < blocks.count; block++)
                if (blocks.refCnt(block)) counts.set(blocks.request[block], (counts.get(blocks.request[block]) ?? 0) + 1);
            const owners = [...counts.keys()].sort((a, b) => a - b);
            const key = owners.join();
            if (key === shown) return;
            shown = key;
            const names = namesOf(), most = 24;
            node.replaceChildren(
                ...owners.slice(0, most).map(owner => {
                    const swatch = element("i", { class: "labkit-swatch" });
                    swatch.style.background = palette[(owner - 1) % palette.length];
                    return element("span", { class: "labkit-item" }, swatch, names[owner - 1] ?? "?");
                }),
                owners.length > most ? `and ${owners.length - most} more` : "",
                owners.length ? "" : "no request holds a block");
        },
    };
}

// Runs a function now or, if it ran less than a second ago, when the second is over.
function atMostOnceASecond(run) {
    let last = -Infinity, timer = 0;
    const go = () => { last = performance.now(); timer = 0; run(); };
    return {
        call() { if (!timer) timer = setTimeout(go, Math.max(0, last + 1000 - performance.now())); },
        stop() { clearTimeout(timer); },
    };
}

// ---------------------------------------------------------------------------------------------- player

function player(recording, onMove) {
    const button = (label, name) => element("button", { type: "button", "aria-label": label, title: label }, icon(name));
    const back = button("one step back", "back"), forward = button("one step forward", "forward"), play = button("play", "play");
    const range = element("input", { type: "range", min: 0, max: recording.length, step: 1, "aria-label": "position in the recording" });
    const speed = element("select", { "aria-label": "steps a second" },
        ...SPEEDS.map(value => element("option", { value }, `${value} steps/s`)));
    const wanted = recording.length / 12;
    speed.value = SPEEDS.find(value => value >= wanted) ?? SPEEDS.at(-1);
    const node = element("div", { class: "labkit-controls" }, back, play, forward, range, speed);
    let playing = false, untouched = true, exact = 0, last = 0, request = 0;

    function move(position) {
        recording.seek(Math.max(0, Math.min(recording.length, position)));
        range.value = recording.position;
        onMove();
        range.setAttribute("aria-valuetext", `step ${recording.blocks.header[1]}, ${recording.position} of ${recording.length}`);
    }
    function setPlaying(value) {
        playing = value;
        play.replaceChildren(icon(playing ? "pause" : "play"));
        for (const name of ["aria-label", "title"]) play.setAttribute(name, playing ? "pause" : "play");
        cancelAnimationFrame(request);
        if (!playing) return;
        if (untouched || recording.position === recording.length) move(0);
        [exact, last, untouched] = [recording.position, performance.now(), false];
        request = requestAnimationFrame(tick);
    }
    function tick(now) {
        exact += (Math.max(0, now - last) / 1000) * Number(speed.value);
        last = now;
        if (Math.floor(exact) > recording.position) move(Math.floor(exact));
        if (recording.position === recording.length) setPlaying(false);
        else request = requestAnimationFrame(tick);
    }
    function jump(position) {
        setPlaying(false);
        untouched = false;
        move(position);
    }
    play.addEventListener("click", () => setPlaying(!playing));
    back.addEventListener("click", () => jump(recording.position - 1));
    forward.addEventListener("click", () => jump(recording.position + 1));
    range.addEventListener("input", () => jump(Number(range.value)));
    return { node, start: () => move(recording.peak), stop: () => cancelAnimationFrame(request) };
}

// ---------------------------------------------------------------------------------------------- the widget

function render({ model, el }) {
    const palette = model.get("_palette"), blockSize = model.get("block_size"), count = model.get("num_blocks");
    const blocks = new Blocks(count);
    const data = words(model.get("_recording"));
    const recording = data.length ? new Recording(data, blocks) : null;
    const stride = model.get("_steps_per_frame");

    const title = element("div", { class: "labkit-title" });
    const canvas = element("canvas", { class: "labkit-canvas", role: "img", tabindex: 0 });
    const tooltip = element("div", { class: "labkit-tooltip", hidden: "" });
    const stage = element("div", { class: "labkit-stage" }, canvas, tooltip);
    const status = element("div", { class: "labkit-hidden", "aria-live": "polite" });
    const split = splitLine(), legend = requestLegend(palette, () => model.get("_request_ids"));
    const picture = new Picture(canvas, blocks, blockSize, palette);
    const controls = recording && player(recording, schedule);
    // Keys pressed in here are for the controls, not for the notebook.
    const root = element("div", { class: "labkit-block-table", "data-lm-suppress-shortcuts": "true" }, title, stage, split.node,
        ...(controls ? [controls.node] : []), legend.node, status);
    if (model.get("caption")) root.prepend(element("div", { class: "labkit-caption" }, model.get("caption")));
    el.append(root);

    let scheduled = 0;
    function schedule() { scheduled ||= requestAnimationFrame(show); }

    function slots() {
        const [, , live, referenced, cached] = blocks.header;
        return [live, referenced * blockSize - live, cached * blockSize, (count - referenced - cached) * blockSize];
    }

    function show() {
        scheduled = 0;
        if (!recording) {
            const [base, frame] = [words(model.get("_base")), words(model.get("_frame"))];
            blocks.clear();
            blocks.applyRecords(base, 0, base.length / RECORD);
            if (frame.length) blocks.applyFrame(frame, 0);
        }
        picture.draw();
        const [, step, , referenced, , running, waiting, milliseconds] = blocks.header;
        const every = stride > 1 ? ` (every ${stride}th step is shown)` : "";
        title.textContent = `Step ${number.format(step)}${every} · ${(milliseconds / 1000).toFixed(2)} s · `
            + `${number.format(referenced)} of ${number.format(count)} blocks held · ${running} running, ${waiting} waiting`;
        split.show(slots());
        legend.show(blocks);
        canvas.dataset.step = step;
        canvas.dataset.cell = picture.cell;
        canvas.dataset.columns = picture.columns;
        if (picture.marked >= 0) point(picture.marked);
        announce.call();
    }

    const announce = atMostOnceASecond(() => {
        const [live, fragmentation, cached, free] = slots().map(value => number.format(value));
        const text = `${title.textContent}. Of ${number.format(count * blockSize)} slots ${live} hold live tokens, `
            + `${fragmentation} are internal fragmentation, ${cached} are cached, ${free} are free.`;
        canvas.setAttribute("aria-label", `Block table of ${count} blocks of ${blockSize} tokens. ${text}`);
        status.textContent = picture.marked >= 0 ? tooltip.innerText : text;
    });

    // ------------------------------------------------------------------ pointing at a block

    function describe(block) {
        const owner = blocks.request[block], refCnt = blocks.refCnt(block);
        if (!owner) return [`block ${block}`, "free"];
        const name = model.get("_request_ids")[owner - 1] ?? "?";
        const lines = [`block ${block}`, `${refCnt ? "request" : "cached, last held by"} ${name}`];
        lines.push(`logical block ${blocks.logical[block]}`, `${blocks.tokens(block)} of ${blockSize} tokens`, `ref_cnt ${refCnt}`);
        if (refCnt && blocks.isCached(block)) lines.push("in the prefix cache");
        return lines;
    }

    function point(block) {
        picture.marked = block;
        tooltip.hidden = block < 0;
        if (block < 0) return;
        tooltip.innerText = describe(block).join("\n");
        const { cell, columns } = picture;
        const x = (block % columns) * cell, y = Math.floor(block / columns) * cell;
        const left = x + cell + 8 + tooltip.offsetWidth <= stage.clientWidth ? x + cell + 8 : Math.max(0, x - tooltip.offsetWidth - 8);
        tooltip.style.left = `${left}px`;
        tooltip.style.top = `${y + cell + 4}px`;
    }

    function pointAndDraw(block) {
        if (block === picture.marked) return;
        point(block);
        schedule();
    }

    canvas.addEventListener("pointermove", event => pointAndDraw(picture.at(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => pointAndDraw(-1));
    canvas.addEventListener("blur", () => pointAndDraw(-1));
    canvas.addEventListener("keydown", event => {
        if (event.key === "Escape") return pointAndDraw(-1);
        const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -picture.columns, ArrowDown: picture.columns };
        if (!(event.key in moves)) return;
        event.preventDefault();
        const next = picture.marked < 0 ? 0 : picture.marked + moves[event.key];
        if (next >= 0 && next < count) pointAndDraw(next);
    });

    // ------------------------------------------------------------------ what else can change

    const sizes = new ResizeObserver(() => {
        if (!stage.clientWidth) return;
        picture.layOut(stage.clientWidth);
        show();
    });
    sizes.observe(stage);
    const theme = new MutationObserver(schedule);
    theme.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name", "class"] });
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", schedule);
    if (!recording) model.on("change:_frame", schedule);
    else controls.start();

    return () => {
        sizes.disconnect();
        theme.disconnect();
        dark.removeEventListener("change", schedule);
        model.off("change:_frame", schedule);
        cancelAnimationFrame(scheduled);
        controls?.stop();
        announce.stop();
    };
}

export default { render };
