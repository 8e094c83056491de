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
