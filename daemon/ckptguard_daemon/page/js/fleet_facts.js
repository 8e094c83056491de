// What the facts about a run mean to its reader. Pure.
import { count, duration, isFinite } from "./format.js";

/** Save intervals after which a known-good checkpoint is late: as the daemon says whether a run trains. */
export const LATE = 3;

/** The age of the known-good checkpoint in save intervals, or null. */
export function staleness(run, now) {
  if (!isFinite(run.known_good_at) || !isFinite(run.save_interval) || run.save_interval <= 0) return null;
  return Math.max(0, now - run.known_good_at) / run.save_interval;
}

/** The same in words: "late: 3 d, usually 1 h"; null if nobody knows. */
export function stalenessInWords(run, now) {
  if (staleness(run, now) === null) return null;
  const age = duration(Math.max(0, now - run.known_good_at));
  return `${stale(run, now) ? "late: " : ""}${age}, usually ${duration(run.save_interval)}`;
}

/** True if a run trains and its known-good checkpoint is late. A run that rests grows no older. */
export const stale = (run, now) => run.training && (staleness(run, now) ?? 0) > LATE;

/** True if a replica lacks checkpoints, or nobody knows what it holds. */
export const lags = (run) => run.replicas_behind > 0 || run.replicas_unknown > 0;

/** How far the replicas of a run are. */
export function replicasInWords(run) {
  if (!run.replicas) return "none";
  const behind = run.replicas_behind ? `${count(run.replicas_behind)} behind` : null;
  const unknown = run.replicas_unknown ? `${run.replicas_unknown} of ${run.replicas} not known` : null;
  return [behind, unknown].filter(Boolean).join(", ") || (run.replicas === 1 ? "up to date" : `${run.replicas} up to date`);
}

/** True if training went into an incident, and nothing good came after it. */
const unsettled = ({ last_incident: last, known_good_step: good }) => Boolean(last?.open) && (good === null || (last.step ?? Infinity) > good);

/** Return {word, look, weight}: the state of a run in a word, how that looks, and how much it needs somebody. */
function standing(run, now) {
  if (run.state === "ended") return { word: "Ended", look: "none", weight: 0 };
  if (run.state === "waiting" && !isFinite(run.newest_at)) return { word: "Not begun", look: "none", weight: 0 };
  if (run.state === "waiting" && run.trouble) return { word: "Gone", look: "bad", weight: 5 };
  if (run.state === "failing") return { word: "Cannot be read", look: "bad", weight: 4 };
  if (!run.protected) return { word: "Not protected", look: "bad", weight: 5 };
  if (run.newest_outcome === "bad") return { word: "Newest is bad", look: "warn", weight: 3 };
  if (unsettled(run)) return { word: "Open incident", look: "warn", weight: 2 };
  if (stale(run, now)) return { word: "Known-good is late", look: "warn", weight: 2 };
  return { word: "Protected", look: "good", weight: lags(run) ? 1 : 0 };
}

/** Return the runs, those first that need somebody most. Each gets its standing and the text to search in it. */
export function judge(runs, now) {
  for (const run of runs) {
    const since = run.safe_at ?? run.began_at;
    run.text ??= `${run.name}\n${run.url}\n${run.id}`.toLowerCase();
    run.judged = standing(run, now);
    run.risk = run.at_risk && isFinite(since) ? (now - since) * (run.world_size ?? 1) : null;
  }
  return [...runs].sort((a, b) => b.judged.weight - a.judged.weight);
}
