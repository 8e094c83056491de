// What a timeline shows, from a run's document. Pure.
import { count, isFinite, many } from "../format.js";

const MOST_ROWS = 3; // marks under each other at one step: later ones lie on the last row
const WEIGHT = { good: 0, pending: 1, incomplete: 2, suspect: 3, bad: 4 };

/** Where a checkpoint is, in a word: "in place", "kept copy", "quarantine", "trash" or "gone". */
export function placeOf(generation) {
  if (generation.aside === "quarantine") return "quarantine";
  if (generation.in_place) return "in place";
  if (generation.aside === "trash") return "trash";
  return generation.kept ? "kept copy" : "gone";
}

/** How often the bytes of a step were saved anew, from 1; 0 for a save that waits. */
export const again = (generation) => Number(String(generation.id ?? "").split(".").at(-1)) || 0;

/** The checkpoints that a run's document names, and the saves that wait for their first verdict. */
export function everyCheckpoint(page) {
  const waiting = (page.pending ?? []).map((save) => ({
    name: null, path: save.path, series: save.series, step: save.step, outcome: "pending", in_place: true, waiting: save.reason,
    kept: "", aside: "", replicated: 0, pinned: false, bytes: null, saved_at: null, id: null,
  }));
  return [...page.generations, ...waiting];
}

/** The step of a checkpoint: that of its name, or the updates that it says it has behind it. */
export const stepOf = (generation) => (isFinite(generation.step) ? generation.step : generation.updates);

/**
 * Return {lanes, marks, steps: [first, last] or null, without, best}: a lane for each series, and in it a mark for each
 * checkpoint that has a step. The heaviest outcome is drawn last. `without`: how many have no step. `best`: the
 * known-good one.
 */
export function timelineModel(page) {
  const lanes = new Map();
  let without = 0;
  for (const generation of everyCheckpoint(page)) {
    const step = stepOf(generation);
    if (!isFinite(step)) {
      without += 1;
      continue;
    }
    if (!lanes.has(generation.series)) lanes.set(generation.series, { series: String(generation.series), marks: [], rows: 1 });
    lanes.get(generation.series).marks.push({ generation, step, row: 0, place: placeOf(generation) });
  }
  for (const lane of lanes.values()) {
    lane.marks.sort((a, b) => a.step - b.step || again(a.generation) - again(b.generation));
    lane.marks.forEach((mark, i) => {
      const before = lane.marks[i - 1];
      if (before?.step === mark.step) mark.row = Math.min(before.row + 1, MOST_ROWS - 1);
      lane.rows = Math.max(lane.rows, mark.row + 1);
      mark.lane = lane;
    });
    lane.heaviest = [...lane.marks].sort((a, b) => (WEIGHT[a.generation.outcome] ?? 1) - (WEIGHT[b.generation.outcome] ?? 1));
    lane.kept = lane.marks.some(({ generation }) => generation.kept);
    lane.replicated = lane.marks.some(({ generation }) => generation.replicated);
  }
  const marks = [...lanes.values()].flatMap((lane) => lane.marks);
  marks.sort((a, b) => a.step - b.step || a.row - b.row);
  const incidents = page.incidents.filter((incident) => isFinite(incident.step) || isFinite(incident.onset));
  const steps = [
    ...marks.map((mark) => mark.step),
    ...incidents.flatMap((incident) => [incident.step, incident.onset, incident.went_back_to].filter(isFinite)),
  ];
  const first = steps.reduce((a, b) => Math.min(a, b), Infinity);
  const last = steps.reduce((a, b) => Math.max(a, b), -Infinity);
  const good = marks.filter(({ step, generation }) => step === page.run.known_good_step && generation.good);
  return { lanes: [...lanes.values()], marks, incidents, without, best: good.at(-1) ?? null, steps: steps.length ? [first, last] : null };
}

/** The whole timeline in a sentence or two, for who does not see it. */
export function inWords(model) {
  if (!model.marks.length) return "There is no checkpoint with a step yet.";
  const tally = {};
  for (const { generation } of model.marks) tally[generation.outcome] = (tally[generation.outcome] ?? 0) + 1;
  const parts = Object.entries(tally).map(([outcome, n]) => `${count(n)} ${outcome}`);
  const back = model.incidents.filter((incident) => isFinite(incident.step) && isFinite(incident.went_back_to));
  const arrows = back.slice(0, 5).map((incident) => `from step ${count(incident.step)} back to ${count(incident.went_back_to)}`);
  const span = `from step ${count(model.marks[0].step)} to ${count(model.marks.at(-1).step)}`;
  const rolled = arrows.length ? ` Rolled back ${arrows.join(", ")}.` : "";
  return `${many(model.marks.length, "checkpoint")} ${span}: ${parts.join(", ")}.${rolled} The table below lists them.`;
}

/** Where a checkpoint and its copies are, in a few words each. */
export function whereabouts({ generation, place }) {
  return [
    { quarantine: "in quarantine", trash: "in the trash" }[place] ?? place,
    generation.kept && `kept as a ${generation.kept === "link" ? "hard link" : generation.kept}`,
    generation.replicated && `in ${many(generation.replicated, "replica")}`,
    generation.pinned && "pinned",
    generation.waiting,
  ].filter(Boolean);
}

/** One checkpoint in a sentence. */
export const markInWords = (mark) => `Step ${count(mark.step)}: ${[mark.generation.outcome, ...whereabouts(mark)].join(", ")}`;
