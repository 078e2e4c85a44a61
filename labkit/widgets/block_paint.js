// Painting a pool, in device pixels.

import { isInFlight, refCntOf, tokensOf } from "./block_cells.js";

const MAX_PITCH = 32; // CSS pixels from one block to the next
const MAX_HEIGHT = 384;

export function layOut(numBlocks, width, ratio) {
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

export function inks(styles) {
  return styles.map(({ fill, hatch }) => ({
    full: pixel(channels(fill)),
    hatch: hatch && pixel(channels(hatch)),
    pale: pixel(channels(fill), 90),
    reserved: pixel(channels(fill), 70),
  }));
}

// Whether a block and the next are neighbours in the table of one request.
function goesOn(cells, block) {
  const at = 3 * block;
  const isSame = cells[at] !== 0 && cells[at + 3] === cells[at] && cells[at + 4] === cells[at + 1] + 1;
  return isSame && refCntOf(cells[at + 2]) > 0 && refCntOf(cells[at + 5]) > 0;
}

// `outlined` says of a block whether it is; `joinsRuns`: no gap between blocks of one run.
export function paintCells(pixels, stride, { pitch, columns, side }, cells, { blockSize, palette, text, outlined, joinsRuns }) {
  const empty = pixel(text, 30);
  const outline = pixel(text);
  const [black, white] = [pixel([0, 0, 0]), pixel([255, 255, 255])];
  const spacing = Math.max(4, Math.round(side / 4)); // of hatch lines
  let comesOn = false; // the block before this one is of the same run
  for (let block = 0; block < cells.length / 3; block++) {
    const request = cells[3 * block];
    const word = cells[3 * block + 2];
    const corner = Math.floor(block / columns) * pitch * stride + (block % columns) * pitch;
    const box = (x, y, w, h, colour) => {
      for (let row = y; row < y + h; row++) pixels.fill(colour, corner + row * stride + x, corner + row * stride + x + w);
    };
    const isRun = comesOn;
    const isFollowed = (comesOn = joinsRuns && goesOn(cells, block));
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
    const width = isFollowed && (block + 1) % columns ? pitch : side;
    const tokens = tokensOf(word);
    const height = tokens ? Math.max(1, Math.round((side * tokens) / blockSize)) : 0;
    box(0, 0, width, side - height, ink.reserved);
    box(0, side - height, width, height, ink.full);
    if (ink.hatch && side >= 4) {
      for (let y = side - height; y < side; y++)
        for (let x = (spacing - (y % spacing)) % spacing; x < width; x += spacing) pixels[corner + y * stride + x] = ink.hatch;
    }
    const frame = (line, colour, closes) => {
      box(0, 0, width, line, colour);
      if (closes) box(0, side - line, width, line, colour);
      if (!isRun) box(0, 0, line, side, colour);
      if (!isFollowed) box(side - line, 0, line, side, colour);
    };
    if (side >= 8) frame(1, ink.full, joinsRuns);
    if (refCnt > 1 && side >= 5) {
      const mark = Math.max(3, Math.round(side / 3));
      box(side - mark, 0, mark, mark, black);
      if (mark > 2) box(side - mark + 1, 1, mark - 2, mark - 2, white);
    }
    if (side >= 5 && outlined(block)) frame(side >= 16 ? 2 : 1, outline, true);
  }
}
