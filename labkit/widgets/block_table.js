// A KV block pool on a canvas: a player for whole traces (no kernel needed once they are here), or a live view.

import { Recording, sharersOf, words } from "./block_cells.js";
import { Player, stepAxis, timeAxis } from "./block_player.js";
import { element, View } from "./block_view.js";

async function render({ model, el }) {
  const stop = new AbortController();
  const root = element("div", "labkit-blocks");
  root.dataset.lmSuppressShortcuts = "true"; // else JupyterLab takes the keys for its shortcuts ...
  root.addEventListener("keydown", (event) => event.stopPropagation()); // ... or its notebook does
  el.append(root);

  const tracks = model.get("tracks");
  const live = { title: "", num_blocks: model.get("num_blocks"), block_size: model.get("block_size"), is_arena: false };
  const names = () => model.get("request_ids");
  const views = (tracks.length ? tracks : [live]).map((pool) => new View(pool, model.get("styles"), names, stop.signal));
  const pools = element("div", "labkit-pools");
  pools.append(...views.map((view) => view.root));
  root.append(pools);

  const showNow = () => {
    const sharers = sharersOf(words(model.get("sharers")));
    views[0].show(words(model.get("cells")), model.get("status"), () => sharers);
  };
  if (tracks.length) {
    const recordings = await Promise.all(tracks.map((track) => Recording.of(track)));
    const axis = recordings.length > 1 ? timeAxis(recordings) : stepAxis(recordings[0]);
    if (!stop.signal.aborted) pools.before(new Player(views, recordings, axis, model.get("events"), stop.signal).root);
  } else {
    model.on("change", showNow);
    showNow();
  }
  return () => {
    model.off("change", showNow);
    stop.abort();
    root.remove();
  };
}

export default { render };
