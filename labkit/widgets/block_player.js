// Play, pause, scrub, and jump from event to event: one set of controls for one recording or several.

import { element } from "./block_view.js";

// What the slider counts: the steps of one recording ...
export function stepAxis(recording) {
  const { numbers, milliseconds, length } = recording;
  return {
    name: "step",
    first: 1,
    start: 1,
    last: length,
    grain: 1,
    positions: (at) => [at],
    following: (at, by) => at + by,
    moments: (bit) => [...recording.events.keys()].filter((i) => recording.events[i] & bit).map((i) => i + 1),
    text: (at) => `step ${numbers[at - 1]} of ${numbers.at(-1)}`,
    label: (at) => `step ${numbers[at - 1]} of ${numbers.at(-1)} · ${(milliseconds[at - 1] / 1000).toFixed(2)} s`,
    speeds: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].map((speed) => [speed, `${speed} steps/s`]),
  };
}

// ... or, for several, the milliseconds since their first steps began.
export function timeAxis(recordings) {
  const last = Math.max(1, ...recordings.map((recording) => recording.milliseconds.at(-1)));
  const seconds = (milliseconds) => `${(milliseconds / 1000).toFixed(2)} s`;
  const ends = (wanted) =>
    [...new Set(recordings.flatMap(({ milliseconds, events }) => [...milliseconds].filter((_, i) => wanted(events[i]))))].sort((a, b) => a - b);
  const allEnds = ends(() => true);
  return {
    name: "time",
    first: 0,
    start: allEnds[0],
    last,
    grain: Math.max(1, Math.round(last / 1000)),
    positions: (at) => recordings.map((recording) => recording.positionAt(at)),
    following: (at, by) => (by > 0 ? allEnds.find((end) => end > at) : allEnds.findLast((end) => end < at)) ?? at,
    moments: (bit) => ends((mask) => mask & bit),
    text: seconds,
    label: (at) => `${seconds(at)} of ${seconds(last)}`,
    speeds: [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100].map((speed) => [1000 * speed, `${speed} x real time`]),
  };
}

// A range input reaches only values on its steps: its end is the first one that is not before the last moment.
function onGrid({ first, last, grain }) {
  return first + Math.ceil((last - first) / grain) * grain;
}

const USAGE_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];

export class Player {
  constructor(views, recordings, axis, eventNames, stopped) {
    Object.assign(this, { views, recordings, axis });
    this.root = element("div", "labkit-player");
    this.slider = element("input", "labkit-slider", { type: "range", min: axis.first, max: onGrid(axis), step: axis.grain });
    this.slider.ariaLabel = axis.name;
    this.slider.addEventListener("input", () => this.jump(Number(this.slider.value)));
    this.toggle = this.button("▶ Play", "play", () => (this.playing ? this.pause() : this.play()));
    this.speed = element("select", "labkit-speed", { ariaLabel: "speed" });
    this.speed.append(...axis.speeds.map(([speed, text]) => new Option(text, speed)));
    const wanted = (axis.last - axis.first) / 12; // all of it in twelve seconds
    this.speed.value = (axis.speeds.find(([speed]) => speed >= wanted) ?? axis.speeds.at(-1))[0];
    this.label = element("output", "labkit-label");
    this.usage = element("canvas", "labkit-usage", { ariaHidden: "true" });
    const track = element("div", "labkit-track");
    track.append(this.usage, this.slider);
    const controls = element("div", "labkit-controls");
    controls.append(
      this.button("◀", "step back", () => this.jump(axis.following(this.at, -1))),
      this.toggle,
      this.button("▶|", "step forward", () => this.jump(axis.following(this.at, 1))),
      track,
      this.label,
      this.speed
    );
    this.root.append(controls, this.eventControls(eventNames));
    stopped.addEventListener("abort", () => this.pause());
    this.drawUsage();
    this.go(axis.start);
  }

  button(text, label, onclick) {
    return element("button", "labkit-button", { type: "button", textContent: text, ariaLabel: label, title: label, onclick });
  }

  // A menu of what happens in the recordings, and buttons to the next and the previous time.
  eventControls(names) {
    const kinds = names.map((name, i) => [name, this.axis.moments(1 << i)]).filter(([, moments]) => moments.length);
    this.kind = element("select", "labkit-kind", { ariaLabel: "event", onchange: () => this.drawUsage() });
    this.kind.append(...kinds.map(([name, moments], i) => new Option(`${name} (${moments.length})`, i)));
    this.moments = () => kinds[this.kind.value]?.[1] ?? [];
    const to = (moment) => moment !== undefined && this.jump(moment);
    const row = element("div", "labkit-controls labkit-events", { hidden: !kinds.length });
    row.append(
      element("span", "", { textContent: "Jump to" }),
      this.kind,
      this.button("◀ previous", "previous event", () => to(this.moments().findLast((moment) => moment < this.at))),
      this.button("next ▶", "next event", () => to(this.moments().find((moment) => moment > this.at)))
    );
    return row;
  }

  go(at) {
    const { axis } = this;
    this.at = Math.min(axis.last, Math.max(axis.first, at));
    this.slider.value = this.at;
    this.slider.ariaValueText = axis.text(this.at);
    this.label.textContent = axis.label(this.at);
    axis.positions(this.at).forEach((position, i) => {
      const recording = this.recordings[i];
      this.views[i].show(recording.seek(position), recording.status(position), () => recording.sharers());
    });
  }

  jump(at) {
    this.pause();
    this.go(Math.min(at, this.axis.last));
  }

  play() {
    if (this.at === this.axis.last) this.go(this.axis.first);
    this.playing = true;
    this.writeToggle();
    let [last, owed] = [performance.now(), 0];
    const tick = (now) => {
      if (!this.playing) return;
      owed += ((now - last) / 1000) * Number(this.speed.value);
      last = now;
      if (owed >= 1) this.go(this.at + Math.floor(owed));
      owed %= 1;
      if (this.at === this.axis.last) this.pause();
      else this.ticking = requestAnimationFrame(tick);
    };
    this.ticking = requestAnimationFrame(tick);
  }

  pause() {
    this.playing = false;
    cancelAnimationFrame(this.ticking);
    this.writeToggle();
  }

  writeToggle() {
    this.toggle.textContent = this.playing ? "❚❚ Pause" : "▶ Play";
    this.toggle.ariaLabel = this.toggle.title = this.playing ? "pause" : "play";
  }

  // Behind the slider: blocks in use over all of it, a line for each where there are several; ticks for the chosen event.
  drawUsage() {
    const [width, height] = [600, 24];
    Object.assign(this.usage, { width, height });
    const pen = this.usage.getContext("2d");
    const { first, last } = this.axis;
    const isAlone = this.recordings.length === 1;
    pen.globalAlpha = 0.5;
    for (let x = 0; x < width; x++) {
      this.axis.positions(isAlone ? 1 + Math.floor((x * last) / width) : first + (x * (last - first)) / width).forEach((position, i) => {
        pen.fillStyle = USAGE_COLOURS[i % USAGE_COLOURS.length];
        const share = (position && this.recordings[i].referenced[position - 1]) / this.views[i].pool.num_blocks;
        if (isAlone) pen.fillRect(x, height * (1 - share), 1, height * share);
        else pen.fillRect(x, (height - 3) * (1 - share), 1, 3);
      });
    }
    pen.globalAlpha = 1;
    pen.fillStyle = "#d55e00";
    for (const moment of this.moments()) pen.fillRect(Math.round(((moment - first) / Math.max(1, last - first)) * (width - 1)), 0, 1, 6);
  }
}
