// The page's decisions, tried without a browser: node page_logic.mjs PAGE/js. The first law that does not hold ends it.
import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const base = pathToFileURL(`${process.argv[2]}/`);
const load = (name) => import(new URL(name, base));
const { ago, bytes, count, duration, exact, iso, number, shorten } = await load("format.js");
const { judge, lags, replicasInWords, stale, staleness } = await load("fleet_facts.js");
const { alone, attempts, curveData, nearest, standing } = await load("charts/curve_data.js");
const { everyCheckpoint, inWords, markInWords, placeOf, timelineModel } = await load("charts/timeline_model.js");
const { layout, markAt, placeOfMark, stepAt, ticks, xOf } = await load("charts/timeline_draw.js");

let seed = 7;
const random = (most) => {
  seed = (seed * 1103515245 + 12345) % 2147483648;
  return seed % most;
};

// Whatever a document holds in a number's place, words come out.
for (const odd of [null, undefined, "nan", "inf", "-inf", "", "x", NaN, Infinity, -Infinity, {}, [], true, 1e300, -1e300, 2 ** 53, 0, -0.00001]) {
  for (const said of [count(odd), number(odd), bytes(odd), duration(odd), ago(odd, 1e9), exact(odd), shorten(String(odd))]) {
    assert.equal(typeof said, "string");
    assert.ok(!said.includes("undefined") || String(odd) === "undefined", said);
  }
  iso(odd);
}
assert.equal(number("nan"), "NaN");
assert.equal(bytes(1536), "1.5 KiB");
assert.equal(duration(5400), "1.5 h");
assert.equal(ago(100, 280), "3 min ago");
assert.equal(Array.from(shorten("é".repeat(4000), 60)).length, 59);

// Every sample either counts now or was left behind, never both; what counts now rises in steps.
for (let round = 0; round < 300; round += 1) {
  const doc = { step: [], began: [], loss: [] };
  let step = 0;
  for (let i = random(60); i > 0; i -= 1) {
    if (random(7) === 0 && doc.step.length) {
      step = Math.max(0, step - random(40));
      if (random(2)) doc.began.push(doc.step.length);
    }
    step += 1 + random(3);
    doc.step.push(step);
    doc.loss.push([1.5, "nan", null, "inf", "-inf", 2][random(6)]);
  }
  const parts = attempts(doc);
  assert.deepEqual(parts.flatMap(([first, end]) => Array.from({ length: end - first }, (_, i) => first + i)), doc.step.map((_, i) => i));
  const { now, left } = standing(doc);
  for (let i = 1; i < now.length; i += 1) assert.ok(doc.step[now[i]] > doc.step[now[i - 1]]);
  const all = new Set([...now, ...left.flat()]);
  if (parts.length <= 24) assert.equal(all.size, doc.step.length);
  if (parts.length) assert.ok(now.includes(doc.step.length - 1), "the newest sample counts");
  const found = curveData(doc, "loss", { now, left });
  if (found === null) continue;
  const [steps, ...rows] = found.data;
  for (let i = 1; i < steps.length; i += 1) assert.ok(steps[i] > steps[i - 1]);
  for (const row of rows) assert.equal(row.length, steps.length);
  assert.equal(found.edges.length, [...all].filter((i) => typeof doc.loss[i] === "string").length);
}
assert.deepEqual(alone([1, null, 2, undefined, null, 3, undefined, 4, null, undefined, 5]), [0, 2, 10]);
assert.deepEqual([alone([undefined, 7]), alone([]), alone([null])], [[1], [], []]);
assert.equal(curveData({ step: [1], loss: [null] }, "loss", { now: [0], left: [] }), null);
for (const value of [-5, 0, 3, 4, 99]) {
  const list = [0, 2, 4, 8, 16];
  const least = Math.min(...list.map((one) => Math.abs(one - value)));
  assert.equal(Math.abs(list[nearest(list, value)] - value), least);
}

// A timeline shows every checkpoint that has a step, once, and each can be pointed at.
const outcomes = ["good", "bad", "suspect", "incomplete", "pending", "something new"];
const generation = (i) => ({
  name: `series-#/${i}.1`, id: `${i}.1`, path: `series-${i}`, series: random(3) ? "series-#" : "<b>other</b>", outcome: outcomes[random(6)],
  step: random(9) ? i * 10 : [null, [1, 2], undefined][random(3)], in_place: random(2) > 0, aside: ["", "trash", "quarantine"][random(3)],
  kept: random(2) ? "copy" : "", replicated: random(2), pinned: random(5) === 0, good: true, reason: "",
});
for (let round = 0; round < 50; round += 1) {
  const page = { run: { known_good_step: 10 }, generations: Array.from({ length: random(40) }, (_, i) => generation(i)), pending: [{ path: "new", series: "series-#", step: 5, reason: "new" }], incidents: [{ name: "a", step: 30, onset: null, went_back_to: 10, open: true }] };
  const model = timelineModel(page);
  assert.equal(model.marks.length + model.without, everyCheckpoint(page).length);
  assert.ok(inWords(model).length > 10);
  const view = { min: -10, max: 400, hover: null };
  const scene = { model, places: layout(model), view, width: 4000 };
  for (const mark of model.marks) {
    assert.ok(markInWords(mark).includes(mark.generation.outcome));
    assert.ok(["in place", "kept copy", "quarantine", "trash", "gone"].includes(placeOf(mark.generation)));
    const { x, y } = placeOfMark(mark, scene);
    assert.equal(markAt(x, y, scene).step, mark.step);
    assert.ok(Math.abs(stepAt(xOf(mark.step, view, 4000), view, 4000) - mark.step) < 1e-6);
  }
}
// Saves under one name stand where they say they are.
const over = [1, 2, 3].map((save) => ({ ...generation(0), name: `ckpt.pt/-.${save}`, id: `-.${save}`, series: "ckpt.pt", step: null, updates: 250 * save }));
const overModel = timelineModel({ run: {}, generations: over, pending: [], incidents: [] });
assert.deepEqual([overModel.marks.map((mark) => mark.step), overModel.without, overModel.steps], [[250, 500, 750], 0, [250, 750]]);
for (const [min, max] of [[0, 1], [0, 10], [-3, 2 ** 53], [999_990, 1_000_000]]) assert.ok(ticks({ min, max }, 800).length <= 12);
for (const width of [100, 400, 1900]) assert.ok(ticks({ min: 0, max: 5000 }, width).every((step) => step >= 0 && step <= 5000));

// A run that nobody needs to look at never stands above one that somebody does.
const now = 1e9;
const runs = Array.from({ length: 200 }, (_, i) => ({
  id: String(i), name: `run ${i}`, url: "/x", state: ["guarded", "waiting", "failing"][random(3)], protected: random(2) > 0, training: random(2) > 0,
  known_good_at: random(3) ? now - random(5000) : null, known_good_step: 5, save_interval: [null, 0, 600][random(3)], newest_outcome: outcomes[random(5)],
  replicas: random(3), replicas_behind: random(2), replicas_unknown: random(3), trouble: random(2) ? "it is gone" : null, newest_at: random(2) ? now - 50 : null, at_risk: random(2) ? "much" : null, safe_at: null, began_at: random(2) ? now - 50 : null, last_incident: random(2) ? { step: random(10), open: random(2) > 0 } : null,
}));
const judged = judge(runs, now);
assert.equal(judged.length, runs.length);
for (let i = 1; i < judged.length; i += 1) assert.ok(judged[i - 1].judged.weight >= judged[i].judged.weight);
for (const run of judged) {
  if (!run.protected && run.state === "guarded") assert.equal(run.judged.word, "Not protected");
  // What was there and is not is gone; what is looked through for the first time is judged by what is known so far.
  assert.equal(run.judged.word === "Gone", run.state === "waiting" && run.trouble !== null && run.newest_at !== null);
  assert.equal(run.judged.word === "Not begun", run.state === "waiting" && run.newest_at === null);
  // A replica of which nobody knows what it holds is never up to date.
  if (run.replicas && lags(run)) assert.ok(!replicasInWords(run).includes("up to date"));
  // The look says what the words say: only what needs nobody looks good, and what is not protected never does.
  assert.equal(run.judged.look === "good", run.judged.word === "Protected");
  if (run.judged.weight > 1) assert.ok(["warn", "bad"].includes(run.judged.look));
  if (stale(run, now)) assert.ok(staleness(run, now) > 3 && run.training);
}

// An id is told as a step and a save.
const { idText } = await load("text.js");
assert.deepEqual(["300.1", "300.4", "-.2", "1-200.1", null, "odd"].map(idText), ["step 300", "step 300, save 4 of it", "save 2", "step 1-200", "–", "–"]);
