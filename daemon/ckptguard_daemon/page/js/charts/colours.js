/* Colours for numbers: a scale whose lightness alone tells its order, and one with two arms around zero. Both go from
   blue to yellow or orange, which people who confuse red and green tell apart. Not finite is never a colour of these. */

const ORDERED = [[12, 32, 82], [48, 62, 108], [92, 96, 112], [134, 130, 116], [184, 170, 96], [246, 226, 88]];
const TWO_ARMS = [[16, 78, 139], [94, 148, 196], [226, 228, 230], [224, 160, 84], [158, 78, 6]];
const STEPS = 255;

function ramp(anchors) {
  const colours = [];
  for (let step = 0; step <= STEPS; step += 1) {
    const place = (step / STEPS) * (anchors.length - 1);
    const index = Math.min(Math.floor(place), anchors.length - 2);
    const mixed = anchors[index].map((from, c) => Math.round(from + (anchors[index + 1][c] - from) * (place - index)));
    colours.push(`rgb(${mixed.join(",")})`);
  }
  return colours;
}

export const RAMPS = { magnitude: ramp(ORDERED), change: ramp(TWO_ARMS) };

/** The colour of a share from 0 to 1. */
export const colourOf = (kind, share) => RAMPS[kind][Math.round(Math.min(Math.max(share, 0), 1) * STEPS)];
