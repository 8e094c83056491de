// What a heat map shows: for each cell a share from 0 to 1 of its scale, or why there is none. Pure.

const LEAST_SPAN = 1; // powers of ten that a scale covers at least: noise does not fill it

export const ABSENT = -1; // the checkpoint does not have the tensor, or its magnitude is not on record
export const SICK = -2; // it has NaN or Inf

const log = (value) => (typeof value === "number" && value > 0 ? Math.log10(value) : null);

/** The cells of one `mode` ("magnitude" or "change"): `shares[tensor][checkpoint]`, and the ends of the scale.
 * `noted(tensor, checkpoint)` is what is wrong there. */
export function heatModel(heat, mode) {
  const notes = new Map();
  for (const [tensor, checkpoint, text] of heat.bad) notes.set(tensor, (notes.get(tensor) ?? new Map()).set(checkpoint, text));
  const values = heat.largest.map((row) => (mode === "change" ? changes(row) : row.map(log)));
  const [low, high] = mode === "change" ? arms(values) : ends(values);
  const shares = values.map((row, tensor) => {
    const found = new Float32Array(row.length);
    const own = notes.get(tensor);
    row.forEach((value, checkpoint) => {
      if (own?.has(checkpoint)) found[checkpoint] = SICK;
      else if (value !== null) found[checkpoint] = (value - low) / (high - low);
      else if (heat.largest[tensor][checkpoint] === 0 && mode === "magnitude") found[checkpoint] = 0;
      else found[checkpoint] = ABSENT;
    });
    return found;
  });
  return { mode, low, high, shares, noted: (tensor, checkpoint) => notes.get(tensor)?.get(checkpoint) };
}

/** By which power of ten each magnitude differs from the one before it that is on record. */
function changes(row) {
  let before = null;
  return row.map((value) => {
    const own = log(value);
    const change = own === null || before === null ? null : own - before;
    before = own ?? before;
    return change;
  });
}

function ends(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const row of values) {
    for (const value of row) {
      if (value === null) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return [-1, 0];
  const missing = Math.max(LEAST_SPAN - (high - low), 0) / 2;
  return [low - missing, high + missing];
}

function arms(values) {
  const [low, high] = ends(values);
  const most = Math.max(Math.abs(low), Math.abs(high), LEAST_SPAN / 4);
  return [-most, most];
}

const byName = new Intl.Collator("en", { numeric: true });

/** The indices of all tensors, layer 2 before layer 10. The roles stay in their order. */
export function inOrder(heat) {
  const roles = [...new Set(heat.tensors.map(({ role }) => role))];
  const keys = heat.tensors.map(({ role, name }) => [roles.indexOf(role), name.slice(0, 200)]);
  const compare = (a, b) => keys[a][0] - keys[b][0] || byName.compare(keys[a][1], keys[b][1]);
  return keys.map((_, index) => index).sort(compare);
}

/** Those of some tensors to show: their names hold each word, and one role if asked for. */
export function chosenTensors(heat, order, { words, role, onlySick }) {
  const sick = new Set(heat.bad.map(([tensor]) => tensor));
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  return order.filter((index) => {
    const { name, role: own } = heat.tensors[index];
    return (!role || own === role) && (!onlySick || sick.has(index)) && wanted.every((w) => name.toLowerCase().includes(w));
  });
}
