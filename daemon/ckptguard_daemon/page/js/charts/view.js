// The window of steps that all charts of a page share.
import { useEffect, useState } from "preact/hooks";

const SMALLEST = 4; // steps

export class View {
  constructor() {
    this.domain = { min: 0, max: 1 };
    this.min = 0;
    this.max = 1;
    this.fitted = true;
    this.hover = null; // the step under the pointer, wherever it is
    this.listeners = new Set();
  }

  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  tell() {
    for (const listener of this.listeners) listener(this);
  }

  /** Say which steps there are. A window that showed everything goes on to. */
  setDomain(min, max) {
    const room = Math.max(1, (max - min) * 0.02);
    const next = { min: min - room, max: max + room };
    if (next.min === this.domain.min && next.max === this.domain.max) return;
    this.domain = next;
    if (this.fitted) this.fit();
    else this.set(this.min, this.max);
  }

  set(min, max) {
    const whole = this.domain.max - this.domain.min;
    const span = Math.min(whole, Math.max(Math.min(SMALLEST, whole), max - min));
    let from = (min + max) / 2 - span / 2;
    from = Math.min(Math.max(from, this.domain.min), this.domain.max - span);
    this.fitted = span >= whole;
    if (from === this.min && from + span === this.max) return;
    this.min = from;
    this.max = from + span;
    this.tell();
  }

  fit() {
    this.set(this.domain.min, this.domain.max);
  }

  /** Show more (factor above 1) or fewer steps around a step. */
  zoom(factor, at = (this.min + this.max) / 2) {
    this.set(at - (at - this.min) * factor, at + (this.max - at) * factor);
  }

  /** Go on by a share of the window. */
  pan(share) {
    const by = (this.max - this.min) * share;
    this.set(this.min + by, this.max + by);
  }

  /** Bring a step into the window. */
  show(step) {
    const span = this.max - this.min;
    if (step < this.min + span * 0.03) this.set(step - span * 0.2, step + span * 0.8);
    else if (step > this.max - span * 0.03) this.set(step - span * 0.8, step + span * 0.2);
  }

  point(step) {
    if (step === this.hover) return;
    this.hover = step;
    this.tell();
  }
}

/** Draw a component again when the window changes. */
export function useView(view) {
  const [, draw] = useState(0);
  useEffect(() => view.listen(() => draw((n) => n + 1)), [view]);
}
