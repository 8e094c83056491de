// Text of unknown origin for people.

/** Make control, format (right-to-left marks) and surrogate characters visible, as the commands do. */
export const visible = (text) =>
  text.replace(/[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Zl}\p{Zp}]/gu, (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);

/** The end of a long name: it tells more than its begin. */
export function endOf(name, most) {
  const whole = visible(name.slice(-4 * most));
  return whole.length > most ? `…${whole.slice(1 - most)}` : whole;
}

/** A step: a number, several, or a dash for a fixed name. */
export const stepText = (step) => (Array.isArray(step) ? step.join("-") : step ?? "–").toString();

/** An id, as people say it: its step, and which save of it if there were several. */
export function idText(id) {
  const [, step, save] = /^(.*)\.(\d+)$/.exec(id ?? "") ?? [];
  if (step === undefined) return "–";
  if (step === "-") return `save ${save}`;
  return `step ${visible(step)}${save === "1" ? "" : `, save ${save} of it`}`;
}
