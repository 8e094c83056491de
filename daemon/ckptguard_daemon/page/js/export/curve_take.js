// What saves one curve: its picture, and its values.
import { html } from "../html.js";
import { curvePicture } from "./pictures.js";
import { Take } from "./take.js";

/** Return what `Curves` calls for the tools of each curve. `marks` of the picture: [{step, name, bad}]. */
export const curveTools = (runName, doc, marks = []) => (curve, found) => {
  const title = curve.title.toLowerCase();
  const columns = [{ title: "step", value: (i) => doc.step[i] }, { title: curve.key, value: (i) => doc[curve.key][i] }];
  const picture = () => {
    const [steps, now] = found.data;
    const words = new Map(found.edges.map(({ step, word }) => [step, word]));
    const values = now.map((value, i) => words.get(steps[i]) ?? value);
    return curvePicture({ title: `${runName}: ${title}`, steps, lines: [{ name: title, values, steps: curve.steps }], marks, log: curve.log && found.positive });
  };
  return html`<${Take} name=${`${runName}-${curve.key}`} what=${`the ${title}`} columns=${columns} rows=${doc.step.map((_, i) => i)} picture=${picture} />`;
};
