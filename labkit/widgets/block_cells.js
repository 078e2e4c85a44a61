// A KV block pool as numbers. One block is a cell of three words, as described in block_cells.py.

export const tokensOf = (word) => word & 0xffff;
export const refCntOf = (word) => (word >>> 16) & 0x3fff;
export const isInFlight = (word) => ((word >>> 30) & 1) === 1; // a copy to or from host memory holds it
export const isCached = (word) => word >>> 31 === 1;

export const words = (view) => new Uint32Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));

export async function inflatedColumns(view, count) {
  const stream = new Blob([view]).stream().pipeThrough(new DecompressionStream("deflate"));
  const all = new Uint32Array(await new Response(stream).arrayBuffer());
  const rows = all.length / count;
  return Array.from({ length: count }, (_, i) => all.subarray(i * rows, (i + 1) * rows));
}

// Who holds each shared block, block -> set of requests, from pairs.
export function sharersOf(pairs) {
  const sharers = new Map();
  for (let i = 0; i < pairs.length; i += 2) {
    if (!sharers.has(pairs[i])) sharers.set(pairs[i], new Set());
    sharers.get(pairs[i]).add(pairs[i + 1]);
  }
  return sharers;
}

// The cells after any step. Copies of the cells are kept every so often on the way, to go back quickly.
export class Recording {
  constructor(numBlocks, changes, sharing, steps) {
    this.changes = changes;
    this.sharing = sharing;
    [this.ends, this.numbers, this.milliseconds, this.running, this.waiting, this.referenced, this.events] = steps;
    this.length = this.ends.length;
    this.spacing = Math.max(16, Math.ceil(this.length / 32));
    this.cells = new Uint32Array(3 * numBlocks);
    this.saved = [this.cells.slice()];
    this.position = 0; // steps that the cells have behind them
  }

  static async of(track) {
    const columns = [inflatedColumns(track.changes, 4), inflatedColumns(track.sharing, 3), inflatedColumns(track.steps, 7)];
    return new Recording(track.num_blocks, ...(await Promise.all(columns)));
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

  // Steps that have ended by then.
  positionAt(milliseconds) {
    let [low, high] = [0, this.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.milliseconds[middle] <= milliseconds) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  status(position) {
    return position ? [this.numbers, this.running, this.waiting].map((column) => column[position - 1]) : [0, 0, 0];
  }

  // Who holds each shared block where the cells are. Read through from the start: asked for when somebody points.
  sharers() {
    const sharers = new Map();
    const [positions, blocks, requests] = this.sharing;
    for (let i = 0; i < positions.length && positions[i] <= this.position; i++) {
      if (!sharers.has(blocks[i])) sharers.set(blocks[i], new Set());
      const leaves = requests[i] >>> 31;
      if (leaves) sharers.get(blocks[i]).delete(requests[i] & 0x7fffffff);
      else sharers.get(blocks[i]).add(requests[i]);
    }
    return sharers;
  }
}

export function summarise(cells, blockSize) {
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
